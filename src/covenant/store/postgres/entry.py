"""A command on its way through a lane."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

from covenant.model.command import Call, Command
from covenant.model.error import CovenantError
from covenant.rules.context import Commit, Ids

PATIENCE_S: Final = 20.0  # how long a command waits for a database that is away


class Drawn:
    """Ids for one command: decided again, it is given the same."""

    __slots__ = ("_at", "_drawn", "_ids")

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._drawn: list[str] = []
        self._at = 0

    def rewind(self) -> None:
        self._at = 0

    def task(self) -> str:
        return self._next(self._ids.task)

    def lease(self) -> str:
        return self._next(self._ids.lease)

    def _next(self, draw: Callable[[], str]) -> str:
        at = self._at
        if at == len(self._drawn):
            self._drawn.append(draw())
        self._at = at + 1
        return self._drawn[at]


class Group:
    """The commands of one call: they are decided in their order, and so by one lane at a time."""

    __slots__ = ("taken", "waiting")

    def __init__(self) -> None:
        self.taken: object | None = None  # the batch that some of them are in
        self.waiting: deque[Entry] = deque()  # those behind them


class Entry:
    """Most of them have nothing to say beyond what they are made with: the rest is what it is for all."""

    is_exclusive = False  # it changes whom to trust, and is decided while nobody else decides anything
    is_begun = False
    is_step = False  # of what another left to be done, and so is what it leaves itself
    is_alone = False  # decided without others, of which one may have been the cause of a failure
    is_aside = False  # it wants what somebody holds for long, and is tried again from time to time
    comes_first = False  # of a transaction: it wants to see what is committed
    is_over = False  # it has failed, and is not tried again
    is_settled = False  # nothing more will come of it, whether or not its caller has gone away
    tries = 0
    group: Group | None = None
    lane: int | None = None  # the chain that it is about, and no other
    until_s = 0.0  # when it has waited long enough
    not_written: int | None = None  # drawn once, however often it is decided
    settled: asyncio.Future[None] | None = None  # there while a caller that has gone away waits for it
    commit: Commit | None = None
    refusal: CovenantError | None = None

    def __init__(self, command: Command | Call, by: str, ids: Ids, loop: asyncio.AbstractEventLoop) -> None:
        self.command = command
        self.by = by
        self.future: asyncio.Future[Any] = loop.create_future()
        self.source = ids

    @cached_property
    def ids(self) -> Drawn:
        """For whoever may decide it again once it may have been committed."""
        return Drawn(self.source)

    def have_patience(self) -> None:
        """It waits for the tables, from now on."""
        self.until_s = self.future.get_loop().time() + PATIENCE_S

    def draw(self, refused: Callable[[str], int], caller: str) -> int:
        """How many refusals of this caller were not written: counted once."""
        if self.not_written is None:
            self.not_written = refused(caller)
        return self.not_written

    def fail(self, failure: BaseException) -> None:
        self.is_over = True
        if not self.future.done():
            self.future.set_exception(failure)
        self.settle()

    def settle(self) -> None:
        """Nothing more will come of it."""
        self.is_settled = True
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(None)


def observed(future: asyncio.Future[Any]) -> None:
    """For a future that nobody may ever ask for its outcome."""
    if not future.cancelled():
        future.exception()
