"""The numbers of events: drawn in blocks, and what is left of a block is used as long as nobody draws another.

A number that is used must be higher than any that somebody else had drawn before its transaction began: so those of
one record only grow, what was sent first stands first, and who reads the log is told of nothing that others may still
come before.
"""

from __future__ import annotations

from typing import Final

BLOCK: Final = 4096  # the increment of the sequence
BLOCKS_AHEAD: Final = 16  # that are drawn at once by who is ahead of the tables


class Numbers:
    """Those that this daemon may use without drawing."""

    def __init__(self) -> None:
        self._drawn = 0  # the last block that is known to have been drawn
        self.block = 0  # the one that is used; 0: none is
        self.last = 0  # that was given away
        self.end = 0

    def drawn(self, block: int) -> None:
        """Somebody here has drawn: what was left of the one before is worth nothing."""
        if block > self._drawn:
            self._drawn = block
            self.block = 0

    def go_on(self, block: int, last: int, end: int) -> None:
        """So far the one who drew it has come."""
        if block == self._drawn and last >= self.last:
            self.block, self.last, self.end = block, last, end

    def lose(self, block: int) -> None:
        """Somebody has drawn since."""
        if self.block == block:
            self.block = 0

    def forget(self) -> None:
        """They may come again."""
        self._drawn = self.block = self.last = self.end = 0
