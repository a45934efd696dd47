"""Commands that wait for a lane: in their order, but for those that want what somebody holds.

Lanes work beside one another, so what one of them is given may be decided before what another was given earlier. Of one
call, no lane is given anything while another has some of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from covenant.store.postgres.entry import Entry

BATCH: Final = 256  # commands in one transaction
ASIDE_S: Final = 0.5  # until a command that wants what somebody holds is tried again
_SHARE_MIN: Final = 16


class Queue:
    def __init__(self) -> None:
        self._waiting: deque[Entry] = deque()
        self._aside: set[Entry] = set()  # those that want what somebody holds
        self._idle: deque[asyncio.Future[None]] = deque()
        self._is_over = False
        self._hurries_until_s = 0.0
        self._is_paused = False
        self.free = 0  # lanes that have nothing to do

    def open(self) -> None:
        self._is_over = False

    def end(self) -> None:
        """No lane is given anything more."""
        self._is_over = True
        self.ring_all()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def first(self) -> Entry | None:
        return self._waiting[0] if self._waiting else None

    def append(self, entry: Entry) -> None:
        self._waiting.append(entry)
        self._ring()

    def _ring(self) -> None:
        while self._idle:
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return

    def ring_all(self) -> None:
        for _ in range(len(self._idle)):
            self._ring()

    def pause(self) -> None:
        """No lane is given anything for a moment."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.ring_all()

    def take_all(self) -> list[Entry]:
        """Those that wait in their order, and want nothing that somebody holds."""
        waiting, self._waiting = self._waiting, deque()
        return [entry for entry in waiting if not _is_held_back(entry, None) and _is_wanted(entry)]

    async def next_batch(self, own: deque[Entry], rest: Callable[[], Awaitable[None]]) -> list[Entry]:
        """Of what only this lane can do, or of what waits for any; nothing once this ends. Who has to wait rests
        first."""
        has_rested = False
        self.free += 1
        try:
            while not self._is_over:
                if not self._is_paused:
                    if own:
                        return [own.popleft()]
                    if batch := self._batch():
                        return batch
                if not has_rested:
                    has_rested = True
                    await rest()
                    continue  # something may have come meanwhile
                waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._idle.append(waiting)
                await waiting
            return []
        finally:
            self.free -= 1

    def _batch(self) -> list[Entry]:
        batch: list[Entry] = []
        # Its share, and not all that waits: while the database works for one lane, this process does for another.
        room = min(BATCH, max(_SHARE_MIN, -(-len(self._waiting) // max(1, self.free))))
        while self._waiting and len(batch) < room:
            entry = self._waiting[0]
            if batch and (entry.comes_first or _goes_alone(entry) or _goes_alone(batch[0])):
                break
            self._waiting.popleft()
            if _is_held_back(entry, batch) or not _is_wanted(entry):
                continue
            if entry.group is not None:
                entry.group.taken = batch
                room = BATCH  # no other lane may help with it
            entry.is_begun = True
            batch.append(entry)
        if batch and self._waiting:
            self._ring()
        return batch

    def done(self, batch: list[Entry]) -> None:
        """As far as its lane can: what waited behind it is the next."""
        for entry in batch:
            group = entry.group
            if group is not None and group.taken is batch:
                group.taken = None
                self._to_front(group.waiting)
                group.waiting.clear()

    def put_back(self, entries: Sequence[Entry], alone: bool = False) -> None:
        """To the front, in their order."""
        for entry in entries:
            entry.is_alone = entry.is_alone or alone
            entry.tries = 0
        self._to_front(entries)

    def _to_front(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            group = entry.group
            (self._waiting if group is None or group.taken is None else group.waiting).appendleft(entry)
        if self._waiting:
            self._ring()

    def put_aside(self, entry: Entry) -> None:
        """It wants what somebody holds: others go on, and it is tried again soon."""
        entry.is_aside = entry.is_alone = True
        entry.tries = 0
        self._aside.add(entry)
        loop = asyncio.get_running_loop()
        self._hurries_until_s = loop.time() + 2 * ASIDE_S
        loop.call_later(ASIDE_S, self._take_up, entry)

    @property
    def hurries(self) -> bool:
        """Somebody holds something, and perhaps more than one wants: who meets it next need not wait as long."""
        return asyncio.get_running_loop().time() < self._hurries_until_s

    def _take_up(self, entry: Entry) -> None:
        if entry in self._aside:
            self._aside.discard(entry)
            self.append(entry)

    def fail(self, failure: Exception) -> None:
        """All that is left."""
        for entry in (*self._waiting, *self._aside):
            entry.fail(failure)
        self._waiting.clear()
        self._aside.clear()


def _goes_alone(entry: Entry) -> bool:
    return entry.is_exclusive or entry.is_alone


def _is_wanted(entry: Entry) -> bool:
    return not entry.future.cancelled() or entry.is_begun


def _is_held_back(entry: Entry, batch: list[Entry] | None) -> bool:
    """Whether some of its call are in another batch: then it goes behind them."""
    group = entry.group
    if group is None or group.taken is None or group.taken is batch:
        return False
    group.waiting.append(entry)
    return True
