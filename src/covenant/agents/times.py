"""The time of a run: that of its store, as far as the last answer told it."""

from __future__ import annotations

from covenant.agents import values
from covenant.agents.notes import Notes
from covenant.model.error import Malformed
from covenant.store.clock import Clock


class Times:
    def __init__(self, clock: Clock, notes: Notes) -> None:
        self._clock = clock
        self._notes = notes
        self._offset_ms = 0
        self._store_now = 0

    def learn(self, now_ms: int) -> None:
        self._store_now = now_ms
        self._offset_ms = now_ms - self._clock.now_ms()

    def now_ms(self) -> int:
        return self._clock.now_ms() + self._offset_ms

    def is_over(self, until: int | None) -> bool:
        """Whether the store has said so: it decides what came before."""
        return until is not None and self._store_now >= until

    def until(self, key: str, after_ms: int) -> int:
        """The end of a time that began when the operation under this key was first reached."""
        if type(after_ms) is not int or after_ms < 0:
            raise Malformed("a time to wait is a number of milliseconds from 0", field="ms")
        memo = self._notes.memory.recall(key)
        if memo is None:
            memo = self._notes.note(key, self.now_ms() + after_ms)
        return int(values.unraw(memo.value))
