"""The log read back: any stretch of it, from any event, without reading what lies before.

A line begins with its number, so that a place in a segment is found by bisection over its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from covenant.model.audit import Logged
from covenant.store.journal.files import Files
from covenant.store.journal.line import decode_line
from covenant.store.journal.segment import segment_name, segment_names

_BLOCK: Final = 64 * 1024
_SEQ: Final = b'{"seq":'


class Log:
    """The segments as far as this place in the last one."""

    def __init__(self, files: Files, last: str | None, size: int) -> None:
        self._files = files
        self._last = last
        self._size = size

    def after(self, seq: int, limit: int) -> list[Logged]:
        """The commits that hold events behind this one."""
        found: list[Logged] = []
        for name in self._names_from(seq + 1):
            for raw in self._lines(name, self._near(name, seq + 1)[0]):
                logged = decode_line(raw, name, 0).logged()
                if logged.last > seq:
                    found.append(logged)
                if len(found) >= limit:
                    return found
        return found

    def before(self, seq: int | None, limit: int) -> list[Logged]:
        """The commits that begin before this event, the newest first."""
        found: list[Logged] = []
        names = [name for name in self._names() if seq is None or name < segment_name(seq)]
        for name in reversed(names):
            end = self._end(name) if seq is None else self._until(name, seq)
            for raw in self._lines_back(name, end):
                logged = decode_line(raw, name, 0).logged()
                if seq is None or logged.seq < seq:
                    found.append(logged)
                if len(found) >= limit:
                    return found
        return found

    def at(self, seq: int) -> Logged | None:
        """The commit that holds this event; None when it was dropped, or is not yet there."""
        found = self.after(seq - 1, 1)
        return found[0] if found and found[0].seq <= seq else None

    def _names(self) -> list[str]:
        return [name for name in segment_names(self._files) if self._last is not None and name <= self._last]

    def _names_from(self, seq: int) -> list[str]:
        """Segments, from the one that would hold this event."""
        names = self._names()
        earlier = [name for name in names if name <= segment_name(seq)]
        return names[max(0, len(earlier) - 1) :]

    def _end(self, name: str) -> int:
        return self._size if name == self._last else self._files.size(name)

    def _until(self, name: str, seq: int) -> int:
        """The beginning of a line, behind all that are numbered lower."""
        _, high = self._near(name, seq)
        end = self._end(name)
        return high if high >= end else self._line_near(name, high, end)[0]

    def _near(self, name: str, seq: int) -> tuple[int, int]:
        """Two places, less than a block apart or one long line: the beginning of a line that is numbered lower, and one
        behind which no line begins that is."""
        low, high = 0, self._end(name)
        while high - low > _BLOCK:
            middle = (low + high) // 2
            start, number = self._line_near(name, middle, high)
            if number is None or number >= seq:
                high = middle
            else:
                low = start
        return low, high

    def _line_near(self, name: str, offset: int, end: int) -> tuple[int, int | None]:
        """The first line that begins behind this place, and its number."""
        place, rest = offset, b""
        for block in self._files.read(name, offset):
            rest += block
            newline = rest.find(b"\n")
            while newline >= 0 and len(rest) - newline > len(_SEQ) + 20:
                start = place + newline + 1
                if start >= end:
                    return start, None
                head = rest[newline + 1 : newline + 1 + len(_SEQ) + 20]
                if head.startswith(_SEQ):
                    return start, int(head[len(_SEQ) :].partition(b",")[0])
                newline = rest.find(b"\n", newline + 1)
            if place + len(rest) >= end:
                break
        return end, None

    def _lines(self, name: str, offset: int) -> Iterator[bytes]:
        end, rest = self._end(name), b""
        place = offset
        for block in self._files.read(name, offset):
            block = block[: end - place]
            place += len(block)
            *whole, rest = (rest + block).split(b"\n")
            yield from (line for line in whole if line.startswith(_SEQ))
            if place >= end:
                return

    def _lines_back(self, name: str, end: int) -> Iterator[bytes]:
        """From the beginning of a line backwards."""
        rest = b""
        while end > 0:
            start = max(0, end - _BLOCK)
            block = self._files.read_at(name, start, end - start) + rest
            first, *whole = block.split(b"\n")
            if start == 0:
                whole.insert(0, first)
            yield from (line for line in reversed(whole) if line.startswith(_SEQ))
            rest = first + b"\n" if start else b""
            end = start
