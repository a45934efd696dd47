"""The lines of a transaction, each bound to the one before it."""

from __future__ import annotations

from collections.abc import Iterator

from covenant.store.journal.line import Line, encode


class Chain:
    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self.lines: list[Line] = []
        self.raws: list[bytes] = []
        self.size = 0  # in bytes
        self.events = 0
        self._starts: list[int] = []  # of lines before which there is a gap in the numbers
        self._next = 0

    def append(self, line: Line) -> None:
        self.add(line, *encode(line, self.mark))

    def add(self, line: Line, raw: bytes, mark: bytes) -> None:
        """One that was encoded behind the last."""
        self.mark = mark
        if line.seq != self._next:
            self._starts.append(len(self.lines))
        self._next = line.seq + (len(line.events) or 1)
        self.lines.append(line)
        self.raws.append(raw)
        self.size += len(raw)
        self.events += len(line.events)

    def stretches(self) -> Iterator[tuple[list[Line], bytes]]:
        """Without a gap in their numbers: others may have drawn theirs between two looks."""
        lines, starts = self.lines, self._starts
        for at, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            yield lines[at:end], b"".join(self.raws[at:end])
