"""The growing end of the chain: lines gather in a buffer, go out in batches, and segments follow one another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from covenant.model.audit import AuditRow
from covenant.model.event import Event
from covenant.store.journal.files import AppendFile, Files
from covenant.store.journal.line import FORMAT_VERSION, Header, Line, encode
from covenant.store.journal.segment import Position, segment_name

_SMOOTHING: Final = 0.1


class Batch(Struct, gc=False):
    """Lines that are written and synced together, and where the chain stands behind them."""

    data: bytes
    lines: int
    hash: bytes
    seq: int
    at: int
    number: int


class Writer:
    """`position` is the durable end of the chain; what was added since is in the buffer or in a batch on its way."""

    def __init__(self, files: Files, position: Position, on_first: Callable[[], None]) -> None:
        self.position = position
        self._on_first = on_first  # called when something comes into an empty buffer
        self.buffered_bytes = 0
        self.sync_us = 0.0  # how long a sync takes of late
        self._files = files
        self._file: AppendFile | None = None
        self._hash = position.hash
        self._seq = position.seq
        self._at = position.at
        self._buffer: list[bytes] = []
        self._batch = position.batch + 1
        self._on_its_way: Batch | None = None

    @property
    def is_empty(self) -> bool:
        return not self._buffer

    def resume(self) -> None:
        """Go on in the last segment, if there is one. Its end may be in the memory of the system only: whoever was
        killed had written it and not synced it, and now it is about to be told."""
        if self._file is None and self.position.file is not None:
            self._file = self._files.append_to(self.position.file)
            self._file.sync()

    def add(
        self,
        seq: int,
        at: int,
        by: str,
        events: Sequence[Event],
        prev: Sequence[int] = (),
        audit: Sequence[AuditRow] = (),
    ) -> None:
        data, self._hash = encode(Line(seq, at, self._batch, events, by, prev, audit), self._hash)
        self._seq = seq + (len(events) or 1) - 1
        self._at = at
        if not self._buffer:
            self._on_first()
        self._buffer.append(data)
        self.buffered_bytes += len(data)

    def take(self) -> Batch:
        batch = Batch(b"".join(self._buffer), len(self._buffer), self._hash, self._seq, self._at, self._batch)
        self._buffer = []
        self.buffered_bytes = 0
        self._batch += 1
        self._on_its_way = batch
        return batch

    @property
    def end(self) -> Position:
        """Where the chain will stand once all that was added is durable."""
        here, going = self.position, self._on_its_way
        lines, size = (0, 0) if going is None else (going.lines, len(going.data))
        return Position(
            here.file,
            here.offset + size + self.buffered_bytes,
            here.line + lines + len(self._buffer),
            self._hash,
            self._seq,
            self._at,
            self._batch if self._buffer else self._batch - 1,
        )

    def write(self, batch: Batch) -> None:
        """Put it on disk. May be called from a thread, one batch at a time."""
        assert self._file is not None
        start = time.perf_counter()
        self._file.write(batch.data)
        self._file.sync()
        self.sync_us += _SMOOTHING * ((time.perf_counter() - start) * 1e6 - self.sync_us)

    def written(self, batch: Batch) -> None:
        here = self.position
        self._on_its_way = None
        here.offset += len(batch.data)
        here.line += batch.lines
        here.hash = batch.hash
        here.seq = batch.seq
        here.at = batch.at
        here.batch = batch.number

    def begin_segment(self, at: int) -> None:
        """Start a new file; nothing may be waiting to be written. The header says how far the old one counts."""
        assert not self._buffer
        here = self.position
        if here.file == segment_name(here.seq + 1):
            self._take_up_empty(here.file)
            return
        header = Header(
            covenant="journal",
            version=FORMAT_VERSION,
            first=here.seq + 1,
            at=at,
            batch=self._batch,
            prev=here.hash.decode(),
            prev_file=here.file,
            prev_bytes=here.offset if here.file else 0,
        )
        data, mark = encode(header, here.hash)
        name = segment_name(header.first)
        self._files.remove(name)
        file = self._files.create(name)
        try:
            file.write(data)
            file.sync()
            self._files.sync_folder()
        except BaseException:
            file.close()
            raise
        self.close()
        self._file = file
        self._hash = mark
        self.position = Position(name, len(data), 1, mark, here.seq, here.at, self._batch)
        self._batch += 1

    def _take_up_empty(self, name: str) -> None:
        """The last segment holds only its header, which may not be durable yet."""
        file = self._files.append_to(name)
        try:
            file.sync()
            self._files.sync_folder()
        except BaseException:
            file.close()
            raise
        self.close()
        self._file = file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
