"""The lines of the log in their rows: the same bytes as in a journal, and what is told from them."""

from __future__ import annotations

from collections.abc import Iterable

from covenant.store.journal.line import Line


def marks_of(lines: Iterable[Line]) -> str:
    """The tasks that were touched, each with the event that touched it before."""
    marks: dict[str, int] = {}
    for line in lines:
        mark(line, marks)
    return marked(marks)


def mark(line: Line, marks: dict[str, int]) -> None:
    """Note the tasks that one more line touches: of each, the first event tells what was before all of them."""
    for at, event in enumerate(line.events):
        key = event.key
        if key not in marks and ":" not in key and "-" in key:
            marks[key] = line.prev[at] if line.prev else 0


def marked(marks: dict[str, int]) -> str:
    return " ".join([f"{key}:{before}" for key, before in marks.items()])


def lines_in(raw: bytes) -> list[bytes]:
    """Those of a row, each without its newline."""
    return bytes(raw).rstrip(b"\n").split(b"\n")


def mark_in(lines: bytes) -> bytes:
    """The hash that the last of these lines says it has."""
    return lines.rstrip(b"\n")[-66:-2]
