"""Who waits for what. One event wakes one waiter that is concerned, the one that waited longest."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from covenant.model.error import TooManyWaiters

ALL = "*"


class Waiters:
    def __init__(self, waiters_max: int, on_wait: Callable[[], None] = lambda: None) -> None:
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        self.count = 0
        self._max = waiters_max
        self._on_wait = on_wait

    async def wait(self, name: str, wait_s: float | None = None) -> None:
        """Until woken, or until the time is over. A waiter that goes away after it was woken wakes the next one in its
        place."""
        if self.count >= self._max:
            raise TooManyWaiters(f"{self._max} calls are waiting already", limit=self._max)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = deque()
        queue.append(future)
        timer = None if wait_s is None else loop.call_later(wait_s, self._give_up, name, future)
        self.count += 1
        self._on_wait()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.wake_one(name)
            raise
        finally:
            self.count -= 1
            if timer is not None:
                timer.cancel()
            if not future.done() or future.cancelled():
                self._drop(name, future)

    def enter(self, name: str) -> asyncio.Future[None]:
        """A place among those who wait; `leave` gives it up."""
        if self.count >= self._max:
            raise TooManyWaiters(f"{self._max} calls are waiting already", limit=self._max)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = deque()
        queue.append(future)
        self.count += 1
        return future

    def leave(self, name: str, future: asyncio.Future[None], is_passed_on: bool = False) -> None:
        """`is_passed_on`: who leaves with what it was woken for not used wakes the next one."""
        self.count -= 1
        if future.done() and not future.cancelled():
            if is_passed_on:
                self.wake_one(name)
        else:
            self._drop(name, future)

    @contextmanager
    def ticket(self, name: str) -> Iterator[asyncio.Future[None]]:
        future = self.enter(name)
        try:
            yield future
        finally:
            self.leave(name, future)

    def names(self) -> list[str]:
        """Those that somebody waits for."""
        return list(self._queues)

    def _give_up(self, name: str, future: asyncio.Future[None]) -> None:
        if not future.done():
            self._drop(name, future)
            future.set_result(None)

    def _drop(self, name: str, future: asyncio.Future[None]) -> None:
        queue = self._queues.get(name)
        if queue is not None and future in queue:
            queue.remove(future)
            if not queue:
                del self._queues[name]

    def wake(self, name: str) -> bool:
        queue = self._queues.get(name)
        while queue:
            future = queue.popleft()
            if not queue:
                del self._queues[name]
            if not future.done():
                future.set_result(None)
                return True
        return False

    def wake_one(self, name: str) -> None:
        """Somebody who waits for just this, or else somebody who waits for anything."""
        if not self.wake(name):
            self.wake(ALL)

    def wake_all(self, name: str) -> None:
        for future in self._queues.pop(name, ()):
            if not future.done():
                future.set_result(None)

    def wake_everyone(self) -> None:
        for name in list(self._queues):
            self.wake_all(name)
