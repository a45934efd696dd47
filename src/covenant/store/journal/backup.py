"""Backup and restore: the truth of a journal in another folder, and back.

Segments only grow, so a copy of them ends at some whole line of the chain, whoever writes meanwhile; with the history
that stands in for dropped segments it is a whole journal. Archive and snapshots are derived and stay behind. The
manifest is written last: a folder without one is no backup. Backup and restore are made beside, and become visible by
one rename.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from covenant.model.error import BackupFailed, CovenantError, StoreDamaged, UnsupportedFormat
from covenant.store.journal.engine import LOCK, Head
from covenant.store.journal.files import Files, FilesOf
from covenant.store.journal.segment import PREFIX, Position, Reader, read_header, segment_name, segment_names
from covenant.store.journal.snapshot import HISTORY, read_snapshot, snapshot_names
from covenant.store.journal.verify import verify

MANIFEST: Final = "backup.json"
PARTIAL: Final = ".partial"
RESTORING: Final = ".restoring"
FORMAT_VERSION: Final = 1
TRIES_MAX: Final = 10
_MAKING: Final = f"{MANIFEST}.making"
_LEFT: Final = (LOCK, MANIFEST, _MAKING)
_NAME: Final = re.compile(rf"(?:{PREFIX}|{HISTORY})[0-9]{{20}}\.jsonl")


class BackedUp(Struct, frozen=True):
    name: str
    bytes: int
    sha256: str


class Manifest(Struct, frozen=True):
    """What is in a backup, and the head of its chain."""

    covenant: str
    version: int
    seq: int
    hash: str
    at: int  # when the last commit was made
    files: list[BackedUp]

    @property
    def head(self) -> Head:
        return Head(self.seq, self.hash)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class BackupReport(Struct):
    target: str
    head: Head
    files: int
    bytes: int
    tries: int  # more than one when files went away while they were copied


class RestoreReport(Struct):
    folder: str
    head: Head
    files: int
    bytes: int


def backup(folder: str | Path, target: str | Path, *, files: FilesOf = Files) -> BackupReport:
    """Copy a journal, open or not, into a folder that is empty or not there. Everything that was acknowledged before is
    in it."""
    source, place = files(Path(folder)), Path(target).resolve()
    with _told_as_failed(place), _made_beside(place, PARTIAL, files) as copy:
        if not segment_names(source):
            raise BackupFailed(f"there is no journal in {source.folder}", folder=str(source.folder))
        manifest, tries = _copied(source, copy)
        copy.remove(LOCK)
        _write_manifest(copy, manifest)
    return BackupReport(str(target), manifest.head, len(manifest.files), manifest.bytes, tries)


def restore(source: str | Path, folder: str | Path, *, files: FilesOf = Files) -> RestoreReport:
    """Put a backup where a mailbox can open it. It is checked beside, file by file and along the chain, and then
    renamed: there is no store, or a whole one."""
    copy, place = files(Path(source)), Path(folder).resolve()
    with _told_as_failed(place):
        _must_be_free(place)
        manifest = _read_manifest(copy)
        with _made_beside(place, RESTORING, files) as beside:
            _fill(beside, copy, manifest)
    return RestoreReport(str(place), manifest.head, len(manifest.files), manifest.bytes)


@contextmanager
def _told_as_failed(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failed:
        raise BackupFailed(f"{folder} could not be made: {failed}", folder=str(folder)) from failed


@contextmanager
def _made_beside(place: Path, suffix: str, files: FilesOf) -> Iterator[Files]:
    """A folder to fill, which then takes its place: there is none, or a whole one."""
    _must_be_free(place)
    beside = files(place.with_name(f"{place.name}{suffix}"))
    _clear_what_was_left(beside)
    with _owned(beside):
        yield beside
        parent = files(place.parent)
        parent.rename(beside.folder.name, place.name)
        parent.sync_folder()


@contextmanager
def _owned(copy: Files) -> Iterator[None]:
    """Nobody else fills this folder, and when it cannot be filled, it is gone again."""
    _must_be_empty(copy.folder)
    copy.make_folder()
    lock = copy.lock(LOCK)
    try:
        _must_be_empty(copy.folder, but=LOCK)
        try:
            yield
        except (OSError, CovenantError):
            if copy.folder.exists():  # else it has taken its place, and only that may not be durable yet
                _clear(copy)
                copy.remove(LOCK)
                copy.remove_folder()
            raise
    finally:
        lock.release()


def _must_be_free(place: Path) -> None:
    _must_be_empty(place)
    if os.path.ismount(place):  # nothing can be renamed to it, and what is beside it is on another disk
        raise BackupFailed(f"a disk is mounted at {place}: name a folder on it", folder=str(place))


def _must_be_empty(folder: Path, but: str = "") -> None:
    if folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - {but}):
        raise BackupFailed(f"{folder} is not an empty folder", folder=str(folder))


def _clear(copy: Files) -> None:
    for name in copy.names("", ""):
        if name != LOCK:
            copy.remove(name)


def _clear_what_was_left(beside: Files) -> None:
    """By a backup or a restore that was killed; a folder of somebody else is not touched."""
    names = beside.names("", "")
    if any(name not in _LEFT and not _NAME.fullmatch(name) for name in names):
        raise BackupFailed(f"{beside.folder} is in the way", folder=str(beside.folder))
    if names:
        lock = beside.lock(LOCK)
        try:
            _clear(beside)
            beside.remove(LOCK)
        finally:
            lock.release()


# --- there -------------------------------------------------------------------------------------------------


def _copied(source: Files, copy: Files) -> tuple[Manifest, int]:
    """Retention may drop a segment, and a new history replace the old one, while they are copied: then begin again. A
    journal that is found damaged twice in the same place is damaged."""
    damaged: StoreDamaged | None = None
    for number in range(1, TRIES_MAX + 1):
        try:
            return _copy_once(source, copy), number
        except FileNotFoundError:
            damaged = None
        except StoreDamaged as found:
            if damaged is not None and damaged.details == found.details:
                raise
            damaged = found
        _clear(copy)
    raise damaged or BackupFailed("files go away while they are copied", folder=str(source.folder))


def _copy_once(source: Files, copy: Files) -> Manifest:
    names = source.names("", ".jsonl")
    begins = 0
    for name in [name for name in names if name.startswith(HISTORY)][-1:]:
        source.copy_to(name, copy, name)
        begins = read_snapshot(copy, name)[0].dropped_until
    for name in names:
        if name.startswith(PREFIX) and name > segment_name(begins):
            source.copy_to(name, copy, name)
    end = _cut_to_chain(copy)
    copy.sync_folder()
    manifest = Manifest("backup", FORMAT_VERSION, end.seq, end.hash.decode(), end.at, _files_in(copy))
    _must_be_whole(copy, manifest)
    return manifest


def _cut_to_chain(copy: Files) -> Position:
    """A line that was being written when it was read is left out, and what never counted."""
    reader = Reader(copy)
    for _ in reader:
        pass
    end = reader.position
    if end.file is None or end.line == 0:
        raise BackupFailed("the journal has no line yet", folder=str(copy.folder))
    for name in segment_names(copy):
        if name > end.file:
            copy.remove(name)
    sizes = {end.file: end.offset}
    for name, following in pairwise(segment_names(copy)):
        header = read_header(copy, following)
        assert header is not None  # the reader has been through it
        sizes[name] = header.prev_bytes
    for name, size in sizes.items():
        if copy.size(name) > size:
            copy.truncate(name, size)
    return end


def _files_in(copy: Files) -> list[BackedUp]:
    names = [*snapshot_names(copy, HISTORY), *segment_names(copy)]
    return [_measured(copy, name) for name in names]


def _measured(files: Files, name: str) -> BackedUp:
    digest = sha256()
    for block in files.read(name):
        digest.update(block)
    return BackedUp(name, files.size(name), digest.hexdigest())


def _write_manifest(copy: Files, manifest: Manifest) -> None:
    file = copy.create(_MAKING)
    try:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        file.sync()
    finally:
        file.close()
    copy.rename(_MAKING, MANIFEST)
    copy.sync_folder()


def _must_be_whole(copy: Files, manifest: Manifest) -> None:
    """Sound from its first line to its head, with nothing missing between what a history stands in for and the rest."""
    found = verify(copy.folder, manifest.head)
    if not found.is_sound or found.head != manifest.head or found.torn_bytes:
        why = "; ".join(found.damage) or "its chain has another head"
        raise StoreDamaged(f"the copy is not sound: {why}", file=MANIFEST, line=0)
    begins = 0
    for name in snapshot_names(copy, HISTORY)[-1:]:
        header, _ = read_snapshot(copy, name)
        begins = header.dropped_until
        if manifest.seq < header.seq:
            raise StoreDamaged(f"the chain ends before event {header.seq} of {name}", file=name, line=1)
    first = segment_name(begins + 1)
    if first not in segment_names(copy):
        raise StoreDamaged(f"{first} is missing", file=first, line=0)


# --- and back ----------------------------------------------------------------------------------------------


def _read_manifest(copy: Files) -> Manifest:
    if not copy.exists(MANIFEST):
        raise BackupFailed(f"{copy.folder} is no backup: it has no {MANIFEST}", folder=str(copy.folder))
    raw = b"".join(copy.read(MANIFEST))
    try:
        version = msgspec.json.decode(raw, type=dict[str, object]).get("version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            why = f"{MANIFEST} has format {version}; this is {FORMAT_VERSION}"
            raise UnsupportedFormat(why, file=MANIFEST, version=version)
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        raise StoreDamaged(f"{MANIFEST} does not read: {wrong}", file=MANIFEST, line=0) from None
    for file in manifest.files:
        if not _NAME.fullmatch(file.name):
            raise StoreDamaged(f"{MANIFEST} names {file.name!r}", file=MANIFEST, line=0)
    return manifest


def _fill(beside: Files, copy: Files, manifest: Manifest) -> None:
    for file in manifest.files:
        if not copy.exists(file.name):
            raise StoreDamaged(f"{file.name} is missing in the backup", file=file.name, line=0)
        copy.copy_to(file.name, beside, file.name)
        if _measured(beside, file.name) != file:
            raise StoreDamaged(f"{file.name} is not the file that was backed up", file=file.name, line=0)
    beside.sync_folder()
    _must_be_whole(beside, manifest)
