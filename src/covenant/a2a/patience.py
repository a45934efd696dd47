"""How long to wait before something is tried once more, and how often."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct


class Patience(Struct, frozen=True):
    """Pauses double from the first to the longest, each a little different: clients do not come back in step."""

    first_s: float = 0.1
    longest_s: float = 10.0
    failures_max: int = 40  # in a row, before a follower gives up: some four minutes
    repeats_max: int = 6  # of one send
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep


class Pauses:
    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.taken = 0

    def begin_anew(self) -> None:
        self.taken = 0

    async def pause(self, least_s: float = 0.0) -> None:
        longest = self._patience.longest_s
        pause = min(longest, self._patience.first_s * 2 ** min(self.taken, 30))
        self.taken += 1
        await self._patience.sleep(max(least_s, pause * random.uniform(0.5, 1.0)))
