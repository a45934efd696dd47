"""The one way from a worker under test to its store: what goes through is counted, and when the worker has died nothing
goes through any more, whatever its tasks still try while they are cleared away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from covenant.agents.worker import AgentWorker
from covenant.model.audit import AuditRow
from covenant.model.command import Command, CompactHistory, DrainResults, LeaseTasks
from covenant.model.limits import Limits
from covenant.model.query import GetTask, ListInputs, Query
from covenant.model.view import Compaction, Inputs, QueueEntry
from covenant.store.embedded import Embedded
from covenant.worker import Worker, _Line, _Pulse


class Gate:
    """An engine. `point` is called where a death makes a difference, and raises where there is one; `moved` is set
    after every call."""

    def __init__(self, engine: Embedded, point: Callable[[str], None], moved: asyncio.Event) -> None:
        self.limits: Limits = engine.limits
        self._engine = engine
        self._point = point
        self._moved = moved

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def run(self, command: Command) -> Any:
        name = type(command).__name__
        self._point(f"before {name}")
        try:
            reply = await self._engine.run(command)
        finally:
            self._moved.set()
        self._point(f"after {name}")
        return reply

    async def run_all(self, commands: Sequence[Command]) -> list[Any]:
        self._point("before several commands")
        try:
            replies = await self._engine.run_all(commands)
        finally:
            self._moved.set()
        self._point("after several commands")
        return replies

    async def take(self, command: LeaseTasks | DrainResults, wait_ms: int | None = None) -> list[Any]:
        name = type(command).__name__
        self._point(f"before {name}")
        try:
            taken = await self._engine.take(command, wait_ms)
        finally:
            self._moved.set()
        self._point(f"after {name}")
        return taken

    async def ask(self, query: Query) -> Any:
        self._point(f"at {type(query).__name__}")
        return await self._engine.ask(query)

    async def watch(self, query: GetTask, after: int, wait_ms: int | None = None) -> QueueEntry:
        self._point("at a watch")
        return await self._engine.watch(query, after, wait_ms)

    async def listen(self, query: ListInputs, wait_ms: int | None = None, cancel_known: bool = False) -> Inputs:
        self._point("at a listening")
        return await self._engine.listen(query, wait_ms, cancel_known)

    async def compact(self, command: CompactHistory) -> Compaction:
        self._point("before a compaction")
        return await self._engine.compact(command)

    async def audit(self, limit: int) -> list[AuditRow]:
        return await self._engine.audit(limit)


class _Still(_Pulse):
    """Signs of life come with real time, and there is none."""

    async def __aenter__(self) -> _Still:
        return self

    async def __aexit__(self, *_: object) -> None: ...


class _StillWorker(Worker):
    def _pulse_on(self, line: _Line) -> _Pulse:
        return _Still(line, self._heartbeat_ms)


class StillAgentWorker(AgentWorker):
    """One that starts no thread."""

    _worker_type = _StillWorker
