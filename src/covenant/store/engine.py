"""The store contract: what every engine offers, and nothing more.

An engine loads, calls the rules, makes the commit durable, indexes and wakes. It holds no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from covenant.model.audit import AuditRow
from covenant.model.command import Command, DrainResults, LeaseTasks
from covenant.model.limits import Limits
from covenant.model.view import Compaction
from covenant.rules.context import Context, View

T = TypeVar("T")


class Engine(Protocol):
    limits: Limits

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    def run(self, command: Command) -> Coroutine[Any, Any, Any]:
        """Decide, commit, make durable; then the reply, or the refusal."""

    async def run_all(self, commands: list[Command]) -> list[Any]:
        """The same for many that share the wait. Each stands for itself: a refusal is returned in its place."""

    async def take(self, command: LeaseTasks | DrainResults) -> list[Any]:
        """Run it until it brings something. A caller that goes away has taken nothing."""

    async def read(self, query: Callable[[View, Context], T]) -> T:
        """Ask the state; the answer shows only what is durable."""

    async def wait_change(self, task_id: str, generation: int, cancel_requested: bool) -> None:
        """Until this task has another generation, or a cancel was asked for, or either might be."""

    async def audit(self, limit: int) -> list[AuditRow]:
        """The newest rows, oldest first."""

    async def compact(self, older_than_ms: int | None) -> Compaction: ...
