"""How much one answer carries: a number of entries, and so many bytes of what they hold.

A thousand tasks are little, a thousand large ones are more than anybody wants to build in memory or read at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.json import encode

from covenant.model.limits import Limits
from covenant.rules.context import Spent

R = TypeVar("R")

_FIRST: Final = 16  # records that are asked for before it is known how large they are
_AT_ONCE_MAX: Final = 256
_PAGES: Final = 8  # that what is looked at for one of them would fill


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


class Look:
    """What is looked at for one page, shown or not: so many records at once that they fill about a page, and in all no
    more than fill a few. Behind that the page ends early."""

    def __init__(self, limits: Limits) -> None:
        self.at_once = _FIRST
        self._page_bytes = limits.page_bytes_max
        self._left = _PAGES * limits.page_bytes_max

    def goes_on(self) -> None:
        """Before more is asked for: raise Spent when it was enough."""
        if self._left < 0:
            raise Spent

    def saw(self, records: Collection[Struct]) -> None:
        size = sum(len(encode(record)) for record in records)
        self._left -= size
        fitting = self._page_bytes * len(records) // max(size, 1)
        self.at_once = max(1, min(fitting, 2 * self.at_once, _AT_ONCE_MAX))


def as_far_as_shown(listing: Iterable[R]) -> Iterator[R]:
    """What the view shows of a listing at once."""
    try:
        yield from listing
    except Spent:
        return
