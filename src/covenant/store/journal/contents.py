"""All that a journal holds, read out to be moved elsewhere: its records, wherever they lie, and its log, link by link.

The folder is locked and loaded as for a start, so nobody else has it open, and what a crash left is seen to first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from msgspec import Struct

from covenant.model.error import StoreUnavailable
from covenant.model.limits import Limits
from covenant.model.record import Key, Record, Tombstone
from covenant.store.clock import RandomIds
from covenant.store.journal.engine import LOCK, Head
from covenant.store.journal.files import Files, Lock
from covenant.store.journal.line import Line
from covenant.store.journal.loading import Loaded, load
from covenant.store.journal.segment import Reader, raw_header, segment_names
from covenant.store.journal.snapshot import dropped_until

_ALL: Final = 2**62


class Link(Struct, frozen=True, gc=False):
    """One line of the chain as it stands in its file, with its newline. A header is no commit: `seq` is that of the
    commit behind it."""

    seq: int
    raw: bytes
    line: Line | None


class Contents:
    def __init__(self, folder: str | Path) -> None:
        self._files = Files(folder)
        self._lock: Lock | None = None
        self._loaded: Loaded | None = None

    def __enter__(self) -> Self:
        if not segment_names(self._files):
            raise StoreUnavailable(f"there is no journal in {self._files.folder}", folder=str(self._files.folder))
        self._lock = self._files.lock(LOCK)
        try:
            self._loaded = load(self._files, Limits(), RandomIds())
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failed: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._lock is not None and self._loaded is not None
        self._loaded.archive.close()
        self._lock.release()

    @property
    def head(self) -> Head:
        assert self._loaded is not None
        return Head(self._loaded.position.seq, self._loaded.position.hash.decode())

    @property
    def beginning(self) -> Head:
        """What the chain begins behind: nothing, unless segments were dropped."""
        position = Reader(self._files, after=dropped_until(self._files)).position
        return Head(position.seq, position.hash.decode())

    def records(self) -> Iterator[tuple[Key, Record | Tombstone]]:
        """Those in memory, then those at rest."""
        assert self._loaded is not None
        state, archive = self._loaded.state, self._loaded.archive
        yield from state.records.items()
        for item in archive.beyond_segments(_ALL):
            if item.key not in state.records and item.key not in state.gone:
                yield item.key, item.record

    def links(self) -> Iterator[Link]:
        """The chain from its beginning to its end."""
        reader = Reader(self._files, after=dropped_until(self._files))
        file: str | None = None
        for line in reader:
            if reader.position.file != file:
                file = reader.position.file
                yield self._header(file, line.seq)
            yield Link(line.seq, reader.raw + b"\n", line)
        if reader.position.file != file:
            yield self._header(reader.position.file, reader.position.seq + 1)

    def _header(self, file: str | None, seq: int) -> Link:
        assert file is not None
        raw = raw_header(self._files, file)
        assert raw is not None
        return Link(seq, raw + b"\n", None)
