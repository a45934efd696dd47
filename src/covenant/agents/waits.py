"""How a run waits: every place in its function that does, and what it takes for each to go on. (Contract 22-24.)"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from typing import Any, Final

from covenant.agents.error import CancelRequested, Suspended
from covenant.agents.hold import Hold
from covenant.agents.inbox import Inbox
from covenant.agents.notes import Notes
from covenant.model.run import Wait
from covenant.rules.run.wait import checked_wait

_TURNS: Final = 2
_TURNS_OF_BRANCHES: Final = 32


class Waiting:
    """One place in the function that waits."""

    def __init__(self, wait: Wait | None, is_there: Callable[[], bool]) -> None:
        self.wait = wait  # None: for a commit
        self.is_there = is_there
        self.task = asyncio.current_task()
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def go_on(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Waits:
    def __init__(self, hold: Hold, notes: Notes, inbox: Inbox) -> None:
        self.count = 0  # how often the function has waited
        self.is_commit_due = False
        self.is_told = False  # that a cancel is asked for
        self._hold = hold
        self._notes = notes
        self._inbox = inbox
        self._waits: list[Waiting] = []
        self._has_branches = False  # tasks of the function's own have waited

    # --- for the function ---------------------------------------------------------------------------------

    async def wait(self, wait: Wait, is_there: Callable[[], bool]) -> None:
        if wait.signals or wait.until_ms is not None or wait.first:
            checked_wait(wait, self._hold.box.limits)
        if wait.signals:
            self._inbox.forget_seen()
        if wait.tasks and is_there():
            return
        waiting = Waiting(wait, is_there)
        self._waits.append(waiting)
        await self._wait_in(waiting)

    async def flush(self) -> None:
        """Until everything so far is committed."""
        waiting = Waiting(None, lambda: False)
        self._waits.append(waiting)
        self.is_commit_due = True
        await self._wait_in(waiting)

    def commit_soon(self) -> None:
        """The same for nobody to wait for."""
        self.is_commit_due = True
        self._hold.news.set()

    async def make_room(self, size: int = 0) -> None:
        """What is heard may become an entry, and must not be refused then; nor is there an operation that could be
        refused for each thing that is noted. `size`: of what comes, in bytes."""
        if self._notes.is_full or not self._notes.carries(size):
            await self.flush()

    async def room_for(self, size: int) -> None:
        """For something of so many bytes; how many there may be is told to who asks for them."""
        if not self._notes.carries(size):
            await self.flush()

    async def _wait_in(self, waiting: Waiting) -> None:
        hold = self._hold
        hold.probe("a wait")
        self.count += 1
        hold.news.set()
        if hold.is_dropped:
            waiting.future.cancel()  # as those that waited before: nothing is committed for it any more
        elif not hold.is_held:
            hold.wake()
        try:
            await waiting.future
        finally:
            if waiting in self._waits:  # it was canceled
                self._waits.remove(waiting)
                hold.news.set()
        if hold.is_dropped:
            raise Suspended

    # --- for the one who drives it ------------------------------------------------------------------------

    @property
    def all(self) -> list[Waiting]:
        return list(self._waits)

    @property
    def flushing(self) -> list[Waiting]:
        """Those that go on as soon as what is noted now is committed."""
        return [waiting for waiting in self._waits if waiting.wait is None]

    @property
    def awaited(self) -> list[Wait]:
        return [waiting.wait for waiting in self._waits if waiting.wait is not None]

    @property
    def is_any_there(self) -> bool:
        return any(waiting.wait is not None and waiting.is_there() for waiting in self._waits)

    async def until_still(self, function: asyncio.Task[Any]) -> None:
        """Until every place in the function waits for something that is not there, or the function has ended."""
        news = self._hold.news
        while not function.done():
            self._resolve()
            if self._waits or self.is_commit_due:
                news.clear()
                if await self._is_still(function):
                    return
            else:
                news.clear()
                await news.wait()

    async def _is_still(self, function: asyncio.Task[Any]) -> bool:
        """Whether nothing happens for some turns of the loop. From one task of the function's own to another, as where
        a group of them is left, it takes several until anything is seen here; and a run that were parked meanwhile
        would be lost with its worker."""
        self._has_branches = self._has_branches or any(waiting.task is not function for waiting in self._waits)
        for _ in range(_TURNS_OF_BRANCHES if self._has_branches else _TURNS):
            await asyncio.sleep(0)
            if self._hold.news.is_set():
                return False
        return True

    def _resolve(self) -> None:
        """Let those go on whose thing is there."""
        for waiting in [w for w in self._waits if w.future.done() or (w.wait is not None and w.is_there())]:
            self._waits.remove(waiting)
            waiting.go_on()
            self._hold.news.set()

    def union(self, ended: Container[str]) -> Wait | None:
        """All that any place in the function waits for; the first of it is enough to look again. An effect in doubt is
        decided before anything else goes on. An answer may carry a part of what is there: the rest is asked for."""
        waits = self.awaited
        if not waits:
            return None
        doubted = next((wait for wait in waits if wait.doubt is not None), None)
        if doubted is not None:
            return doubted
        tasks = frozenset(i for wait in waits for i in wait.tasks if i not in ended)
        if len(waits) == 1:
            only = waits[0]
            if not only.first:  # of more than one wait may name, the others come next
                tasks = frozenset(sorted(tasks)[: self._hold.box.limits.batch_max])
            return Wait(tasks, only.first, only.fail_fast, only.signals, only.until_ms)
        signals = tuple(dict.fromkeys(name for wait in waits for name in wait.signals))
        times = [wait.until_ms for wait in waits if wait.until_ms is not None]
        return Wait(tasks, True, False, signals, min(times, default=None))

    def tell_cancel(self) -> None:
        """Once: what the function then does to clean up may wait like anything else."""
        self.is_told = True
        for waiting in [w for w in self._waits if w.wait is not None]:
            self._waits.remove(waiting)
            if not waiting.future.done():
                waiting.future.set_exception(CancelRequested("the sender asked for an end"))

    def drop(self) -> None:
        for waiting in self._waits:
            if not waiting.future.done():
                waiting.future.cancel()
