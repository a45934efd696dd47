"""A daemon, and those who use it, in processes of their own, to be killed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import uvloop

from covenant import Limits, Mailbox, OpenMailbox
from covenant.a2a import Client, Patience
from covenant.a2a.interface import Interface
from covenant.a2a.transport import Wire
from covenant.serve import wire as w
from covenant.serve.daemon import Daemon, Settings
from covenant.serve.home import Home
from tests.beings import PATIENCE_S, Being, until_hung_up
from tests.daemons import WORKING

QUICK: Final = Patience(first_s=0.001, longest_s=0.05, failures_max=10_000)
SMALL: Final = Limits(segment_bytes=60_000, snapshot_every_bytes=90_000, finished_tail_max=16, archive_batch=16)
GRPC: Final = "GRPC"


def serve(line: Connection, folder: str, limits: Limits) -> None:
    async def main() -> None:
        home = Home(folder)
        home.make()
        settings = Settings(
            store=f"file:{home.data}", http="127.0.0.1:0", grpc="127.0.0.1:0", ipc=home.socket, limits=limits
        )
        daemon = Daemon(settings, home.realm(), home.tokens)
        await daemon.start()
        line.send((daemon.url, f"http://{daemon.grpc_address}"))
        await until_hung_up(line)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


class House:
    """The daemon's home, whichever daemon is in it: alice asks, the writer works."""

    def __init__(self, folder: Path, limits: Limits = SMALL) -> None:
        self._folder = folder
        self._limits = limits
        self._daemon: Being | None = None
        self.socket = f"unix:{folder}/sock"
        self.url = self.grpc_url = ""
        self.tokens: dict[str, str] = {}
        self.card: dict[str, Any] = {}
        self.is_up = asyncio.Event()

    async def start(self, is_stranger: bool = False) -> None:
        self._daemon = await asyncio.to_thread(Being, serve, str(self._folder), self._limits, is_stranger=is_stranger)
        self.url, self.grpc_url = await self._daemon.hear()
        self.is_up.set()

    async def kill(self) -> None:
        assert self._daemon is not None
        self.is_up.clear()
        self._daemon.kill()
        assert await self._daemon.end() == -9

    async def settle(self) -> None:
        async with Mailbox.open(self.socket) as operator:
            engine: Any = operator._engine
            for name in ("alice", "writer"):
                peer = await engine.call(w.EnrollPeer(display=name, grants=list(WORKING)), w.PeerEnrolled)
                self.tokens[name] = peer.token
            await engine.call(w.PublishAgent(name="writer"), Any)
        async with Client.connect(self.url) as client:
            self.card = client.card

    def box(self, name: str) -> OpenMailbox:
        return Mailbox.open(self.socket, token=self.tokens[name])

    def place(self, binding: str) -> str:
        """Where the daemon of the moment is."""
        return self.grpc_url if binding == GRPC else self.url

    def client(self, binding: str, url: str) -> Client:
        """Alice's, by whichever way the URL leads."""
        return client_at(self.card, binding, url, self.tokens["alice"])


def client_at(card: dict[str, Any], binding: str, url: str, token: str) -> Client:
    return Client(card, Interface(url, binding, "1.1"), Wire(token, PATIENCE_S, PATIENCE_S), (), QUICK)


@asynccontextmanager
async def housed(limits: Limits = SMALL) -> AsyncIterator[House]:
    folder = Path(tempfile.mkdtemp(prefix="cov-"))  # the path of a socket is short
    house = House(folder, limits)
    await house.start()
    try:
        await house.settle()
        yield house
    finally:
        await house.kill()
        shutil.rmtree(folder)
