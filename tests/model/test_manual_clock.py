"""The clock that tests move: what fires when, and that the timers of a clock with a seed fire early, too."""

from __future__ import annotations

from covenant.store.clock import ManualClock


class Exact(ManualClock):
    early_seed = None


class Early(ManualClock):
    early_seed = 7


class Sleeper:
    """A callee that looks again, as those of `Clock.call_at` must."""

    def __init__(self, clock: ManualClock, due_ms: int) -> None:
        self.looks: list[int] = []
        self.woke_ms: int | None = None
        self._clock = clock
        self._due_ms = due_ms
        self._timer = clock.call_at(due_ms, self._look)

    def _look(self) -> None:
        now = self._clock.now_ms()
        self.looks.append(now)
        if now < self._due_ms:
            self._timer = self._clock.call_at(self._due_ms, self._look)
        else:
            self.woke_ms = now

    def cancel(self) -> None:
        self._timer.cancel()


def test_without_a_seed_a_timer_fires_when_it_is_due_and_only_then() -> None:
    clock = Exact(0)
    sleeper = Sleeper(clock, 100)
    for _ in range(99):
        clock.advance(1)
    assert sleeper.looks == []
    clock.advance(50)
    assert sleeper.looks == [149]


def test_with_a_seed_timers_fire_early_and_still_when_they_are_due() -> None:
    clock = Early(0)
    sleepers = [Sleeper(clock, 100) for _ in range(20)]
    clock.advance(99)
    early = [len(sleeper.looks) for sleeper in sleepers]
    assert set(early) == {0, 1}  # some of them, and each but once in one move
    clock.advance(1)
    assert {sleeper.woke_ms for sleeper in sleepers} == {100}


def test_the_same_seed_fires_the_same_timers() -> None:
    def looks() -> list[list[int]]:
        clock = Early(0)
        sleepers = [Sleeper(clock, 100) for _ in range(20)]
        for _ in range(4):
            clock.advance(30)
        return [sleeper.looks for sleeper in sleepers]

    assert looks() == looks()


def test_a_timer_that_was_cancelled_does_not_fire_early_either() -> None:
    clock = Early(0)
    sleepers = [Sleeper(clock, 100) for _ in range(20)]
    for sleeper in sleepers:
        sleeper.cancel()
    clock.advance(200)
    assert all(sleeper.looks == [] for sleeper in sleepers)


def test_every_suite_fires_timers_early() -> None:
    """The shared switch in tests/conftest.py is on, for clocks that a suite makes itself, too."""
    assert ManualClock.early_seed is not None
