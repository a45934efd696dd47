"""How many tasks are ready for whom, as far as this process knows: counted in the store now and then, and kept up with
what is committed here in between."""

from __future__ import annotations

from time import monotonic
from typing import Any, Final

import asyncpg

from covenant.store.postgres.listing import DEPTH
from covenant.store.postgres.rows import READY

_AGE_S: Final = 1.0
_AGE_FAR_S: Final = 60.0
_KNOWN_MAX: Final = 100_000


class Depths:
    def __init__(self, depth_max: int) -> None:
        self._depth_max = depth_max
        self._known: dict[str, list[Any]] = {}  # how many, and when they were counted

    def of(self, recipient: str) -> int | None:
        """As far as it is known: counted anew the more often, the closer it is to its bound."""
        known = self._known.get(recipient)
        if known is None:
            return None
        count, learned = known
        age_s = _AGE_S if count * 2 > self._depth_max else _AGE_FAR_S
        return count if monotonic() - learned < age_s else None

    async def learn(self, connection: asyncpg.Connection[Any], recipient: str) -> None:
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        count = await connection.fetchval(DEPTH, READY, recipient)
        self._known[recipient] = [count, monotonic()]

    def count(self, recipient: str, by: int) -> None:
        known = self._known.get(recipient)
        if known is not None:
            known[0] = max(0, known[0] + by)

    def forget(self) -> None:
        self._known.clear()
