"""Snapshots: the records in memory at one point of the chain, so that a start need not read the whole of it.

A snapshot is written beside, synced, and renamed into place; it is never changed. There are two sorts. A plain one
leans on the archive for everything at rest. A history one stands in for segments that were dropped: it also holds what
the archive had of them, so that the archive can be rebuilt from it and the segments that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import islice
from typing import Final

import msgspec
from msgspec import Struct

from covenant.model.card import Card
from covenant.model.error import StoreDamaged, UnsupportedFormat
from covenant.model.peer import Grant, Peer
from covenant.model.push import Push
from covenant.model.record import (
    Chunk,
    Horizon,
    Key,
    Late,
    Part,
    Record,
    Said,
    SendKey,
    SignedHead,
    Slot,
    TaskRecord,
    Tombstone,
)
from covenant.model.run import Entry, Mark, Run, Signal, Step
from covenant.store.journal.breath import breathe
from covenant.store.journal.files import AppendFile, Files
from covenant.store.journal.line import FORMAT_VERSION, split_lines
from covenant.store.journal.segment import Position
from covenant.store.journal.sharing import Sharing

PLAIN: Final = "snapshot-"
HISTORY: Final = "history-"
SUFFIX: Final = ".jsonl"
_CHUNK: Final = 64


class SavedTask(Struct, tag="task", tag_field="kind", gc=False):
    key: Key
    record: TaskRecord


class SavedPart(Struct, tag="part", tag_field="kind", gc=False):
    key: Key
    record: Part


class SavedLate(Struct, tag="late", tag_field="kind", gc=False):
    key: Key
    record: Late


class SavedSaid(Struct, tag="said", tag_field="kind", gc=False):
    key: Key
    record: Said


class SavedChunk(Struct, tag="chunk", tag_field="kind", gc=False):
    key: Key
    record: Chunk


class SavedPush(Struct, tag="push", tag_field="kind", gc=False):
    key: Key
    record: Push


class SavedCard(Struct, tag="card", tag_field="kind", gc=False):
    key: Key
    record: Card


class SavedSlot(Struct, tag="slot", tag_field="kind", gc=False):
    key: Key
    record: Slot


class SavedHorizon(Struct, tag="horizon", tag_field="kind", gc=False):
    key: Key
    record: Horizon


class SavedTombstone(Struct, tag="tombstone", tag_field="kind", gc=False):
    key: Key
    record: Tombstone


class SavedPeer(Struct, tag="peer", tag_field="kind", gc=False):
    key: Key
    record: Peer


class SavedGrant(Struct, tag="grant", tag_field="kind", gc=False):
    key: Key
    record: Grant


class SavedRun(Struct, tag="run", tag_field="kind", gc=False):
    key: Key
    record: Run


class SavedStep(Struct, tag="step", tag_field="kind", gc=False):
    key: Key
    record: Step


class SavedEntry(Struct, tag="entry", tag_field="kind", gc=False):
    key: Key
    record: Entry


class SavedMark(Struct, tag="mark", tag_field="kind", gc=False):
    key: Key
    record: Mark


class SavedSignal(Struct, tag="signal", tag_field="kind", gc=False):
    key: Key
    record: Signal


class SavedHead(Struct, tag="head", tag_field="kind", gc=False):
    key: Key
    record: SignedHead


class SavedSendKey(Struct, tag="send_key", tag_field="kind", gc=False):
    key: Key
    record: SendKey


Saved = (
    SavedTask
    | SavedPart
    | SavedSaid
    | SavedChunk
    | SavedPush
    | SavedCard
    | SavedLate
    | SavedSlot
    | SavedHorizon
    | SavedTombstone
    | SavedPeer
    | SavedGrant
    | SavedHead
    | SavedRun
    | SavedStep
    | SavedEntry
    | SavedMark
    | SavedSignal
    | SavedSendKey
)

_SAVED: Final[dict[type, type]] = {
    TaskRecord: SavedTask,
    Part: SavedPart,
    Late: SavedLate,
    Said: SavedSaid,
    Chunk: SavedChunk,
    Push: SavedPush,
    Card: SavedCard,
    Slot: SavedSlot,
    Horizon: SavedHorizon,
    Tombstone: SavedTombstone,
    Peer: SavedPeer,
    Grant: SavedGrant,
    SignedHead: SavedHead,
    Run: SavedRun,
    Step: SavedStep,
    Entry: SavedEntry,
    Mark: SavedMark,
    Signal: SavedSignal,
    SendKey: SavedSendKey,
}


class SnapshotHeader(Struct, frozen=True, gc=False):
    covenant: str
    version: int
    file: str
    bytes: int
    line: int
    head: str
    seq: int
    at: int
    batch: int
    archive: str
    dropped_until: int  # a history stands in for the segments up to this event
    gone: list[Key]

    @property
    def position(self) -> Position:
        return Position(self.file, self.bytes, self.line, self.head.encode(), self.seq, self.at, self.batch)


class Footer(Struct, frozen=True, gc=False):
    records: int
    sha256: str


_encoder: Final = msgspec.json.Encoder()
_header_decoder: Final = msgspec.json.Decoder(SnapshotHeader)
_saved_decoder: Final = msgspec.json.Decoder(Saved)
_footer_decoder: Final = msgspec.json.Decoder(Footer)
_any_decoder: Final = msgspec.json.Decoder(dict[str, object])


def saved(key: Key, record: Record | Tombstone) -> Saved:
    wrapped: Saved = _SAVED[type(record)](key, record)
    return wrapped


def header_of(position: Position, archive: str, dropped_until: int, gone: Iterable[Key]) -> SnapshotHeader:
    assert position.file is not None
    return SnapshotHeader(
        covenant="snapshot",
        version=FORMAT_VERSION,
        file=position.file,
        bytes=position.offset,
        line=position.line,
        head=position.hash.decode(),
        seq=position.seq,
        at=position.at,
        batch=position.batch,
        archive=archive,
        dropped_until=dropped_until,
        gone=list(gone),
    )


def write_snapshot(files: Files, prefix: str, header: SnapshotHeader, records: Iterator[Saved]) -> int:
    """Write it and put it into place; returns its size. Runs beside the event loop, and lets it in often."""
    name = f"{prefix}{header.seq:020d}{SUFFIX}"
    making = f"{name}.making"
    files.remove(making)
    file = files.create(making)
    try:
        try:
            _write(file, header, records)
        finally:
            file.close()
        files.rename(making, name)
    except OSError:
        files.remove(making)  # on a full disk it would take what room there is from the lines that everybody needs
        raise
    files.sync_folder()
    return file.size


def _write(file: AppendFile, header: SnapshotHeader, records: Iterator[Saved]) -> None:
    first = _encoder.encode(header) + b"\n"
    digest = sha256(first)
    file.write(first)
    count = 0
    while chunk := list(islice(records, _CHUNK)):
        count += len(chunk)
        block = _encoder.encode_lines(chunk)
        digest.update(block)
        file.write(block)
        breathe()
    file.write(_encoder.encode(Footer(count, digest.hexdigest())) + b"\n")
    file.sync()


def snapshot_names(files: Files, prefix: str) -> list[str]:
    return files.names(prefix, SUFFIX)


def read_snapshot(files: Files, name: str) -> tuple[SnapshotHeader, list[Saved]]:
    """All of it, or an error: a snapshot is whole or worthless."""
    digest = sha256()
    header: SnapshotHeader | None = None
    records: list[Saved] = []
    sharing = Sharing()
    last: bytes | None = None  # held back: the footer is not part of what it vouches for
    try:
        for raw, whole in split_lines(files.read(name)):
            if not whole:
                raise StoreDamaged(f"{name} is cut off", file=name, line=len(records) + 2)
            if last is not None:
                digest.update(last + b"\n")
                if header is None:
                    header = _decode_header(last, name)
                else:
                    item = _saved_decoder.decode(last)
                    sharing.record(item.key, item.record)  # at once: there may be a million of them
                    records.append(item)
            last = raw
        if header is None or last is None:
            raise StoreDamaged(f"{name} is cut off", file=name, line=1)
        footer = _footer_decoder.decode(last)
    except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        raise StoreDamaged(f"{name} does not read: {wrong}", file=name, line=len(records) + 2) from None
    if footer.records != len(records) or footer.sha256 != digest.hexdigest():
        raise StoreDamaged(f"{name} was changed after it was written", file=name, line=len(records) + 2)
    return header, records


def dropped_until(files: Files) -> int:
    """Segments that begin at or before this event are dropped, even where a crash has left some of them."""
    for name in reversed(snapshot_names(files, HISTORY)):
        for raw, whole in split_lines(files.read(name)):
            try:
                return _decode_header(raw, name).dropped_until if whole else 0
            except (msgspec.MsgspecError, UnicodeDecodeError):
                return 0  # whoever needs it will say that it is damaged
    return 0


def _decode_header(raw: bytes, name: str) -> SnapshotHeader:
    version = _any_decoder.decode(raw).get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UnsupportedFormat(f"{name} has format {version}; this is {FORMAT_VERSION}", file=name, version=version)
    return _header_decoder.decode(raw)
