"""Calls that wait for something to happen: how many there are of each peer, and how the exchange ends them.

A wait is ended as if its time were over. The task that waits is interrupted itself, by way of a cancellation that goes
no further than this wait: a wait costs no task of its own.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from covenant.exchange.bounds import Gauge


class Waits(Gauge):
    def __init__(self, limit: int) -> None:
        super().__init__(limit, "waits")
        self._under_way: set[Wait] = set()

    def interruptible(self, peer: str, has_place: bool = False) -> Wait:
        """What is inside ends when the exchange says so, and then it goes on behind it. `has_place`: the peer is
        counted among those who wait already."""
        return Wait(None if has_place else self, peer, self._under_way)

    def end(self, peer: str | None = None) -> None:
        """Those of a peer, or all."""
        for wait in [wait for wait in self._under_way if peer is None or wait.peer == peer]:
            wait.end()


class Wait:
    __slots__ = ("_gauge", "_is_over", "_task", "_under_way", "peer")

    def __init__(self, gauge: Gauge | None, peer: str, under_way: set[Wait]) -> None:
        self.peer = peer
        self._gauge = gauge
        self._under_way = under_way
        self._task: asyncio.Task[Any] | None = None
        self._is_over = False

    def __enter__(self) -> None:
        if self._gauge is not None:
            self._gauge.enter(self.peer)
        self._task = asyncio.current_task()
        self._under_way.add(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self._under_way.discard(self)
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
