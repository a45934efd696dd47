"""The worker around a run, as far as the run needs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from covenant.agents.definition import TaskFunction
from covenant.mailbox import Mailbox
from covenant.model.task import Result
from covenant.model.view import Delivery
from covenant.store.clock import Clock

T = TypeVar("T")


class Host(Protocol):
    box: Mailbox
    clock: Clock
    tasks: dict[str, TaskFunction]

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Until the mailbox has answered, however long it is away."""

    async def do(self, function: TaskFunction, delivery: Delivery) -> Result | None:
        """Do a task; None when somebody else tells what becomes of it."""

    async def perform(self, function: Callable[..., Any], key: str, idempotent: bool) -> Any:
        """Do an effect, and get what it returned."""

    def chance(self, key: str) -> bytes:
        """Sixteen bytes for the operation under this key."""

    def probe(self, place: str) -> None:
        """Told of every step, for those who test what a crash there would do."""
