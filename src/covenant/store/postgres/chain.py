"""The lines of a transaction, each bound to the one before it."""

from __future__ import annotations

from collections.abc import Iterator

from covenant.store.journal.line import Line, encode


class Chain:
    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self.lines: list[Line] = []
        self.raws: list[bytes] = []
        self.size = 0

    def append(self, line: Line) -> None:
        raw, self.mark = encode(line, self.mark)
        self.lines.append(line)
        self.raws.append(raw)
        self.size += len(raw)

    def stretches(self) -> Iterator[tuple[list[Line], bytes]]:
        """Without a gap in their numbers: others may have drawn theirs between two looks."""
        lines = self.lines
        starts = [0, *(at for at in range(1, len(lines)) if lines[at].seq != lines[at - 1].last + 1)]
        for at, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            yield lines[at:end], b"".join(self.raws[at:end])
