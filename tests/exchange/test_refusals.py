"""What is written of those who are refused: each of them, then a count. (Contract 28.)"""

from __future__ import annotations

from covenant.exchange.bounds import Refusals
from covenant.store.clock import ManualClock


def test_the_first_of_a_minute_are_written_and_the_others_counted() -> None:
    clock = ManualClock()
    refusals = Refusals(2, clock.now_ms)
    assert [refusals.draw("mallory") for _ in range(5)] == [0, 0, -1, -1, -1]
    assert refusals.draw("alice") == 0
    clock.advance(60_000)
    assert [refusals.draw("mallory") for _ in range(3)] == [3, 0, -1]


def test_what_was_not_written_is_told_when_the_minute_is_over() -> None:
    """Also if nothing comes after it."""
    clock = ManualClock()
    refusals = Refusals(1, clock.now_ms)
    for _ in range(4):
        refusals.draw("mallory")
    refusals.draw("alice")
    assert refusals.counted() == []
    clock.advance(60_000)
    assert refusals.counted() == [("mallory", 3)]
    assert refusals.counted() == []


def test_at_the_end_of_the_daemon_everything_is_told() -> None:
    refusals = Refusals(1, ManualClock().now_ms)
    for _ in range(4):
        refusals.draw("mallory")
    assert refusals.counted(everything=True) == [("mallory", 3)]
