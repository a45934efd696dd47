"""Keys in the order of a number.

Every listing of the embedded engines is one of these: what is ready for a recipient, what waits to be drained, what an
agent sent. Numbers come from one counter that only grows, so adding is an append; taking the oldest is O(1), taking any
other O(log n), and a cursor is found by bisection.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

_TRIM_AT = 512


class Ledger:
    __slots__ = ("_head", "_holes", "_keys", "_last", "_orders")

    def __init__(self) -> None:
        self._orders = array("q")
        self._keys: list[str | None] = []
        self._head = 0  # what lies before is gone; what it points at is alive, or the end
        self._holes = 0  # how many behind it are gone
        self._last = 0  # the highest order that ever came

    def __len__(self) -> int:
        return len(self._keys) - self._head - self._holes

    def add(self, order: int, key: str) -> None:
        if order > self._last:
            self._last = order
            self._orders.append(order)
            self._keys.append(key)
        else:
            self._insert(order, key)

    def _insert(self, order: int, key: str) -> None:
        """Out of turn: something goes back to the place that it had."""
        at = bisect_left(self._orders, order)
        if at < len(self._orders) and self._orders[at] == order:
            if self._keys[at] is not None:
                raise AssertionError(f"{order} is taken by {self._keys[at]}")
            self._keys[at] = key
            self._holes -= 1
        else:
            self._orders.insert(at, order)
            self._keys.insert(at, key)
        if at < self._head:
            self._holes += self._head - at  # those between are behind the head now
            self._head = at

    def remove(self, order: int) -> None:
        head, keys = self._head, self._keys
        if self._orders[head] == order:  # as mostly
            keys[head] = None
            self._head = head = head + 1
            if self._holes:
                self._skip()
        else:
            keys[bisect_left(self._orders, order, head)] = None
            self._holes += 1
            head += self._holes
        if head > _TRIM_AT and head * 2 > len(keys):
            self._trim()

    def _skip(self) -> None:
        keys, head = self._keys, self._head
        end = len(keys)
        while head < end and keys[head] is None:
            head += 1
        self._holes -= head - self._head
        self._head = head

    def _trim(self) -> None:
        """Cut off what is gone from the front, where it mostly is; else take out what is gone anywhere."""
        head = self._head
        if head >= self._holes:
            del self._orders[:head], self._keys[:head]
        else:
            alive = [(order, key) for order, key in zip(self._orders, self._keys, strict=True) if key is not None]
            self._orders = array("q", [order for order, _ in alive])
            self._keys = [key for _, key in alive]
            self._holes = 0
        self._head = 0

    def oldest(self, limit: int) -> list[str]:
        if limit == 1:
            head = self._head
            return self._keys[head : head + 1]  # type: ignore[return-value]  # alive, or the end
        return list(islice(self.after(0), limit))

    def after(self, order: int) -> Iterator[str]:
        """Oldest first, from behind this number. Must be used up before the ledger changes."""
        keys = self._keys
        start = self._head if order <= 0 else bisect_right(self._orders, order, self._head)
        for at in range(start, len(keys)):
            key = keys[at]
            if key is not None:
                yield key


class LazyLedger:
    """A ledger that is told only how many of its keys are gone, not which: it asks when it comes to them. Cheaper to
    keep where keys leave more often than they are listed."""

    __slots__ = ("_dead", "_head", "_is_there", "_keys", "_last", "_orders")

    def __init__(self, is_there: Callable[[str, int], bool]) -> None:
        self._orders = array("q")
        self._keys: list[str] = []
        self._head = 0
        self._dead = 0
        self._last = 0
        self._is_there = is_there

    def __len__(self) -> int:
        return len(self._keys) - self._dead

    def add(self, order: int, key: str) -> None:
        if order > self._last:
            self._last = order
            self._orders.append(order)
            self._keys.append(key)
        else:
            self._put_back(order, key)

    def _put_back(self, order: int, key: str) -> None:
        at = bisect_left(self._orders, order)
        if at < len(self._orders) and self._orders[at] == order:
            self._dead -= 1  # its entry is still here
        else:
            self._orders.insert(at, order)
            self._keys.insert(at, key)
        self._head = min(self._head, at)

    def lose(self) -> None:
        """One of the keys is gone."""
        self._dead = dead = self._dead + 1
        if dead > _TRIM_AT and dead * 2 > len(self._keys):
            self._trim()

    def _trim(self) -> None:
        """Mostly the oldest go first: then it is enough to cut those off."""
        self._skip()
        head = self._head
        if head * 2 >= self._dead:
            del self._orders[:head], self._keys[:head]
            self._dead -= head
            self._head = 0
            return
        there = [pair for pair in zip(self._orders, self._keys, strict=True) if self._is_there(pair[1], pair[0])]
        self._orders = array("q", [order for order, _ in there])
        self._keys = [key for _, key in there]
        self._head = self._dead = 0

    def oldest(self, limit: int) -> list[str]:
        self._skip()
        return list(islice(self.after(0), limit))

    def _skip(self) -> None:
        head, end = self._head, len(self._keys)
        while head < end and not self._is_there(self._keys[head], self._orders[head]):
            head += 1
        self._head = head

    def after(self, order: int) -> Iterator[str]:
        start = self._head if order <= 0 else bisect_right(self._orders, order, self._head)
        for at in range(start, len(self._keys)):
            if self._is_there(self._keys[at], self._orders[at]):
                yield self._keys[at]

    def newest(self, before: int | None = None) -> Iterator[str]:
        """Newest first, from in front of this number."""
        end = len(self._keys) if before is None else bisect_left(self._orders, before)
        for at in range(end - 1, self._head - 1, -1):
            if self._is_there(self._keys[at], self._orders[at]):
                yield self._keys[at]


L = TypeVar("L", bound="Ledger | LazyLedger")


class Shelf(Generic[L]):
    """Ledgers by name. Empty ones are swept out when there are many."""

    __slots__ = ("_empty", "_make", "_sweep_at", "ledgers")
    _SWEEP_AT = 4096

    def __init__(self, make: Callable[[], L]) -> None:
        self.ledgers: dict[str, L] = {}
        self._make = make
        self._empty = make()
        self._sweep_at = self._SWEEP_AT

    def add(self, name: str, order: int, key: str) -> None:
        ledger = self.ledgers.get(name)
        if ledger is None:
            if len(self.ledgers) >= self._sweep_at:
                self.ledgers = {known: ledger for known, ledger in self.ledgers.items() if len(ledger)}
                self._sweep_at = max(self._SWEEP_AT, 2 * len(self.ledgers))
            ledger = self.ledgers[name] = self._make()
        ledger.add(order, key)

    def get(self, name: str) -> L:
        return self.ledgers.get(name, self._empty)

    def names(self) -> list[str]:
        """Those that hold something."""
        return [name for name, ledger in self.ledgers.items() if len(ledger)]


class DueTimes:
    """Keys by the time at which something is due. A changed time leaves its old entry behind until it comes up or
    outnumbers the living."""

    __slots__ = ("_heap", "_times", "moved")

    def __init__(self) -> None:
        self.moved = False  # since somebody last asked for the next time
        self._heap: list[tuple[int, str]] = []
        self._times: dict[str, int] = {}

    def set(self, key: str, due_ms: int | None) -> None:
        self.moved = True
        if due_ms is None:
            self._times.pop(key, None)
        else:
            self._times[key] = due_ms
            heappush(self._heap, (due_ms, key))
        if len(self._heap) > 2 * len(self._times) + _TRIM_AT:
            self._heap = [(due, key) for key, due in self._times.items()]
            heapify(self._heap)

    def next_ms(self) -> int | None:
        self.moved = False
        heap = self._heap
        while heap and self._times.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def until(self, now: int, limit: int) -> list[str]:
        """What is due, earliest first. It stays due until its time is changed."""
        due: list[tuple[int, str]] = []
        while len(due) < limit and (first := self.next_ms()) is not None and first <= now:
            entry = heappop(self._heap)
            if entry not in due[-1:]:
                due.append(entry)
        for entry in due:
            heappush(self._heap, entry)
        return [key for _, key in due]
