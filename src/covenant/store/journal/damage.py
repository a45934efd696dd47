"""What is wrong with a journal: where its sound chain ends, and what stands behind that.

A survey reads everything and changes nothing. Sound is what `verify` calls sound and a start can use: the chain from
its first line, or from the history that stands in for dropped segments, and a snapshot that the chain bears out.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Final

from msgspec import Struct

from covenant.model.error import StoreDamaged, StoreUnavailable
from covenant.store.journal.archive import FILE as ARCHIVE
from covenant.store.journal.engine import Head
from covenant.store.journal.files import Files
from covenant.store.journal.segment import Position, Reader, read_header, segment_name, segment_names
from covenant.store.journal.snapshot import HISTORY, PLAIN, SnapshotHeader, read_snapshot, snapshot_names

_TRIES: Final = 10


class Damage(Struct, frozen=True):
    """The first thing that does not read as it was written."""

    file: str
    line: int  # 0: the file as a whole
    message: str
    head: Head  # where the sound chain ends
    starts: bool  # a mailbox opens all the same, from a snapshot behind the damage
    refusal: str | None = None  # why a cut does not help


class Survey(Struct):
    """What can stay is the chain up to `end`; what cannot is in the three lists."""

    damage: Damage | None
    end: Position
    derived: list[str]  # may know of what stands behind the end
    trims: dict[str, int]  # segments that count only up to this size
    behind: list[str]  # segments after the end, oldest first

    @property
    def cuts(self) -> bool:
        return bool(self.behind) or self.end.file in self.trims


class _Snapshots(Struct):
    sound: dict[str, SnapshotHeader]
    broken: dict[str, StoreDamaged]


class _Shown(Files):
    """A folder that has only these segments, each of this size: what is appended meanwhile does not count."""

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        super().__init__(folder)
        self._sizes = sizes

    def names(self, prefix: str, suffix: str) -> list[str]:
        return [name for name in self._sizes if name.startswith(prefix) and name.endswith(suffix)]

    def size(self, name: str) -> int:
        return self._sizes[name]

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        room = self._sizes[name] - start
        for block in super().read(name, start):
            if room <= 0:
                return
            yield block[:room]
            room -= len(block)

    def first(self, number: int) -> _Shown:
        return _Shown(self.folder, dict(list(self._sizes.items())[:number]))


def survey(files: Files) -> Survey:
    """May run beside a mailbox that is open: what it appends meanwhile is not looked at, and when its housekeeping
    replaces files, the survey begins again."""
    for _ in range(_TRIES):
        histories = snapshot_names(files, HISTORY)
        try:
            found = _surveyed(files)
        except FileNotFoundError:
            continue
        if snapshot_names(files, HISTORY) == histories:
            return found
    raise StoreUnavailable("files go away while they are read", outcome="unknown")


def _surveyed(files: Files) -> Survey:
    snapshots = _snapshots(files)
    history = _history(files, snapshots)
    base = snapshots.sound.get(history or "")
    names = segment_names(files, 0 if base is None else base.dropped_until)
    shown = _Shown(files.folder, {name: files.size(name) for name in names})
    end, found = _sound_end(shown)
    refusal = snapshots.broken.get(history or "") or _missing(files, names, base, end)
    leaning = _leaning(files, snapshots)
    if leaning is None:
        starts, ahead = found is None and refusal is None, None
    else:
        starts = _stands(files, leaning) and _walk(shown, leaning.position)[1] is None
        ahead = None if starts or found else _wrong(leaning.file, 0, f"event {leaning.seq}, of a snapshot, is missing")

    trims = _void(shown, end)
    void = [_wrong(name, 0, f"{name} has bytes behind its end at {size}") for name, size in trims.items()]
    behind = []
    if found is not None:
        behind = [name for name in names if end.file is None or name > end.file]
        if end.file is not None and shown.size(end.file) > end.offset:
            trims[end.file] = end.offset
    derived = [name for name in snapshots.broken if name != history]
    if found is not None or ahead is not None:
        derived = [*files.names(ARCHIVE, ""), *snapshot_names(files, PLAIN), *derived]
    wrong = [one for one in (found, refusal, ahead, *void, *snapshots.broken.values()) if one is not None]
    damage = _damage(wrong[0], end, starts, refusal) if wrong else None
    return Survey(damage, end, list(dict.fromkeys(derived)), trims, behind)


def _damage(wrong: StoreDamaged, end: Position, starts: bool, refusal: StoreDamaged | None) -> Damage:
    head = Head(end.seq, end.hash.decode())
    why = None if refusal is None else refusal.message
    return Damage(wrong.details["file"], wrong.details["line"], wrong.message, head, starts, why)


def _wrong(file: str, line: int, message: str) -> StoreDamaged:
    return StoreDamaged(message, file=file, line=line)


def _snapshots(files: Files) -> _Snapshots:
    found = _Snapshots({}, {})
    for prefix in (PLAIN, HISTORY):
        for name in snapshot_names(files, prefix):
            try:
                found.sound[name], _ = read_snapshot(files, name)
            except StoreDamaged as damaged:
                found.broken[name] = damaged
    return found


def _history(files: Files, snapshots: _Snapshots) -> str | None:
    """The newest one. It may be broken, unless nothing was dropped yet: then nobody needs it."""
    name = next(reversed(snapshot_names(files, HISTORY)), None)
    nothing_dropped = segment_names(files)[:1] == [segment_name(1)]
    return None if name in snapshots.broken and nothing_dropped else name


def _missing(files: Files, names: list[str], base: SnapshotHeader | None, end: Position) -> StoreDamaged | None:
    """What the sound chain leans on and is not there. A history knows of everything up to the event at which it was
    written, so that no state before that can be told from it."""
    first = segment_name(1 if base is None else base.dropped_until + 1)
    if first not in names and (names or base is not None):
        return _wrong(first, 0, f"{first} is missing")
    if base is not None and (end.seq < base.seq or not _stands(files, base)):
        return _wrong(base.file, 0, f"the sound chain ends before event {base.seq}, where the history was written")
    return None


def _leaning(files: Files, snapshots: _Snapshots) -> SnapshotHeader | None:
    """The snapshot from which a mailbox would start. The archive is read as a file that nobody changes: to open it in
    the usual way may write to it."""
    uri = f"{(files.folder / ARCHIVE).absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            row = connection.execute("select value from meta where name = 'id'").fetchone()
    except sqlite3.Error:
        return None
    plain = [header for name, header in snapshots.sound.items() if name.startswith(PLAIN)]
    return next((header for header in reversed(plain) if row is not None and header.archive == row[0]), None)


def _stands(files: Files, header: SnapshotHeader) -> bool:
    """Whether the chain has the line behind which a snapshot was taken."""
    mark = f'{header.head}"}}\n'.encode()
    return files.exists(header.file) and files.read_at(header.file, header.bytes - len(mark), len(mark)) == mark


def _sound_end(shown: _Shown) -> tuple[Position, StoreDamaged | None]:
    """Where the sound chain ends, and what does not fit behind it. How far a segment counts is said by the next one,
    which may be the damaged one: so the last segment is read once more as if nothing followed it."""
    names = segment_names(shown)
    number = len(names)
    here, blamed = Position(), None
    while number > 0:
        here, found = _walk(shown.first(number))
        if found is None:
            break
        blamed = found
        at = names.index(found.details["file"])
        if here.file == names[at] and at + 1 < number:
            number = at + 1
        elif here.file == names[at] and here.line > 0:
            break
        else:
            number = at
    if blamed is not None and blamed.details["file"] == here.file and 0 < blamed.details["line"] <= here.line:
        blamed = _wrong(names[number], 1, f"{names[number]} does not follow {here.file}")
    return (here if here.line > 0 else Position()), blamed


def _walk(shown: _Shown, start: Position | None = None) -> tuple[Position, StoreDamaged | None]:
    here = Position()
    try:
        reader = Reader(shown, start)
        here = reader.position
        for _ in reader:
            pass
    except StoreDamaged as found:
        return here, found
    return here, None


def _void(shown: _Shown, end: Position) -> dict[str, int]:
    """Segments that are longer than the next one says."""
    kept = [name for name in segment_names(shown) if end.file is not None and name <= end.file]
    headers = [(name, read_header(shown, following)) for name, following in pairwise(kept)]
    return {name: header.prev_bytes for name, header in headers if header and shown.size(name) > header.prev_bytes}
