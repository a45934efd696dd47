"""Calls that wait for something to happen: how many there are of each peer, and how the exchange ends them.

A wait is ended as if its time were over. The task that waits is interrupted itself, by way of a cancellation that goes
no further than this wait: a wait costs no task of its own. Nor does one cost a timer that may last as long as any: such
waits end in the order in which they began, so one timer looks after all of them.
"""

from __future__ import annotations

import asyncio
from math import inf
from types import TracebackType
from typing import Any

from msgspec import Struct

from covenant.exchange.bounds import Gauge


class Waits(Gauge):
    def __init__(self, limit: int, wait_ms_max: int) -> None:
        super().__init__(limit, "waits")
        self._wait_s_max = wait_ms_max / 1000
        self._under_way: dict[Wait, float] = {}  # with the end of their time, on the loop's clock
        self._timed: dict[Wait, float] = {}  # likewise; the first ends first
        self._timer: asyncio.TimerHandle | None = None

    def interruptible(self, peer: str, has_place: bool = False) -> Wait:
        """What is inside ends when the exchange says so, and then it goes on behind it. `has_place`: the peer is
        counted among those who wait already."""
        return Wait(None if has_place else self, peer, self._under_way, inf)

    def timed(self, peer: str) -> Wait:
        """The same; and it ends by itself after the longest time that a request may take."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._wait_s_max
        if self._timer is None:
            self._timer = loop.call_at(due, self._look)
        return Wait(self, peer, self._timed, due)

    def end(self, peer: str | None = None) -> None:
        """Those of a peer, or all."""
        for wait in [*self._under_way, *self._timed]:
            if peer is None or wait.peer == peer:
                wait.end()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now, over = loop.time(), []
        self._timer = None
        for wait, due in self._timed.items():
            if due > now:
                self._timer = loop.call_at(due, self._look)
                break
            over.append(wait)
        for wait in over:
            wait.end()


class Wait(Struct, eq=False):
    _gauge: Gauge | None
    peer: str
    _among: dict[Wait, float]
    _due: float
    _task: asyncio.Task[Any] | None = None
    _is_over: bool = False

    def __enter__(self) -> None:
        if self._gauge is not None:
            self._gauge.enter(self.peer)
        self._task = asyncio.current_task()
        self._among[self] = self._due

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        del self._among[self]
        if self._gauge is not None:
            self._gauge.leave(self.peer)
        if not self._is_over:
            return False
        assert self._task is not None
        is_ours = not self._task.uncancel()  # unless somebody else cancels it too
        return is_ours and kind is asyncio.CancelledError

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            assert self._task is not None
            self._task.cancel()
