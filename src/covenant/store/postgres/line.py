"""The lines of the log in their rows: the same bytes as in a journal, and what is told from them."""

from __future__ import annotations

from collections.abc import Iterable

from covenant.store.journal.line import Line


def marks_of(lines: Iterable[Line]) -> str:
    """The tasks that were touched, each with the event that touched it before."""
    first: dict[str, int] = {}
    for line in lines:
        prev = line.prev or [0] * len(line.events)
        for event, before in zip(line.events, prev, strict=True):
            key = event.key
            if key not in first and ":" not in key and "-" in key:
                first[key] = before
    return " ".join([f"{key}:{before}" for key, before in first.items()])


def lines_in(raw: bytes) -> list[bytes]:
    """Those of a row, each without its newline."""
    return bytes(raw).rstrip(b"\n").split(b"\n")


def mark_in(lines: bytes) -> bytes:
    """The hash that the last of these lines says it has."""
    return lines.rstrip(b"\n")[-66:-2]
