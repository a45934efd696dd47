"""What an agent may wait for: a task, a signal, a time. Nothing happens by making one; it is awaited, or joined."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from msgspec import Struct


class Asker(Protocol):
    """Who has asked for a task, and can wait for it."""

    async def result_of(self, pending: PendingTask) -> Any: ...

    async def cancel(self, pending: PendingTask) -> None: ...


class PendingTask:
    """A task of the run. It is sent with the next commit; awaited, it is its result, or raises `TaskFailed`."""

    def __init__(self, ctx: Asker, task_id: str, kind: str, output_type: Any) -> None:
        self._ctx = ctx
        self.id = task_id
        self.kind = kind
        self.output_type = output_type

    def __await__(self) -> Generator[Any, None, Any]:
        return self._ctx.result_of(self).__await__()

    async def cancel(self) -> None:
        await self._ctx.cancel(self)

    def __repr__(self) -> str:
        return f"<task {self.kind} {self.id}>"


class SignalWait(Struct, frozen=True):
    """A signal by its name or a pattern, for `any_of`."""

    name: str


class Timer(Struct, frozen=True):
    """A time from now, for `any_of`."""

    after_ms: int


class Selected(Struct, frozen=True):
    """What came first: its place among what was waited for, its value, and the tasks that are left."""

    index: int
    value: Any
    rest: tuple[Any, ...] = ()


class Settled(Struct, frozen=True):
    """How one task of `join_all_settled` ended."""

    status: str  # completed, failed, canceled
    value: Any = None
    error: Any = None

    @property
    def is_ok(self) -> bool:
        return self.status == "completed"
