"""Time and ids, passed in so that tests own them.

Deadlines and lease ages are wall-clock time, which may jump; waiting is done in slices, so that a jump is noticed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Protocol
from weakref import WeakSet

from covenant.model.limits import CLOCK_CHECK_MS

_DRAWN_AT_ONCE = 128  # an even number
_WIDTH = 37  # of an id, and a space behind it
_VARIANT = bytes.maketrans(b"0123456789abcdef", b"89ab" * 4)


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now_ms(self) -> int: ...
    def call_at(self, when_ms: int, callback: Callable[[], None]) -> Timer:
        """Call back at that time or, at most CLOCK_CHECK_MS later than now, earlier: the callee looks again."""


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def call_at(self, when_ms: int, callback: Callable[[], None]) -> Timer:
        delay_ms = min(max(0, when_ms - self.now_ms()), CLOCK_CHECK_MS)
        return asyncio.get_running_loop().call_later(delay_ms / 1000, callback)


class ManualClock:
    """A clock for tests: it stands still until it is moved, and fires what has come due.

    With a seed it fires timers early, too, as `SystemClock` may: before it moves, it fires some of those that are not
    due. A callee that checks the time sets its timer again; one that acts at once fails its tests.
    """

    early_seed: int | None = None  # for clocks that are made from then on; None fires no timer early

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._chance = None if self.early_seed is None else Random(self.early_seed)
        self._timers: list[tuple[int, int, _ManualTimer]] = []
        self._count = 0

    def now_ms(self) -> int:
        return self._now_ms

    def call_at(self, when_ms: int, callback: Callable[[], None]) -> Timer:
        timer = _ManualTimer(callback)
        self._count += 1
        heappush(self._timers, (when_ms, self._count, timer))
        return timer

    def advance(self, by_ms: int) -> None:
        if self._chance is not None:
            self._fire_early(self._chance)
        self._now_ms += by_ms
        while self._timers and self._timers[0][0] <= self._now_ms:
            heappop(self._timers)[2].fire()

    def _fire_early(self, chance: Random) -> None:
        """Fire about half of the timers, in their order; those that the callees set meanwhile wait."""
        waiting, self._timers = sorted(self._timers), []
        for entry in waiting:
            if chance.random() < 0.5:
                entry[2].fire()
            else:
                heappush(self._timers, entry)


class _ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class RandomIds:
    """UUIDv7 for tasks, UUIDv4 for leases, from the system's randomness drawn for many at once."""

    def __init__(self) -> None:
        self._drawn: list[str] = []
        self._ms = 0
        self._time = ""
        _ALL_IDS.add(self)

    def _spill(self) -> None:
        """A forked child must not repeat its parent's ids."""
        self._drawn = []

    def task(self) -> str:
        """All behind the time is as random as in any other id."""
        ms = time.time_ns() // 1_000_000
        if ms != self._ms:
            self._ms = ms
            self._time = f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7"
        return self._time + self.lease()[len(self._time) :]

    def lease(self) -> str:
        try:
            return self._drawn.pop()
        except IndexError:
            self._drawn = drawn = _draw(_DRAWN_AT_ONCE)
            return drawn.pop()


def _draw(count: int) -> list[str]:
    """Random digits throughout; then what is fixed in an id takes its places, in all of them at once. Put together one
    by one, each would cost several times as much."""
    text = bytearray(os.urandom(_WIDTH * count // 2).hex(), "ascii")
    for at in (8, 13, 18, 23):
        text[at::_WIDTH] = b"-" * count
    text[14::_WIDTH] = b"4" * count  # the version
    text[19::_WIDTH] = text[19::_WIDTH].translate(_VARIANT)
    text[36::_WIDTH] = b" " * count
    return text.decode().split()


_ALL_IDS: WeakSet[RandomIds] = WeakSet()


def _spill_all() -> None:
    for ids in list(_ALL_IDS):
        ids._spill()


os.register_at_fork(after_in_child=_spill_all)


class CountingIds:
    """Ids for tests: the same every time."""

    def __init__(self) -> None:
        self._tasks = 0
        self._leases = 0

    def task(self) -> str:
        self._tasks += 1
        return f"00000000-0000-7000-8000-{self._tasks:012x}"

    def lease(self) -> str:
        self._leases += 1
        return f"11111111-1111-4111-8111-{self._leases:012x}"
