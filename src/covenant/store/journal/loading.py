"""How a journal comes back: the newest snapshot that fits, then the lines after it.

Where there is no snapshot, or the archive that it leans on is lost, everything is made anew from the segments and, if
some were dropped, from the history that stands in for them. What a crash leaves behind the last whole line is cut.
"""

from __future__ import annotations

import errno
import logging
from contextlib import ExitStack

from msgspec import Struct

from covenant.model.error import StoreDamaged, StoreUnavailable
from covenant.model.event import Sent
from covenant.model.limits import Limits
from covenant.model.record import Key, Record, Tombstone
from covenant.rules.context import Ids
from covenant.rules.retention import at_rest
from covenant.store.journal import archive as archives
from covenant.store.journal.archive import Archive, ArchiveFailed
from covenant.store.journal.files import Files
from covenant.store.journal.segment import Position, Reader, segment_names
from covenant.store.journal.sharing import Sharing
from covenant.store.journal.snapshot import (
    HISTORY,
    PLAIN,
    Saved,
    SnapshotHeader,
    dropped_until,
    read_snapshot,
    snapshot_names,
)
from covenant.store.state import State

log = logging.getLogger("covenant.journal")

_LOADING_BATCHES = 8
_FILTER_PAYS = 16  # as many bytes of an archive are read into its filter while one byte of a log is replayed without it


class Loaded(Struct):
    state: State
    archive: Archive
    position: Position
    snapshot_bytes: int  # of the snapshot that was used
    tail_bytes: int  # of what was read after it


def load(files: Files, limits: Limits, ids: Ids) -> Loaded:
    for name in files.names("", ".making"):
        files.remove(name)
    dropped = dropped_until(files)
    kept = segment_names(files, dropped)
    for name in segment_names(files):
        if name not in kept:
            files.remove(name)  # a crash interrupted its going
    return _by_snapshot(files, limits, dropped) or _anew(files, limits, ids)


def _replayed(
    files: Files, limits: Limits, state: State, archive: Archive, reader: Reader, snapshot_bytes: int
) -> Loaded:
    start = _bytes_until(files, reader.position)
    left = sum(files.size(name) for name in segment_names(files)) - start
    if archive.wants_filter and left * _FILTER_PAYS > files.size(archives.FILE):
        archive.fill_filter()  # or else each new id would be looked for in vain
        archive.use_filled()
    sharing = Sharing()
    for line in reader:
        for event in line.events:
            if type(event) is Sent:
                sharing.task(event.key, event.task)
        state.replay(line.events, line.at, line.seq)
        state.quiet()
        if len(state.rested) > limits.finished_tail_max + _LOADING_BATCHES * limits.archive_batch:
            _archive_what_rests(state, archive, limits)
    state.order = reader.position.seq
    tail = _bytes_until(files, reader.position) - start
    _tidy_end(files, reader)
    return Loaded(state, archive, reader.position, snapshot_bytes, tail)


def _bytes_until(files: Files, position: Position) -> int:
    before = [name for name in segment_names(files) if position.file is not None and name < position.file]
    return sum(files.size(name) for name in before) + position.offset


def _by_snapshot(files: Files, limits: Limits, dropped: int) -> Loaded | None:
    """None where no snapshot fits, or the archive that they lean on does not read."""
    names = snapshot_names(files, PLAIN)
    if not names or not files.exists(archives.FILE):
        return None
    with ExitStack() as failing:
        try:
            archive = Archive(files.folder / archives.FILE)
            failing.callback(archive.close)
            found = _from_snapshot(files, names, archive, dropped)
            loaded = None if found is None else _replayed(files, limits, *found)
        except (ArchiveFailed, StoreUnavailable) as damaged:
            if isinstance(damaged, OSError) and damaged.errno == errno.ENOSPC:
                raise
            log.warning("the archive does not read and is rebuilt: %s", damaged)
            return None
        if loaded is not None:
            failing.pop_all()
        return loaded


def _anew(files: Files, limits: Limits, ids: Ids) -> Loaded:
    found = _from_the_beginning(files, limits, ids)
    try:
        return _replayed(files, limits, *found)
    except BaseException:
        found[1].close()
        raise


