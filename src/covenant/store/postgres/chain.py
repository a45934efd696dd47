"""The lines of a transaction, each bound to the one before it."""

from __future__ import annotations

from covenant.model.record import Key
from covenant.store.journal.line import Line, encode
from covenant.store.postgres.line import mark as note_marks


class Row:
    """Lines without a gap in their numbers: others may have drawn theirs between two looks."""

    __slots__ = ("first", "last", "marks", "raws")

    def __init__(self, first: int) -> None:
        self.first = first
        self.last = 0
        self.marks: dict[Key, int] = {}
        self.raws: list[bytes] = []


class Chain:
    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self.lines: list[Line] = []
        self.rows: list[Row] = []
        self.size = 0  # in bytes
        self.events = 0
        self._next = 0

    def append(self, line: Line) -> None:
        self.add(line, *encode(line, self.mark))

    def add(self, line: Line, raw: bytes, mark: bytes) -> None:
        """One that was encoded behind the last."""
        seq, count = line.seq, len(line.events)
        if seq != self._next:
            self.rows.append(Row(seq))
        row = self.rows[-1]
        self.mark = mark
        self._next = seq + (count or 1)
        row.last = self._next - 1
        row.raws.append(raw)
        note_marks(line, row.marks)
        self.lines.append(line)
        self.size += len(raw)
        self.events += count

    def add_of_task(self, line: Line, raw: bytes, mark: bytes, before: int) -> None:
        """The same for a line of one event, which is of a task; `before` is the one that touched it before."""
        seq = line.seq
        if seq != self._next:
            self.rows.append(Row(seq))
        row = self.rows[-1]
        self.mark = mark
        self._next = seq + 1
        row.last = seq
        row.raws.append(raw)
        row.marks.setdefault(line.events[0].key, before)
        self.lines.append(line)
        self.size += len(raw)
        self.events += 1
