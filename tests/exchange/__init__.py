"""The jobs of a daemon, on a daemon without surfaces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from covenant import AuditRow, Mailbox, OpenMailbox
from covenant.exchange.realm import Realm
from covenant.model.peer import Caller
from covenant.serve.daemon import Daemon, Settings
from covenant.store.clock import CountingIds, ManualClock

TOKEN = "cov_operator"
_REALM = Realm.throwaway()


class Site:
    """A daemon, and the boxes of those who send and work; these come in behind the door."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.exchange = daemon.exchange
        engine: Any = daemon.store
        self.box = OpenMailbox(engine, "site")
        self.alice: Mailbox = self.box.of("alice@lab")
        self.bob: Mailbox = self.box.of("bob@lab")

    @property
    def operator(self) -> Caller:
        return self.exchange.authenticate(TOKEN)

    async def rows(self, kind: str) -> list[AuditRow]:
        return [row for row in await self.box.recent_audit(self.box.limits.page_max) if row.kind == kind]


@asynccontextmanager
async def site(clock: ManualClock, store: str = "memory:", **settings: Any) -> AsyncIterator[Site]:
    daemon = Daemon(Settings(store=store, http=None, **settings), _REALM, TOKEN, clock, CountingIds())
    await daemon.start()
    try:
        yield Site(daemon)
    finally:
        await daemon.stop()
