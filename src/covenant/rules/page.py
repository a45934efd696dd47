"""How much one answer carries: a number of entries, and so many bytes of what they hold.

A thousand tasks are little, a thousand large ones are more than anybody wants to build in memory or read at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from msgspec import Struct
from msgspec.json import encode

from covenant.model.limits import Limits
from covenant.rules.context import Spent

R = TypeVar("R")


class Room:
    """What is left of the bytes that one answer may carry."""

    def __init__(self, limits: Limits, bytes_max: int | None = None) -> None:
        """`bytes_max`: where the reader takes less than we would send."""
        self._left = limits.page_bytes_max if bytes_max is None else min(limits.page_bytes_max, bytes_max)
        self._is_empty = True
        self.is_full = False  # something was left out

    def takes(self, entry: Struct) -> bool:
        """Whether this still goes in. The first always does: an answer that could hold nothing would never end."""
        self._left -= len(encode(entry))
        if self._left < 0 and not self._is_empty:
            self.is_full = True
            return False
        self._is_empty = False
        return True


def as_far_as_shown(listing: Iterable[R]) -> Iterator[R]:
    """What the view shows of a listing at once."""
    try:
        yield from listing
    except Spent:
        return
