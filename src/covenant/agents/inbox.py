"""The signals that a run was told of: those that it has seen, and those that it has taken. (Contract 22.)"""

from __future__ import annotations

from collections.abc import Iterable

from covenant.model.run import SignalSeen
from covenant.rules.run.pattern import matches


class Inbox:
    def __init__(self) -> None:
        self.seen: dict[str, SignalSeen] = {}
        self.taken: set[str] = set()  # that the store may still tell of
        self._spent: set[str] = set()  # of these, those that it has been told are taken

    def learn(self, signals: Iterable[SignalSeen]) -> None:
        self.seen.update((signal.id, signal) for signal in signals if signal.id not in self.taken)

    def heard(self, patterns: tuple[str, ...]) -> SignalSeen | None:
        """The oldest that fits."""
        fitting = [
            s for s in self.seen.values() if s.id not in self.taken and any(matches(p, s.name) for p in patterns)
        ]
        return min(fitting, key=lambda signal: signal.order, default=None)

    def forget_seen(self) -> None:
        """What was seen and left: there may be an older one that fits."""
        self.seen.clear()

    def forget_taken(self, takes: list[str], is_looking: bool) -> None:
        """Under the same key, a signal may come again when the store has forgotten the first. What a look that is under
        way brings may be older than the commit that took them."""
        self._spent.update(takes)
        for signal_id in takes:
            self.seen.pop(signal_id, None)
        if not is_looking:
            self.taken -= self._spent
            self._spent.clear()
