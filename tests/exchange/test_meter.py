"""How many requests of one peer are taken: a burst at once, then as many as the rate brings."""

from __future__ import annotations

import pytest

from covenant.exchange import bounds
from covenant.exchange.bounds import Meter
from covenant.model.error import RateLimited

S = 1_000_000_000


class Watch:
    """A clock that stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now_ns: int) -> None:
        self.now_ns = now_ns
        monkeypatch.setattr(bounds, "monotonic_ns", lambda: self.now_ns)


def drawn(meter: Meter, peer: str = "p", shares: int = 1, most: int = 1000) -> int:
    """How many requests are taken at once."""
    for count in range(most):
        try:
            meter.draw(peer, shares)
        except RateLimited:
            return count
    return most


@pytest.mark.parametrize("per_s", [1, 3, 7, 50, 1000, 50_000])
@pytest.mark.parametrize(("burst", "shares", "taken"), [(1, 1, 1), (10, 1, 10), (100, 4, 25), (3, 8, 1)])
def test_a_burst_is_taken_to_the_last_whenever_it_comes(
    monkeypatch: pytest.MonkeyPatch, per_s: int, burst: int, shares: int, taken: int
) -> None:
    watch, meter = Watch(monkeypatch, 0), Meter(per_s, burst)
    for number in range(50):
        watch.now_ns += 123_456_789_012_345
        assert drawn(meter, f"peer {number}", shares) == taken
        assert drawn(meter, "one that comes again", shares) == taken


def test_who_waits_as_long_as_it_is_told_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, meter = Watch(monkeypatch, 17 * S), Meter(7, 3)
    assert drawn(meter) == 3
    for _ in range(100):
        with pytest.raises(RateLimited) as refused:
            meter.draw("p")
        watch.now_ns += refused.value.details["retry_after_ms"] * 1_000_000
        assert drawn(meter) == 1


def test_a_rate_is_kept_over_a_long_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, meter = Watch(monkeypatch, 17 * S), Meter(7, 3)
    total = drawn(meter)
    for _ in range(10_000):
        watch.now_ns += S // 10
        total += drawn(meter)
    assert total == 3 + 7 * 1000
