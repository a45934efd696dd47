"""A long wait, as several requests that each wait for some of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

_POLL_MS: Final = 20_000  # of one request that waits; the daemon has a bound of its own


def polls(wait_ms: int | None) -> Iterator[int]:
    """How long each of them waits, so that together they wait as long as was asked: None is for ever. The last one only
    looks."""
    end = None if wait_ms is None else time.monotonic() + wait_ms / 1000
    while True:
        left_ms = _POLL_MS if end is None else max(0, round((end - time.monotonic()) * 1000))
        yield min(left_ms, _POLL_MS)
        if left_ms == 0:
            return
