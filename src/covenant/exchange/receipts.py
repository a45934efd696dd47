"""What was handed to whom under which receipt, for as long as the answer may have been lost on its way.

A receive changes state, and its answer can get lost. Under a receipt it can be asked again, and answers the same; or it
can be undone. This is kept in memory, and for a short while: after a restart a lease is seen in the queue, and a
drained result can be read by its task.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Struct

from covenant.model.command import Command
from covenant.store.clock import Clock

_KEPT_MS: Final = 60_000
_KEPT_MAX: Final = 10_000


class _Receipt(Struct):
    at_ms: int
    taken: list[Any]
    undoing: list[Command]


class Receipts:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, _Receipt] = OrderedDict()
        self._running: dict[str, asyncio.Future[Any]] = {}

    async def take(self, name: str, take: Callable[[list[Command]], Awaitable[list[Any]]]) -> list[Any]:
        kept = self._kept.get(name)
        if kept is not None:
            return kept.taken
        running = self._running.get(name)
        if running is not None:
            await asyncio.wait([running])  # the first of them is still at it
            kept = self._kept.get(name)
            return [] if kept is None else kept.taken
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

    async def _take(self, name: str, take: Callable[[list[Command]], Awaitable[list[Any]]]) -> list[Any]:
        """Taken and kept without a pause between: whoever comes to undo it finds it."""
        undoing: list[Command] = []
        taken = await take(undoing)
        if taken:
            self._keep(name, _Receipt(self._clock.now_ms(), taken, undoing))
        return taken

    def _keep(self, name: str, receipt: _Receipt) -> None:
        self._kept[name] = receipt
        old = receipt.at_ms - _KEPT_MS
        while self._kept and (len(self._kept) > _KEPT_MAX or next(iter(self._kept.values())).at_ms < old):
            self._kept.popitem(last=False)

    async def forget(self, name: str) -> list[Command]:
        """End the receive if it still waits; then what gives back what it took."""
        running = self._running.get(name)
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        kept = self._kept.pop(name, None)
        self._keep(name, _Receipt(self._clock.now_ms(), [], []))  # the receive itself may be yet to come
        return [] if kept is None else kept.undoing
