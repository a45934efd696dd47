"""A client's way to the mailbox: one daemon as long as it answers, then the next; each call goes into the history."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, Final, TypeVar

from covenant import CovenantError, Mailbox, OpenMailbox
from covenant.a2a.fault import AWAY, BUSY, Fault
from tests.cluster.daemons import ServedDaemon
from tests.cluster.history import History, Outcome, Verb

ANSWER_S: Final = 4.0
PAUSE_S: Final = 0.05

T = TypeVar("T")

# Codes that say: not here, not now.
_ELSEWHERE: Final = frozenset(
    ("unreachable", "store_unavailable", "store_closed", "draining", "rate_limited", "too_many_connections", "internal")
)
_NOT_DONE: Final = frozenset(("store_closed", "draining", "rate_limited", "too_many_connections"))


class NoAnswer(Exception):
    """The call was not answered, or not with what it asked for: whether it was done is in the history."""


class Progress:
    """How much has come to its end, for those who wait until there is more."""

    def __init__(self) -> None:
        self.count = 0
        self.failures = 0
        self._moved = asyncio.Condition()

    async def move(self) -> None:
        async with self._moved:
            self.count += 1
            self._moved.notify_all()

    async def fail(self) -> None:
        async with self._moved:
            self.failures += 1
            self._moved.notify_all()

    async def wait_for(self, what: Callable[[], bool], within_s: float, why: str) -> None:
        try:
            async with asyncio.timeout(within_s), self._moved:
                await self._moved.wait_for(what)
        except TimeoutError:
            raise AssertionError(f"in {within_s} s there was no {why}") from None


class Caller:
    def __init__(
        self,
        name: str,
        daemons: list[ServedDaemon],
        token: str,
        progress: Progress,
        chance: random.Random,
        first: int = 0,
    ) -> None:
        self.name = name
        self.history = History(name)
        self.chance = chance
        self.progress = progress
        self.daemons = daemons
        self._token = token
        self._at = first % len(daemons)
        self._box: OpenMailbox | None = None
        self._leaving: set[asyncio.Future[Any]] = set()

    def some_id(self) -> str:
        return str(uuid.UUID(int=self.chance.getrandbits(128), version=4))

    @property
    def daemon(self) -> ServedDaemon:
        return self.daemons[self._at]

    async def call(
        self, verb: Verb, ask: Callable[[Mailbox], Awaitable[T]], *, answer_s: float = ANSWER_S, **facts: Any
    ) -> T:
        """What it is answered; a refusal is raised and noted. What is done the caller notes itself: it knows what the
        answer says."""
        began = monotonic()
        try:
            return await self._ask(ask, answer_s)
        except CovenantError as refusal:
            outcome = outcome_of(refusal)
            said = {"text": refusal.message} if refusal.code == "internal" else {}
            self.history.note(
                verb, began, outcome=outcome, code=refusal.code, daemon=self.daemon.number, **{**facts, **said}
            )
            if refusal.code not in _ELSEWHERE:
                raise
            await self.go_elsewhere()
            raise NoAnswer(refusal.code) from refusal
        except TimeoutError:
            self.history.note(verb, began, outcome=Outcome.UNKNOWN, code="timeout", daemon=self.daemon.number, **facts)
            await self.go_elsewhere()
            raise NoAnswer("timeout") from None

    def done(self, verb: Verb, began: float, **facts: Any) -> None:
        self.history.note(verb, began, daemon=self.daemon.number, **facts)

    async def _ask(self, ask: Callable[[Mailbox], Awaitable[T]], answer_s: float) -> T:
        """Who does not answer in time is left behind: the call is cancelled, which takes its own time."""

        async def asking() -> T:
            if self._box is None:
                self._box = await Mailbox.open(self.daemon.url, token=self._token)
            return await ask(self._box)

        task = asyncio.ensure_future(asking())
        try:
            await asyncio.wait([task], timeout=answer_s)
        except asyncio.CancelledError:
            task.cancel()
            self._leave(task)
            raise
        if task.done():
            return task.result()
        task.cancel()
        self._leave(task)
        raise TimeoutError

    async def go_elsewhere(self) -> None:
        await self.progress.fail()
        box, self._box = self._box, None
        if box is not None:
            self._leave(asyncio.ensure_future(box.close()))
        self._at = (self._at + 1) % len(self.daemons)
        await asyncio.sleep(PAUSE_S * self.chance.uniform(0.5, 1.5))  # clients do not go round in step

    def _leave(self, work: asyncio.Future[Any]) -> None:
        self._leaving.add(work)
        work.add_done_callback(self._left)

    def _left(self, work: asyncio.Future[Any]) -> None:
        self._leaving.discard(work)
        if not work.cancelled():
            work.exception()

    async def close(self) -> None:
        if self._box is not None:
            with contextlib.suppress(CovenantError):
                await self._box.close()
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=PAUSE_S + 30)


def outcome_of(refusal: CovenantError) -> Outcome:
    """Whether what was refused may have been done all the same."""
    if isinstance(refusal, Fault):
        return Outcome.UNKNOWN if refusal.kind in (AWAY, BUSY) else Outcome.REFUSED
    told = refusal.details.get("outcome")
    if refusal.code in _NOT_DONE or told in ("not_sent", "not_stored"):
        return Outcome.REFUSED
    return Outcome.UNKNOWN if refusal.code in _ELSEWHERE else Outcome.REFUSED
