"""What comes out differently each time, and so is remembered: the time, and chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from covenant.agents import values
from covenant.agents.checkpoints import Checkpoints
from covenant.agents.host import Host
from covenant.agents.notes import Notes
from covenant.agents.times import Times
from covenant.agents.waits import Waits


class Chance:
    def __init__(self, host: Host, notes: Notes, times: Times, waits: Waits, checkpoints: Checkpoints) -> None:
        self._host = host
        self._notes = notes
        self._times = times
        self._waits = waits
        self._checkpoints = checkpoints

    async def now(self) -> int:
        return int(await self._once("now", lambda key: self._times.now_ms()))

    async def random(self) -> float:
        return float(await self._once("random", lambda key: fraction(self._drawn(key))))

    async def uuid(self) -> str:
        return str(await self._once("uuid", lambda key: str(UUID(bytes=self._drawn(key), version=4))))

    def _drawn(self, key: str) -> bytes:
        return self._host.chance(self._checkpoints.outside(key))

    async def _once(self, operation: str, make: Callable[[str], Any]) -> Any:
        key = self._notes.memory.key(operation, None)
        memo = self._notes.memory.recall(key)
        if memo is None:
            await self._waits.make_room()
            memo = self._notes.note(key, make(key))
        return values.unraw(memo.value)


def fraction(chance: bytes) -> float:
    """A number from 0 up to 1, with as many bits as a float has behind the point."""
    return (int.from_bytes(chance[:8]) >> 11) / (1 << 53)
