"""What was handed to whom under which receipt, for as long as the answer may have been lost on its way.

A receive changes state, and its answer can get lost. Under a receipt it can be asked again, and answers the same; or it
can be undone. This is kept in memory, and for a short while: after a restart a lease is seen in the queue, and a
drained result can be read by its task.

Each peer has a shelf of its own, bounded in bytes: whatever others do, its receipts stay. When all shelves together
hold too much, the fullest gives something up.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from covenant.model.command import Command
from covenant.model.error import TooLarge
from covenant.store.clock import Clock

KEPT_MS: Final = 60_000
PEER_BYTES_MAX: Final = 8 * 1024 * 1024
BYTES_MAX: Final = 64 * 1024 * 1024
SLOT_BYTES: Final = 1024  # what a receipt counts beside its answer, so that the number of them has a bound, too

_Name: TypeAlias = tuple[str, str]  # the key of the peer, and what it calls the receive
_Take: TypeAlias = Callable[[list[Command]], Awaitable[list[Any]]]
_encoder: Final = msgspec.json.Encoder()


class _Receipt(Struct):
    at_ms: int
    taken: list[Any] | None  # None when it is too large to be kept
    undoing: list[Command]
    bytes: int


class _Shelf:
    def __init__(self) -> None:
        self.names: OrderedDict[_Name, None] = OrderedDict()  # the oldest first
        self.bytes = 0


class Receipts:
    def __init__(self, clock: Clock) -> None:
        self.bytes = 0
        self._clock = clock
        self._kept: OrderedDict[_Name, _Receipt] = OrderedDict()  # the oldest first
        self._shelves: dict[str, _Shelf] = {}
        self._running: dict[_Name, asyncio.Future[Any]] = {}

    async def take(self, peer: str, receipt: str, take: _Take) -> list[Any]:
        name = (peer, receipt)
        self._expire()
        if name in self._kept:
            return self._again(name)
        running = self._running.get(name)
        if running is not None:
            await asyncio.wait([running])  # the first of them is still at it
            return self._again(name) if name in self._kept else []
        working = asyncio.ensure_future(self._take(name, take))
        self._running[name] = working
        try:
            return await working
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if working.cancelled() and task is not None and not task.cancelling():
                return []  # it was given back while it waited
            working.cancel()
            await asyncio.wait([working])
            raise
        finally:
            del self._running[name]

    def _again(self, name: _Name) -> list[Any]:
        taken = self._kept[name].taken
        if taken is None:
            raise TooLarge("the answer was too large to be kept: give it back and receive again", field="receipt")
        return taken

    async def _take(self, name: _Name, take: _Take) -> list[Any]:
        """Taken and kept without a pause between: whoever comes to undo it finds it."""
        undoing: list[Command] = []
        taken = await take(undoing)
        if taken:
            self._keep(name, taken, undoing)
        return taken

    async def forget(self, peer: str, receipt: str) -> list[Command]:
        """End the receive if it still waits; then what gives back what it took."""
        name = (peer, receipt)
        self._expire()
        running = self._running.get(name)
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        kept = self._kept.get(name)
        self._keep(name, [], [])  # the receive itself may be yet to come
        return [] if kept is None else kept.undoing

    def owe(self, peer: str, receipt: str, undoing: list[Command]) -> None:
        """It could not be given back: who says so again has it done."""
        self._keep((peer, receipt), [], undoing)

    # --- the shelves --------------------------------------------------------------------------------------

    def _keep(self, name: _Name, taken: list[Any] | None, undoing: list[Command]) -> None:
        size = SLOT_BYTES + (len(_encoder.encode(taken)) if taken else 0)
        if size > PEER_BYTES_MAX:
            taken, size = None, SLOT_BYTES
        if name in self._kept:
            self._drop(name)
        self._kept[name] = _Receipt(self._clock.now_ms(), taken, undoing, size)
        shelf = self._shelves.setdefault(name[0], _Shelf())
        shelf.names[name] = None
        shelf.bytes += size
        self.bytes += size
        while shelf.bytes > PEER_BYTES_MAX:
            self._drop(next(iter(shelf.names)))
        while self.bytes > BYTES_MAX:
            fullest = max(self._shelves.values(), key=lambda shelf: shelf.bytes)
            self._drop(next(iter(fullest.names)))

    def _expire(self) -> None:
        now_ms = self._clock.now_ms()
        while self._kept:
            name, oldest = next(iter(self._kept.items()))
            if now_ms - oldest.at_ms <= KEPT_MS:
                return
            self._drop(name)

    def _drop(self, name: _Name) -> None:
        receipt = self._kept.pop(name)
        shelf = self._shelves[name[0]]
        del shelf.names[name]
        shelf.bytes -= receipt.bytes
        self.bytes -= receipt.bytes
        if not shelf.names:
            del self._shelves[name[0]]
