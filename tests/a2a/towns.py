"""A town that is closed and opened again, with bounds and a clock of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from covenant.exchange.exchange import Exchange
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model.limits import Limits
from covenant.serve.a2a.directory import agent_of
from covenant.serve.a2a.operations import Agent
from covenant.store.clock import Clock, RandomIds, SystemClock
from covenant.store.registry import engine_for
from tests.a2a.conftest import WORKING, Town
from tests.postgres import store_for

TOKEN = "token"


class Place:
    """A folder, a store that stands for one, or nothing but memory; whoever was enrolled comes back."""

    def __init__(self, url: str, limits: Limits | None = None, clock: Clock | None = None) -> None:
        self.url = url
        self.limits = limits or Limits()
        self.clock = clock or SystemClock()
        self.ids = RandomIds()
        self.realm = Realm.throwaway()
        self._tokens: tuple[str, str] | None = None
        self._card: dict[str, Any] = {"name": "writer"}
        self._agent: Agent | None = None

    def replies(self) -> Place:
        """The agent says that it may answer with a message."""
        self._card["capabilities"] = {"extensions": [{"uri": "urn:covenant:direct-reply"}]}
        return self

    async def open(self) -> Town:
        scheme, _, folder = self.url.partition(":")
        url = await store_for(folder) if scheme == "postgresql" else self.url
        store: Any = engine_for(url, self.limits, self.clock, self.ids)
        exchange = Exchange(store, self.realm, self.clock, self.ids)
        await exchange.open(TOKEN)
        operator = exchange.authenticate(TOKEN)
        if self._tokens is None:
            _, alice = await exchange.enroll(operator, "alice@lab", None, WORKING)
            _, writer = await exchange.enroll(operator, "writer@lab", None, WORKING)
            self._tokens = alice, writer
            who = exchange.authenticate(writer).agent
            self._agent = agent_of(await exchange.run(operator, c.PublishCard(None, who, self._card)))
        alice, writer = self._tokens
        assert self._agent is not None
        return Town(exchange, exchange.authenticate(alice), exchange.authenticate(writer), self._agent)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Town]:
        town = await self.open()
        try:
            yield town
        finally:
            await town.exchange.close()


def place(engine: str, folder: Path, limits: Limits | None = None, clock: Clock | None = None) -> Place:
    return Place("memory:" if engine == "memory" else f"{engine}:{folder}/data", limits, clock)
