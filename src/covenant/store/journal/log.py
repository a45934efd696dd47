"""The log read back: any stretch of it, from any event, without reading what lies before.

A line begins with its number, so that a place in a segment is found by bisection over its bytes. A stretch is bounded
in commits and in bytes, and whoever wants more goes on from its last event: only an empty one is the end. A segment
that retention drops meanwhile is gone, as if it had been dropped before the look.
"""

from __future__ import annotations

import errno
import re
from bisect import bisect_right
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

from covenant.model.audit import Logged
from covenant.store.journal.files import Files, ReadFile
from covenant.store.journal.line import decode_line, split_lines
from covenant.store.journal.segment import segment_name, segment_names

STRETCH_BYTES_MAX: Final = 4 << 20  # of lines; a stretch holds at least one commit, however long
_PROBE: Final = 4096  # most lines are shorter
_BLOCK: Final = 64 * 1024
_SEQ: Final = b'{"seq":'
_NUMBERED: Final = re.compile(rb'\n\{"seq":([0-9]{1,20}),')
_NUMBERED_BYTES_MAX: Final = 1 + len(_SEQ) + 20 + 1


class Log:
    """The segments as far as this place in the last one, which must be there: else FileNotFoundError."""

    def __init__(self, files: Files, last: str | None, size: int) -> None:
        self._files = files
        self._last = last
        self._size = size
        self._names = [] if last is None else [name for name in segment_names(files) if name <= last]
        self._open: _Segment | None = None
        if last is not None and last not in self._names:
            raise FileNotFoundError(errno.ENOENT, f"{last} is gone")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failed: BaseException | None, where: TracebackType | None
    ) -> None:
        self._let_go()

    def after(self, seq: int, limit: int) -> list[Logged]:
        """The commits that hold events behind this one."""
        found = _Stretch(limit)
        for name in self._names[self._place(seq + 1) :]:
            segment = self._segment(name)
            if segment is None:
                continue
            for raw in segment.lines(segment.around(seq + 2)[0]):
                logged = decode_line(raw, name, 0).logged()
                if logged.last > seq and not found.take(logged, raw):
                    return found.commits
        return found.commits

    def before(self, seq: int | None, limit: int) -> list[Logged]:
        """The commits that begin before this event, the newest first."""
        found = _Stretch(limit)
        names = self._names if seq is None else self._names[: self._place(seq) + 1]
        for name in reversed(names):
            segment = self._segment(name)
            if segment is None:
                break
            for raw in segment.lines_back(segment.end if seq is None else segment.around(seq)[1]):
                if not found.take(decode_line(raw, name, 0).logged(), raw):
                    return found.commits
        return found.commits

    def trail(self, seq: int, key: str, limit: int) -> list[Logged]:
        """The commits that touched this record, from the one that holds this event back, the newest first. What happens
        to a record lies mostly close together: the lines before the last one are read on, and searched for only where
        they lead too far."""
        found = _Stretch(limit)
        before: Iterator[bytes] = iter(())
        while seq > 0:
            raw = _close_by(before, seq)
            if raw is None:
                before = self._lines_back_from(seq)
                raw = next(before, None)
            if raw is None or self._open is None:
                break
            logged = decode_line(raw, self._open.name, 0).logged()
            if not logged.seq <= seq <= logged.last or not found.take(logged, raw):
                break
            seq = logged.previous(key)
        return found.commits

    def _lines_back_from(self, seq: int) -> Iterator[bytes]:
        """From the one that holds this event; or would, if it was dropped, or is not yet there."""
        for name in self._names[self._place(seq) :][:1]:
            segment = self._segment(name)
            if segment is not None:
                return segment.lines_back(segment.around(seq + 1)[1])
        return iter(())

    def _place(self, seq: int) -> int:
        """Which segment would hold this event."""
        return max(0, bisect_right(self._names, segment_name(max(0, seq))) - 1)

    def _segment(self, name: str) -> _Segment | None:
        """One is open at a time; None when it is gone."""
        if self._open is None or self._open.name != name:
            self._let_go()
            try:
                file = self._files.open(name)
            except FileNotFoundError:
                if name == self._last:
                    raise
                return None
            self._open = _Segment(name, file, self._size if name == self._last else file.size)
        return self._open

    def _let_go(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _close_by(lines: Iterator[bytes], seq: int) -> bytes | None:
    """Of lines that go back, the one that holds this event; None when it is further away than a search costs."""
    passed = 0
    for raw in lines:
        numbered = _NUMBERED.match(b"\n" + raw[:_NUMBERED_BYTES_MAX])
        if numbered is not None and int(numbered[1]) <= seq:
            return raw
        passed += len(raw)
        if passed > _BLOCK:
            break
    return None


class _Stretch:
    """Commits, until there are enough of them."""

    def __init__(self, limit: int) -> None:
        self.commits: list[Logged] = []
        self._limit = limit
        self._bytes = 0

    def take(self, logged: Logged, raw: bytes) -> bool:
        """Whether there is room for more."""
        self.commits.append(logged)
        self._bytes += len(raw)
        return len(self.commits) < self._limit and self._bytes < STRETCH_BYTES_MAX


class _Segment:
    """One segment that counts as far as `end`: a header, then lines that are numbered ever higher."""

    def __init__(self, name: str, file: ReadFile, end: int) -> None:
        self.name = name
        self.end = end
        self._file = file

    def close(self) -> None:
        self._file.close()

    def around(self, seq: int) -> tuple[int, int]:
        """Where the last line begins that is numbered lower (or the header), and where the next one does."""
        low, high = 0, self.end
        until = high  # no line begins from here to `high`
        while until - low > 1:
            middle = (low + until) // 2
            found = self._first_in(middle, until)
            if found is not None and found[1] < seq:
                low = found[0]
            else:
                high = high if found is None else found[0]
                until = middle
        return low, high

    def _first_in(self, start: int, stop: int) -> tuple[int, int] | None:
        """The first line that begins in this range, and its number."""
        place, size = start - 1, _PROBE  # the newline before it may be the last byte before the range
        while place < stop - 1:
            found = _NUMBERED.search(self._file.read_at(place, size + _NUMBERED_BYTES_MAX))
            if found is not None:
                begins = place + found.start() + 1
                return (begins, int(found[1])) if begins < stop else None
            place += size
            size = min(2 * size, _BLOCK)
        return None

    def lines(self, offset: int) -> Iterator[bytes]:
        """From the beginning of a line on."""
        return (line for line, whole in split_lines(self._blocks(offset)) if whole and line.startswith(_SEQ))

    def _blocks(self, offset: int) -> Iterator[bytes]:
        size = _PROBE
        while block := self._file.read_at(offset, min(size, self.end - offset)):
            yield block
            offset += len(block)
            size = min(2 * size, _BLOCK)

    def lines_back(self, end: int) -> Iterator[bytes]:
        """From the beginning of a line backwards."""
        parts: list[bytes] = []  # of the line whose beginning is not reached yet, the last part first
        size = _PROBE
        while end > 0:
            start = max(0, end - size)
            first, *others = self._file.read_at(start, end - start).split(b"\n")
            for part in reversed(others):
                parts.append(part)
                line = b"".join(reversed(parts))
                parts = []
                if line.startswith(_SEQ):
                    yield line
            parts.append(first)
            end = start
            size = min(2 * size, _BLOCK)