def _from_snapshot(
    files: Files, names: list[str], archive: Archive, dropped: int
) -> tuple[State, Archive, Reader, int] | None:
    for name in reversed(names):
        try:
            header, records = read_snapshot(files, name)
        except StoreDamaged as damaged:
            log.warning("%s; it is passed over", damaged)
            continue
        if header.seq < dropped:
            continue  # a history has taken the place of the segment that it stands in
        if header.archive == archive.id and header.seq > archive.settled:
            log.warning("the archive is older than %s and is rebuilt", name)
            return None
        if header.archive == archive.id:
            _check_place(files, header.position)
            state = _restored(header, records, archive)
            return state, archive, Reader(files, header.position), files.size(name)
    return None


def _check_place(files: Files, position: Position) -> None:
    """A snapshot stands behind a line that was durable before it: that line must be there."""
    assert position.file is not None
    link = b'"hash":"%b"}\n' % position.hash
    there = files.exists(position.file) and files.size(position.file) >= position.offset
    if not there or files.read_at(position.file, position.offset - len(link), len(link)) != link:
        raise StoreDamaged(
            f"{position.file}:{position.line} is not the line that a snapshot was taken behind",
            file=position.file,
            line=position.line,
        )


def _from_the_beginning(files: Files, limits: Limits, ids: Ids) -> tuple[State, Archive, Reader, int]:
    remove_archive(files)
    for name in snapshot_names(files, PLAIN):
        files.remove(name)  # it leans on the archive that is gone
    reader = Reader(files)
    histories = snapshot_names(files, HISTORY)
    if not histories and reader.position.seq > 0:
        first = segment_names(files)[0]
        raise StoreDamaged(f"segments before {first} are missing, with no history in their place", file=first, line=1)
    archive = Archive(files.folder / archives.FILE)
    archive.set_id(ids.lease())
    if histories:
        header, records = read_snapshot(files, histories[-1])
        archive.store_saved([item for item in records if _is_resting(item)])
        state = _restored(header, [item for item in records if not _is_resting(item)], archive)
    else:
        state = State(archive)
    archive.fill_filter()
    archive.use_filled()
    return state, archive, reader, 0


def remove_archive(files: Files) -> None:
    for suffix in ("", "-wal", "-shm"):
        files.remove(archives.FILE + suffix)


def _restored(header: SnapshotHeader, records: list[Saved], archive: Archive) -> State:
    state = State(archive)
    records.sort(key=lambda item: 0 if isinstance(item.record, Tombstone) else item.record.order)
    for item in records:
        assert not isinstance(item.record, Tombstone)
        state.restore(item.key, item.record)
    state.gone.update(header.gone)
    state.order = header.seq
    state.at = header.at
    state.forget_orphans()  # the archive may be newer, and their task be gone, or sent anew
    state.quiet()
    return state


def _is_resting(item: Saved) -> bool:
    return isinstance(item.record, Tombstone) or at_rest(item.record)


def _archive_what_rests(state: State, archive: Archive, limits: Limits) -> None:
    batch = resting_batch(state, len(state.rested), limits.finished_tail_max, state.order)
    gone = list(state.gone)
    archive.store(batch, gone, limits.archive_batch)
    forget(state, archive, batch)
    state.gone.difference_update(gone)
    if archive.wants_filter:
        archive.fill_filter()
        archive.use_filled()


def resting_batch(state: State, limit: int, tail: int, durable_order: int) -> list[tuple[Key, Record]]:
    """The oldest records at rest, beyond the tail that stays in memory and no newer than what is durable."""
    rested = state.rested
    batch: list[tuple[Key, Record]] = []
    while len(batch) < limit and len(rested) > tail:
        record = state.records.get(rested[0])
        if record is None or isinstance(record, Tombstone) or not at_rest(record):
            rested.popleft()
            continue
        if record.order > durable_order:
            break
        batch.append((rested.popleft(), record))
    return batch


def forget(state: State, archive: Archive, batch: list[tuple[Key, Record]]) -> None:
    """The archive has these now: memory lets go of those that have not changed meanwhile."""
    archive.note([key for key, _ in batch])
    records = state.records
    for key, record in batch:
        if records.get(key) is record:
            state.forget(key)


def _tidy_end(files: Files, reader: Reader) -> None:
    """Cut what a crash left behind the chain, and remove files in which nothing was ever written."""
    here = reader.position
    if reader.torn_bytes and here.file is not None and here.line > 0:
        log.warning("%s: %d bytes of an unfinished write are cut off", here.file, reader.torn_bytes)
        files.truncate(here.file, here.offset)
    for name in segment_names(files):
        if here.file is None or name > here.file or (name == here.file and here.line == 0):
            log.warning("%s was never begun and is removed", name)
            files.remove(name)
    if here.line == 0:
        here.file = None
