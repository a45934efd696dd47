"""How much one peer may ask for: requests per second, open waits, open connections. Over a bound the answer is
`rate_limited`, with the time after which to try again; nothing is queued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Final

from msgspec import Struct

from covenant.model.error import RateLimited

_PEERS_MAX: Final = 100_000
_S: Final = 1_000_000_000
_MS: Final = 1_000_000


class Bounds(Struct, frozen=True, kw_only=True):
    """What the daemon takes from one peer, and what it takes at all."""

    requests_per_s: int = 50_000
    burst: int = 100_000
    waits_max: int = 20_000
    connections_max: int = 20_000
    body_bytes_max: int = 8 * 1024 * 1024
    wait_ms_max: int = 25_000
    connections_total_max: int = 100_000  # of everybody; fewer where the system lets the daemon open fewer files
    head_bytes_max: int = 64 * 1024  # of an HTTP request before its body; of the first frame on IPC
    head_ms_max: int = 10_000  # from connecting, or from a request's first byte, until the head or the token is there
    body_ms_max: int = 60_000  # then until the body is there; on IPC from the first byte of a frame to its last
    refusals_per_min: int = 60  # of one peer that are written down; the rest is counted


class Gauge:
    """Counts what is open of each peer."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self._open: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self._open.values())

    @contextmanager
    def one(self, peer: str) -> Iterator[None]:
        self.enter(peer)
        try:
            yield
        finally:
            self.leave(peer)

    def has_room(self, peer: str) -> bool:
        return self._open.get(peer, 0) < self._limit

    def enter(self, peer: str) -> None:
        count = self._open.get(peer, 0)
        if count >= self._limit:
            raise RateLimited(f"too many open {self._what}", limit=self._limit, retry_after_ms=1000)
        self._open[peer] = count + 1

    def leave(self, peer: str) -> None:
        count = self._open.pop(peer) - 1
        if count:
            self._open[peer] = count


class Meter:
    """A bucket of requests for each peer, filled at a steady rate. What is kept of it is when it will be full, in whole
    numbers: of fractions that were added up, the last request of a burst would sometimes be too early by nothing."""

    def __init__(self, per_s: int, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._full_at: dict[str, int] = {}  # in nanoseconds, times the rate: a request fills a second of that

    def draw(self, peer: str, shares: int = 1) -> None:
        """`shares`: among how many daemons the bound is divided."""
        now = monotonic_ns() * self._per_s
        full_at = self._full_at.get(peer, now)
        full_at = (full_at if full_at > now else now) + shares * _S
        early = full_at - now - (self._burst if self._burst > shares else shares) * _S
        if early > 0:
            wait_ms = early // (self._per_s * _MS) + 1
            raise RateLimited("too many requests", limit=self._per_s, retry_after_ms=wait_ms)
        if len(self._full_at) >= _PEERS_MAX:
            self._full_at.clear()
        self._full_at[peer] = full_at


class Refusals:
    """Which refusals are written down: so many of a peer in a minute; the others are counted, and the count is told
    with the next that is written, or when the minute is over."""

    def __init__(self, per_min: int, now_ms: Callable[[], int]) -> None:
        self._per_min = per_min
        self._now_ms = now_ms
        self._seen: dict[str, _Minute] = {}

    def draw(self, peer: str) -> int:
        """One more. How many were not written before it; -1 when this one is not written either."""
        now = self._now_ms() // 60_000
        seen = self._seen.get(peer)
        if seen is None:
            if len(self._seen) >= _PEERS_MAX:
                self._seen.clear()
            seen = self._seen[peer] = _Minute(now)
        if seen.minute == now and seen.written >= self._per_min:
            seen.silent += 1
            return -1
        silent = seen.silent
        self._seen[peer] = _Minute(now, 1 if seen.minute != now else seen.written + 1)
        return silent

    def counted(self, everything: bool = False) -> list[tuple[str, int]]:
        """Those who were refused in silence, and have not been told of since their minute was over."""
        now = self._now_ms() // 60_000
        over = [(peer, seen) for peer, seen in self._seen.items() if everything or seen.minute != now]
        for peer, _ in over:
            del self._seen[peer]
        return [(peer, seen.silent) for peer, seen in over if seen.silent]


class _Minute(Struct):
    minute: int
    written: int = 0
    silent: int = 0
