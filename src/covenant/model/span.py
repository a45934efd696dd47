"""How a length of time is told to a person."""

from __future__ import annotations

from typing import Final

SECOND_MS: Final = 1000
MINUTE_MS: Final = 60 * SECOND_MS
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS


def span(ms: int) -> str:
    if 0 < ms < SECOND_MS:
        return f"{ms} ms"
    if ms < MINUTE_MS:
        return f"{ms // SECOND_MS} s"
    if ms < HOUR_MS:
        return f"{ms // MINUTE_MS} min"
    if ms < 2 * DAY_MS:
        return f"{ms // HOUR_MS} h"
    return f"{ms // DAY_MS} days"
