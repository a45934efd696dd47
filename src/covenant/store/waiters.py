"""Who waits for what. One event wakes one waiter that is concerned, the one that waited longest."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import TypeAlias

from covenant.model.error import TooManyWaiters

ALL = "*"
_Waiter: TypeAlias = tuple[asyncio.Future[str | None], Set[str] | None]


class Waiters:
    def __init__(self, waiters_max: int, on_wait: Callable[[], None] = lambda: None) -> None:
        self._queues: dict[str, deque[_Waiter]] = {}
        self.count = 0
        self._waiting = 0
        self._max = waiters_max
        self._on_wait = on_wait

    async def wait(self, name: str, wait_s: float | None = None, wants: Set[str] | None = None) -> str | None:
        """Until woken, or until the time is over; with the kind of what woke it, if that has one. `wants` are the kinds
        that concern this waiter, None is all. A waiter that goes away after it was woken wakes the next one in its
        place."""
        if self._waiting >= self._max:
            raise self._full()
        future = self.enter(name, wants)
        timer = None
        if wait_s is not None:
            timer = asyncio.get_running_loop().call_later(wait_s, self._give_up, name, future)
        self._on_wait()
        self._waiting += 1
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.wake_one(name, future.result())
            else:
                self._drop(name, future)
            raise
        finally:
            self._waiting -= 1
            self.count -= 1
            if timer is not None:
                timer.cancel()

    @contextmanager
    def room(self) -> Iterator[None]:
        """For one who waits now; refused where too many do."""
        if self._waiting >= self._max:
            raise self._full()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def _full(self) -> TooManyWaiters:
        return TooManyWaiters(f"{self._max} calls are waiting already", limit=self._max)

    def enter(self, name: str, wants: Set[str] | None = None) -> asyncio.Future[str | None]:
        """A place among those who are woken, taken before the look; `leave` gives it up."""
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = deque()
        queue.append((future, wants))
        self.count += 1
        return future

    def leave(self, name: str, future: asyncio.Future[str | None], is_passed_on: bool = False) -> None:
        """`is_passed_on`: who leaves with what it was woken for not used wakes the next one."""
        self.count -= 1
        if future.done() and not future.cancelled():
            if is_passed_on:
                self.wake_some(name, future.result())
        else:
            self._drop(name, future)

    @contextmanager
    def ticket(self, name: str) -> Iterator[asyncio.Future[str | None]]:
        with self.room():
            future = self.enter(name)
            try:
                yield future
            finally:
                self.leave(name, future)

    def names(self) -> list[str]:
        """Those that somebody waits for."""
        return list(self._queues)

    def wake_some(self, name: str, kind: str | None = None) -> None:
        """For work of a kind that is not known: one waiter, or all where they are not after the same; and then those
        who wait for anything, too, since it may be for none of them."""
        if kind is not None:
            self.wake_one(name, kind)
            return
        for queue in (name, ALL):
            if any(wants is not None for _, wants in self._queues.get(queue, ())):
                self.wake_all(queue)
            elif self.wake(queue):
                return

    def _give_up(self, name: str, future: asyncio.Future[str | None]) -> None:
        if not future.done():
            self._drop(name, future)
            future.set_result(None)

    def _drop(self, name: str, future: asyncio.Future[str | None]) -> None:
        for at, (waiting, _) in enumerate(self._queues.get(name, ())):
            if waiting is future:
                self._remove(name, at)
                return

    def _remove(self, name: str, at: int) -> None:
        queue = self._queues[name]
        del queue[at]
        if not queue:
            del self._queues[name]

    def wake(self, name: str, kind: str | None = None) -> bool:
        for at, (future, wants) in enumerate(self._queues.get(name, ())):
            if not future.done() and (kind is None or wants is None or kind in wants):
                self._remove(name, at)
                future.set_result(kind)
                return True
        return False

    def wake_one(self, name: str, kind: str | None = None) -> None:
        """Somebody who waits for just this, or else somebody who waits for anything."""
        if not self.wake(name, kind):
            self.wake(ALL, kind)

    def wake_all(self, name: str) -> None:
        for future, _ in self._queues.pop(name, ()):
            if not future.done():
                future.set_result(None)

    def wake_everyone(self) -> None:
        for name in list(self._queues):
            self.wake_all(name)
