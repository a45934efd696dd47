"""A daemon in the test's own process, on real sockets, with the clock and the ids of the test."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from itertools import count
from pathlib import Path
from typing import Final

from covenant import AgentId, Limits, Mailbox, OpenMailbox
from covenant.exchange.bounds import Bounds
from covenant.exchange.realm import Realm
from covenant.rules.context import Ids
from covenant.serve import wire as w
from covenant.serve.daemon import Daemon, Settings
from covenant.store.clock import Clock

OPERATOR_TOKEN: Final = "cov_operator"
NAMES: Final = ("alice@lab", "bob@lab", "carol@lab")
WORKING: Final = ("a2a.send.*", "a2a.respond.*", "a2a.cancel.*")
_REALM: Final = Realm.throwaway()
_SOCKETS: Final = Path(tempfile.mkdtemp(prefix="cov-"))  # a socket's path is short
_NUMBERS: Final = count()
atexit.register(shutil.rmtree, _SOCKETS, ignore_errors=True)


async def start_daemon(
    store: str, limits: Limits, clock: Clock | None = None, ids: Ids | None = None, bounds: Bounds | None = None
) -> Daemon:
    socket = _SOCKETS / f"{next(_NUMBERS)}"
    settings = Settings(store=store, http="127.0.0.1:0", ipc=socket, limits=limits, bounds=bounds or Bounds())
    daemon = Daemon(settings, _REALM, OPERATOR_TOKEN, clock, ids)
    await daemon.start()
    return daemon


def url_of(daemon: Daemon, scheme: str) -> str:
    return str(daemon.url) if scheme == "http" else f"unix:{daemon.settings.ipc}"


class Realmful:
    """The tokens of the usual agents, whoever serves them."""

    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}

    async def enroll(self, daemon: Daemon) -> None:
        """With the keys that their labels stand for, so that a test need not know where it runs."""
        operator = daemon.exchange.authenticate(OPERATOR_TOKEN)
        for name in NAMES:
            if daemon.store.agent_of(name) is None:
                _, token = await daemon.exchange.enroll(operator, name, AgentId.named(name).pubkey, WORKING)
                self.tokens[name] = token

    def open(self, daemon: Daemon, scheme: str, ids: Ids | None = None) -> OpenMailbox:
        return Mailbox.open(url_of(daemon, scheme), token=OPERATOR_TOKEN, tokens=self.tokens, ids=ids)


async def enrolled(box: OpenMailbox, display: str, *grants: str) -> w.PeerEnrolled:
    """A new peer, by way of the service."""
    engine = box._engine
    reply: w.PeerEnrolled = await engine.call(  # type: ignore[attr-defined]
        w.EnrollPeer(display=display, grants=list(grants)), w.PeerEnrolled
    )
    return reply
