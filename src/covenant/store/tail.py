"""The newest commits, at hand: who follows a task live finds what happened to it here, and not on the disk. Bounded in
commits and in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from covenant.model.audit import Logged
from covenant.model.record import Key

COMMITS_MAX: Final = 8192
BYTES_MAX: Final = 16 << 20


class Tail:
    def __init__(self, commits_max: int = COMMITS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._commits: deque[tuple[Logged, int]] = deque()
        self._by_seq: dict[int, Logged] = {}
        self._commits_max = commits_max
        self._bytes_max = bytes_max
        self._bytes = 0

    def __iter__(self) -> Iterator[Logged]:
        return (logged for logged, _ in self._commits)

    def __reversed__(self) -> Iterator[Logged]:
        return (logged for logged, _ in reversed(self._commits))

    def add(self, logged: Logged, size: int) -> None:
        """One that alone is larger than the bound stays until the next one comes: it is what is followed now."""
        self._commits.append((logged, size))
        self._bytes += size
        self._by_seq[logged.seq] = logged
        if len(logged.events) > 1:
            for seq in range(logged.seq + 1, logged.last + 1):
                self._by_seq[seq] = logged
        while len(self._commits) > self._commits_max or (self._bytes > self._bytes_max and len(self._commits) > 1):
            self._drop()

    def _drop(self) -> None:
        old, size = self._commits.popleft()
        self._bytes -= size
        del self._by_seq[old.seq]
        if len(old.events) > 1:
            for seq in range(old.seq + 1, old.last + 1):
                del self._by_seq[seq]

    def trail(self, seq: int, key: Key, limit: int) -> list[Logged]:
        """The commits that touched a record, from the one that holds this event back, as far as this reaches."""
        found: list[Logged] = []
        while len(found) < limit and (logged := self._by_seq.get(seq)) is not None:
            found.append(logged)
            seq = logged.previous(key)
        return found
