"""Segments: the files that hold the chain, read in order.

A segment is named by the number of its first event. Only the last one grows. Reading checks every link of the chain;
what a crash may leave behind is cut, and everything else that does not fit stops the reader with file and line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from covenant.model.error import StoreDamaged
from covenant.store.journal.files import Files
from covenant.store.journal.line import (
    GENESIS,
    Header,
    Line,
    batch_of,
    chained,
    decode_header,
    decode_line,
    split_lines,
)

PREFIX: Final = "journal-"
SUFFIX: Final = ".jsonl"
_HEADER_BYTES: Final = 4096  # longer than any header should be

log = logging.getLogger("covenant.journal")


class Position(Struct, gc=False):
    """Where the chain stands: the end of a whole line."""

    file: str | None = None
    offset: int = 0
    line: int = 0
    hash: bytes = GENESIS
    seq: int = 0  # of the last event
    at: int = 0
    batch: int = 0


def segment_name(first: int) -> str:
    return f"{PREFIX}{first:020d}{SUFFIX}"


def segment_names(files: Files, after: int = 0) -> list[str]:
    """Oldest first; those that begin behind this event."""
    return [name for name in files.names(PREFIX, SUFFIX) if name > segment_name(after)]


def read_header(files: Files, name: str) -> Header | None:
    raw = raw_header(files, name)
    return None if raw is None else decode_header(raw, name)


def raw_header(files: Files, name: str) -> bytes | None:
    """None when the file does not hold a whole first line: its making was interrupted."""
    start = files.read_at(name, 0, _HEADER_BYTES)
    blocks = iter([start]) if b"\n" in start else files.read(name)
    for raw, whole in split_lines(blocks):
        return raw if whole else None
    return None


class Reader:
    """Walks the chain from a position to its end. `position` is always behind the last line that was handed out."""

    def __init__(self, files: Files, position: Position | None = None, after: int = 0) -> None:
        self.position = position or _first_position(files, after)
        self.before = self.position.hash  # the link that the last line was chained to
        self.raw = b""  # the last line that was handed out
        self.torn_bytes = 0
        self.void_bytes = 0  # behind the end of a segment that has a successor
        self._files = files
        self._after = after

    def __iter__(self) -> Iterator[Line]:
        names = segment_names(self._files, self._after)
        if self.position.file is not None:
            if self.position.file not in names:
                raise StoreDamaged(f"{self.position.file} is missing", file=self.position.file, line=0)
            names = names[names.index(self.position.file) :]
        if names and read_header(self._files, names[-1]) is None and len(names) > 1:
            names.pop()  # made, but nothing was ever in it
        for at, name in enumerate(names):
            following = read_header(self._files, names[at + 1]) if at + 1 < len(names) else None
            if at + 1 < len(names) and following is None:
                raise StoreDamaged(f"{names[at + 1]} has no header", file=names[at + 1], line=1)
            yield from self._segment(name, following)

    def _segment(self, name: str, following: Header | None) -> Iterator[Line]:
        here = self.position
        if here.file != name:
            here.file, here.offset, here.line = name, 0, 0
        end = None
        if following is not None:
            if following.prev_file != name:
                raise StoreDamaged(f"the segment after {following.prev_file} is missing", file=name, line=0)
            end = following.prev_bytes
        for raw, whole in split_lines(self._files.read(name, here.offset)):
            if end is not None and here.offset >= end:
                self.void_bytes += len(raw) + 1
                continue
            mark = chained(raw, here.hash) if whole else None
            if mark is None:
                self._stop(name, may_be_torn=following is None and not (whole and here.line == 0))
                return
            if here.line == 0:
                self._enter(raw, name, mark)
                continue
            line = decode_line(raw, name, here.line + 1)
            if line.seq != here.seq + 1:
                raise StoreDamaged(f"{name}:{here.line + 1} has number {line.seq}", file=name, line=here.line + 1)
            self.before, self.raw = here.hash, raw
            self._advance(raw, mark)
            here.seq, here.at, here.batch = line.last, line.at, line.batch
            yield line
        if end is not None and here.offset != end:
            raise StoreDamaged(f"{name} ends early", file=name, line=here.line + 1)

    def _enter(self, raw: bytes, name: str, mark: bytes) -> None:
        header = decode_header(raw, name)
        here = self.position
        if header.first != here.seq + 1 or segment_name(header.first) != name:
            raise StoreDamaged(f"{name} begins with number {header.first}", file=name, line=1)
        self._advance(raw, mark)
        here.batch = max(here.batch, header.batch)

    def _advance(self, raw: bytes, mark: bytes) -> None:
        self.position.hash = mark
        self.position.offset += len(raw) + 1
        self.position.line += 1

    def _stop(self, name: str, may_be_torn: bool) -> None:
        """A line that does not fit. It is what a crash left only in the last segment, if nothing after it was written
        later than the batch that was open when it happened; and a header only if it is not whole, because what it is
        chained to was durable before it was written."""
        here = self.position
        number = here.line + 1
        if not may_be_torn:
            raise StoreDamaged(f"{name}:{number} is damaged", file=name, line=number)
        for raw, _ in split_lines(self._files.read(name, here.offset)):
            batch = batch_of(raw)
            if batch is not None and batch > here.batch + 1:
                raise StoreDamaged(f"{name}:{number} is damaged, and later lines follow it", file=name, line=number)
        self.torn_bytes = self._files.size(name) - here.offset


def _first_position(files: Files, after: int) -> Position:
    """Where the oldest segment begins; its header says what the chain was like before."""
    names = segment_names(files, after)
    header = read_header(files, names[0]) if names else None
    return Position() if header is None else Position(seq=header.first - 1, hash=header.prev.encode())
