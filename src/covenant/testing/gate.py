"""The one way from a worker under test to its store: what goes through is counted, and when the worker has died nothing
goes through any more, whatever its tasks still try while they are cleared away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from covenant.agents.worker import AgentWorker
from covenant.model.audit import AuditRow
from covenant.model.command import Command, CompactHistory, DrainResults, LeaseTasks
from covenant.model.limits import Limits
from covenant.model.query import GetTask, ListInputs, Query
from covenant.model.view import Compaction, Inputs, QueueEntry
from covenant.store.embedded import Embedded
from covenant.work.pulse import Line, Pulse
from covenant.worker import Worker

T = TypeVar("T")


class Gate:
    """An engine. `point` is called where a death makes a difference, and raises where there is one; `check` raises
    after it; `moved` is set after every call."""

    def __init__(
        self,
        engine: Embedded,
        moved: asyncio.Event,
        point: Callable[[str], None] = lambda place: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.limits: Limits = engine.limits
        self._engine = engine
        self._point = point
        self._check = check
        self._moved = moved

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def run(self, command: Command) -> Any:
        return await self._change(type(command).__name__, lambda: self._engine.run(command))

    async def run_all(self, commands: Sequence[Command]) -> list[Any]:
        return await self._change("several commands", lambda: self._engine.run_all(commands))

    async def take(self, command: LeaseTasks | DrainResults, wait_ms: int | None = None) -> list[Any]:
        return await self._change(type(command).__name__, lambda: self._engine.take(command, wait_ms))

    async def compact(self, command: CompactHistory) -> Compaction:
        return await self._change("a compaction", lambda: self._engine.compact(command))

    async def ask(self, query: Query) -> Any:
        return await self._look(type(query).__name__, lambda: self._engine.ask(query))

    async def watch(self, query: GetTask, after: int, wait_ms: int | None = None) -> QueueEntry:
        return await self._look("a watch", lambda: self._engine.watch(query, after, wait_ms))

    async def listen(self, query: ListInputs, wait_ms: int | None = None, cancel_known: bool = False) -> Inputs:
        return await self._look("a listening", lambda: self._engine.listen(query, wait_ms, cancel_known))

    async def audit(self, limit: int) -> list[AuditRow]:
        return await self._look("the audit", lambda: self._engine.audit(limit))

    async def _change(self, name: str, act: Callable[[], Awaitable[T]]) -> T:
        """What is sent and what is answered is on its way for a while, as it would be to a daemon."""
        self._point(f"before {name}")
        await asyncio.sleep(0)
        self._check()
        try:
            reply = await act()
        finally:
            self._moved.set()
        await asyncio.sleep(0)
        self._point(f"after {name}")
        return reply

    async def _look(self, name: str, act: Callable[[], Awaitable[T]]) -> T:
        self._point(f"at {name}")
        await asyncio.sleep(0)
        self._check()
        return await act()


class _Still(Pulse):
    """Signs of life come with real time, and there is none."""

    async def __aenter__(self) -> _Still:
        return self

    async def __aexit__(self, *_: object) -> None: ...


class _StillWorker(Worker):
    def _pulse_on(self, line: Line) -> Pulse:
        return _Still(line, self._heartbeat_ms)


class StillAgentWorker(AgentWorker):
    """One that starts no thread."""

    _worker_type = _StillWorker
