"""The journal engine: live state in memory, every commit a line on disk before its answer leaves.

Writes are group-committed. All commits of one turn of the event loop go out with one write and one sync; a fast disk is
waited for on the spot, a slow one from a thread while the next batch fills. On any error of writing or syncing, all who
wait are told that the outcome is unknown, memory is dropped, and the engine reopens from what is durable: an fsync that
failed cannot be retried.

Housekeeping runs beside the loop: records at rest move to the archive, snapshots keep starts short, and segments past
retention go.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Final

from msgspec import Struct

from covenant.model.command import CompactHistory
from covenant.model.error import CovenantError, StoreClosed, StoreDamaged, StoreFull, StoreUnavailable
from covenant.model.limits import Limits
from covenant.model.record import Key, Record, Tombstone
from covenant.model.view import Compaction
from covenant.rules.context import Commit, Ids
from covenant.rules.retention import at_rest
from covenant.store.clock import Clock
from covenant.store.embedded import Embedded
from covenant.store.journal import archive as archives
from covenant.store.journal import snapshot as snapshots
from covenant.store.journal.archive import Archive
from covenant.store.journal.files import AppendFile, Files, Lock
from covenant.store.journal.line import FORMAT_VERSION, Header, Line, encode
from covenant.store.journal.segment import Position, Reader, read_header, segment_name, segment_names
from covenant.store.journal.snapshot import HISTORY, PLAIN, Saved, header_of, read_snapshot, saved, write_snapshot
from covenant.store.state import State

LOCK: Final = "lock"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger("covenant.journal")


class Stats(Struct):
    """What the engine has written since it was opened."""

    commits: int = 0
    events: int = 0
    syncs: int = 0
    bytes: int = 0
    archived: int = 0
    snapshots: int = 0
    reopened: int = 0


class Head(Struct, frozen=True):
    """The end of the chain: export it, and `verify` finds any change before it."""

    seq: int
    hash: str


class Journal(Embedded):
    def __init__(self, folder: str | Path, limits: Limits, clock: Clock, ids: Ids, files: Files | None = None) -> None:
        super().__init__(limits, clock, ids)
        self.stats = Stats()
        self._ids = ids
        self._files = files or Files(folder)
        self._lock: Lock | None = None
        self._archive: Archive | None = None
        self._background: ThreadPoolExecutor | None = None
        self._housework: asyncio.Task[None] | None = None
        self._file: AppendFile | None = None
        self._position = Position()  # of what has been written and synced
        self._hash = b""  # of the last line, written or not
        self._lines = 0
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._waiting: list[asyncio.Future[None]] = []  # for the buffer
        self._syncing: list[asyncio.Future[None]] | None = None  # for the batch that a thread is syncing
        self._flush_is_due = False
        self._batch = 0
        self._taken_seq = 0
        self._taken_hash = b""
        self._sync_us = 0.0  # how long a sync takes of late
        self._snapshot_bytes = 0  # of the last snapshot
        self._unsnapped_bytes = 0  # written since
        self._history_bytes = 0

    # --- life ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._files.make_folder()
        self._lock = self._files.lock(LOCK)
        self._background = ThreadPoolExecutor(1, "covenant-journal")
        try:
            await self._in_background(self._load)
            self._begin_segment_if_needed()
            self._start()
        except BaseException:
            self._let_go()
            raise
        self._keep_house()

    async def close(self) -> None:
        """Everything acknowledged is on disk already; what is still on its way is waited for."""
        if self._refusal is None:
            try:
                await self._settled()
            except CovenantError as failed:
                log.warning("the last writes before closing failed: %s", failed)
        self._stop(StoreClosed("the mailbox was closed"))
        if self._housework is not None:
            await asyncio.wait([self._housework])
        self._fail_waiters(StoreClosed("the mailbox was closed"))
        self._let_go()

    def _let_go(self) -> None:
        self._refusal = self._refusal or StoreClosed("the mailbox was closed")
        if self._background is not None:
            self._background.shutdown(wait=True)
            self._background = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._archive is not None:
            self._archive.close()
            self._archive = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    async def _in_background(self, job: object, *values: object) -> object:
        assert self._background is not None
        return await asyncio.get_running_loop().run_in_executor(self._background, job, *values)  # type: ignore[arg-type]

    # --- start --------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Bring the state back: the newest snapshot that fits, then the lines after it."""
        files = self._files
        for name in files.names("", ".making"):
            files.remove(name)
        if self._archive is not None:
            self._archive.close()
            self._archive = None
        self._clear_buffers()
        reader = self._from_snapshot() or self._from_the_beginning()
        begins_late = reader.position.file is None and reader.position.seq > 0
        before = reader.position.offset
        for line in reader:
            self.state.replay(line.events, line.at, line.seq, partial=begins_late)
            self.state.audit.extend(line.audit)
            self.state.quiet()
            if len(self.state.rested) > self.limits.finished_tail_max + 8 * self.limits.archive_batch:
                self._archive_now()
        self.state.quiet()
        self._unsnapped_bytes = max(0, reader.position.offset - before)
        self._take_position(reader)
        history = snapshots.snapshot_names(files, HISTORY)
        self._history_bytes = files.size(history[-1]) if history else 0

    def _from_snapshot(self) -> Reader | None:
        files = self._files
        names = snapshots.snapshot_names(files, PLAIN)
        if not names or not (files.folder / archives.FILE).exists():
            return None
        try:
            archive = Archive(files.folder / archives.FILE)
        except sqlite3.Error as damaged:
            log.warning("the archive does not open and will be rebuilt: %s", damaged)
            return None
        for name in reversed(names):
            try:
                header, records = read_snapshot(files, name)
            except StoreDamaged as damaged:
                log.warning("%s", damaged)
                continue
            if header.archive != archive.id:
                continue
            self._archive = archive
            self.state = self._restored(header, records, archive)
            self._snapshot_bytes = files.size(name)
            return Reader(files, header.position)
        archive.close()
        return None

    def _from_the_beginning(self) -> Reader:
        """Make the archive anew from the segments and, where some were dropped, what was kept of them."""
        files = self._files
        for suffix in ("", "-wal", "-shm"):
            files.remove(archives.FILE + suffix)
        for name in snapshots.snapshot_names(files, PLAIN):
            files.remove(name)  # they lean on the archive that is gone
        archive = Archive(files.folder / archives.FILE)
        archive.set_id(self._ids.lease())
        self._archive = archive
        reader = Reader(files)
        histories = snapshots.snapshot_names(files, HISTORY)
        if not histories:
            if reader.position.seq > 0:
                raise StoreDamaged(
                    "older segments are missing, and no history stands in for them",
                    file=segment_names(files)[0],
                    line=1,
                )
            self.state = State(self.limits.audit_tail_max, archive)
        else:
            header, records = read_snapshot(files, histories[-1])
            resting = [item for item in records if _is_resting(item)]
            archive.store_saved(
                (getattr(item.record, "sent_order", getattr(item.record, "order", 0)), item) for item in resting
            )
            self.state = self._restored(header, [item for item in records if not _is_resting(item)], archive)
            self.state.order = reader.position.seq
        archive.fill_filter()
        archive.use_filled()
        return reader

    def _restored(self, header: snapshots.SnapshotHeader, records: list[Saved], archive: Archive) -> State:
        state = State(self.limits.audit_tail_max, archive)
        records.sort(key=lambda item: getattr(item.record, "order", 0))
        for item in records:
            assert not isinstance(item.record, Tombstone)
            state.restore(item.key, item.record)
        state.gone.update(header.gone)
        state.order = header.seq
        state.at = header.at
        state.audit.extend(header.audit)
        state.quiet()
        return state

    def _take_position(self, reader: Reader) -> None:
        """Go on where the chain ends. What a crash left behind it is cut."""
        here = reader.position
        files = self._files
        if reader.torn_bytes and here.file is not None and here.line > 0:
            log.warning("%s: %d bytes of an unfinished write are cut off", here.file, reader.torn_bytes)
            files.truncate(here.file, here.offset)
        for name in segment_names(files):
            if here.file is None or name > here.file or (name == here.file and here.line == 0):
                log.warning("%s was never begun and is removed", name)
                files.remove(name)
                here.file = None if name == here.file else here.file
        self._position = here
        self._hash = here.hash
        self._batch = here.batch + 1
        if here.file is not None:
            self._file = files.append_to(here.file)

    def _begin_segment_if_needed(self) -> None:
        if self._file is None:
            self._begin_segment()

    def _begin_segment(self) -> None:
        """Start a new file. Nothing may be waiting to be written."""
        here = self._position
        name = segment_name(here.seq + 1)
        header = Header(
            covenant="journal",
            version=FORMAT_VERSION,
            first=here.seq + 1,
            at=self._clock.now_ms(),
            batch=self._batch,
            prev=self._hash.decode(),
            prev_file=here.file,
            prev_bytes=here.offset if here.file else 0,
        )
        data, self._hash = encode(header, self._hash)
        self._files.remove(name)
        file = self._files.create(name)
        try:
            file.write(data)
            file.sync()
            self._files.sync_folder()
        except BaseException:
            file.close()
            raise
        if self._file is not None:
            self._file.close()
        self._file = file
        self._position = Position(name, len(data), 1, self._hash, here.seq, here.at, self._batch)
        self._batch += 1

    # --- writing ------------------------------------------------------------------------------------------

    def _record(self, commit: Commit, at: int) -> None:
        line = Line(self.state.order + 1, at, self._batch, commit.events, commit.audit)
        data, self._hash = encode(line, self._hash)
        self._buffer.append(data)
        self._buffered_bytes += len(data)
        self.stats.commits += 1
        self.stats.events += len(commit.events)
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _durable(self) -> Awaitable[None] | None:
        if self._buffer:
            waiting = self._waiting
        elif self._syncing is not None:
            waiting = self._syncing
        else:
            return None
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(future)
        return future

    def _behind(self) -> bool:
        return self._buffered_bytes > self.limits.unsynced_bytes_max

    def _flush(self) -> None:
        """Write what has gathered and sync it; or leave it, when a thread is still busy with the batch before."""
        self._flush_is_due = False
        if self._syncing is not None or not self._buffer or self._file is None:
            return
        if self._sync_us > self.limits.inline_sync_us_max:
            asyncio.get_running_loop().create_task(self._flush_in_thread())
            return
        data, lines, waiting = self._take_buffer()
        try:
            self._write(data)
        except OSError as failed:
            self._fail(failed, waiting)
        else:
            self._written(len(data), lines, waiting)

    async def _flush_in_thread(self) -> None:
        if self._syncing is not None or not self._buffer:
            return
        data, lines, self._syncing = self._take_buffer()
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._write, data)
        except OSError as failed:
            waiting, self._syncing = self._syncing, None
            self._fail(failed, waiting)
            return
        waiting, self._syncing = self._syncing, None
        self._written(len(data), lines, waiting)
        if self._buffer and not self._flush_is_due:
            self._flush()

    def _take_buffer(self) -> tuple[bytes, int, list[asyncio.Future[None]]]:
        taken = b"".join(self._buffer), len(self._buffer), self._waiting
        self._taken_seq = self.state.order
        self._taken_hash = self._hash
        self._clear_buffers()
        self._batch += 1
        return taken

    def _clear_buffers(self) -> None:
        self._buffer = []
        self._buffered_bytes = 0
        self._waiting = []

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        start = time.perf_counter()
        self._file.write(data)
        self._file.sync()
        self._sync_us += 0.1 * ((time.perf_counter() - start) * 1e6 - self._sync_us)

    def _written(self, size: int, lines: int, waiting: list[asyncio.Future[None]]) -> None:
        here = self._position
        here.offset += size
        here.line += lines
        here.hash = self._taken_hash
        here.seq = self._taken_seq
        here.at = self.state.at
        here.batch = self._batch - 1
        self._unsnapped_bytes += size
        self.stats.syncs += 1
        self.stats.bytes += size
        for future in waiting:
            if not future.done():
                future.set_result(None)
        self._keep_house()

    def _write_out(self) -> None:
        """Write and sync what is waiting, here and now."""
        if self._buffer:
            data, lines, waiting = self._take_buffer()
            try:
                self._write(data)
            except OSError as failed:
                self._fail(failed, waiting)
                raise
            self._written(len(data), lines, waiting)

    # --- failure ------------------------------------------------------------------------------------------

    def _fail(self, failed: OSError, waiting: list[asyncio.Future[None]]) -> None:
        """The disk said no. Tell everybody, forget what was not durable, and come back when it says yes."""
        log.error("the journal cannot write and will reopen: %s", failed)
        why = _refusal_of(failed)
        self._waiting = waiting + self._waiting
        self._stop(why)
        self._fail_waiters(why)
        self._clear_buffers()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._reopen_later()

    def _fail_waiters(self, why: CovenantError) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_exception(type(why)(why.message, **why.details))
        self._waiting = []

    def _reopen_later(self) -> None:
        self._timer = self._clock.call_at(self._clock.now_ms() + self.limits.reopen_delay_ms, self._on_reopen)

    def _on_reopen(self) -> None:
        self._timer = None
        if self._lock is not None and not isinstance(self._refusal, StoreClosed):
            self._housework = asyncio.get_running_loop().create_task(self._reopen(self._housework))

    async def _reopen(self, busy: asyncio.Task[None] | None) -> None:
        if busy is not None:
            await asyncio.wait([busy])
        try:
            await self._in_background(self._load_durable)
            if isinstance(self._refusal, StoreClosed):
                return
            self._begin_segment()
            self.stats.reopened += 1
            log.warning("the journal is open again")
            self._start()
        except OSError as failed:
            log.error("the journal cannot reopen yet: %s", failed)
            if not isinstance(self._refusal, StoreClosed):
                self._refusal = _refusal_of(failed)
                self._reopen_later()
        except CovenantError as damaged:
            log.error("the journal cannot reopen: %s", damaged)
            self._refusal = damaged

    def _load_durable(self) -> None:
        """Reload, from what was synced and nothing else: lines behind it were never acknowledged."""
        here = self._position
        if here.file is not None:
            self._files.truncate(here.file, here.offset)
        self._load()

    # --- housekeeping -------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        """Look whether there is something to tidy. Called after every sync, so it must cost nothing when there is
        not."""
        if self._refusal is not None or self._syncing is not None:
            return
        if self._position.offset >= self.limits.segment_bytes:
            self._change_segment()
        if self._housework is None and (self._wants_archiving() or self._wants_snapshot() or self._wants_filter()):
            self._housework = asyncio.get_running_loop().create_task(self._tidy())
            self._housework.add_done_callback(self._tidied)

    def _tidied(self, task: asyncio.Task[None]) -> None:
        if self._housework is task:
            self._housework = None
        if not task.cancelled() and task.exception() is not None:
            log.error("housekeeping failed; it will be tried again", exc_info=task.exception())

    def _change_segment(self) -> None:
        try:
            self._write_out()
            if self._refusal is None:
                self._begin_segment()
        except OSError as failed:
            if self._refusal is None:
                self._fail(failed, [])

    def _wants_archiving(self) -> bool:
        return len(self.state.rested) >= self.limits.finished_tail_max + self.limits.archive_batch

    def _wants_snapshot(self) -> bool:
        return self._unsnapped_bytes >= max(self.limits.snapshot_every_bytes, self._snapshot_bytes)

    def _wants_filter(self) -> bool:
        return self._archive is not None and self._archive.wants_filter

    async def _tidy(self) -> None:
        state = self.state
        while self._refusal is None and state is self.state:
            if self._wants_archiving():
                await self._archive_some(state)
            elif self._wants_filter():
                await self._fill_filter()
            elif self._wants_snapshot():
                await self._snapshot()
                await self._drop_segments(only_if_it_pays=True)
            else:
                return

    async def _archive_some(self, state: State) -> None:
        archive = self._archive
        assert archive is not None
        batch = self._resting_batch(4 * self.limits.archive_batch)
        gone = list(state.gone)
        if not batch and not gone:
            return
        try:
            await self._in_background(archive.store, batch, gone)
        except sqlite3.Error:
            state.rested.extendleft(key for key, _ in reversed(batch))
            raise
        if state is self.state:
            self._forget(batch, gone)

    def _archive_now(self) -> None:
        """The same while loading, when nobody else is there."""
        assert self._archive is not None
        batch = self._resting_batch(len(self.state.rested))
        gone = list(self.state.gone)
        self._archive.store(batch, gone)
        self._forget(batch, gone)
        if self._archive.wants_filter:
            self._archive.fill_filter()
            self._archive.use_filled()

    def _resting_batch(self, limit: int) -> list[tuple[Key, Record]]:
        """The oldest records at rest, beyond the tail that stays in memory."""
        state = self.state
        rested = state.rested
        durable = self._position.seq if self._file is not None else state.order
        batch: list[tuple[Key, Record]] = []
        while len(batch) < limit and len(rested) > self.limits.finished_tail_max:
            record = state.records.get(rested[0])
            if record is None or isinstance(record, Tombstone) or not at_rest(record):
                rested.popleft()
                continue
            if record.order > durable:
                break
            batch.append((rested.popleft(), record))
        return batch

    def _forget(self, batch: list[tuple[Key, Record]], gone: list[Key]) -> None:
        assert self._archive is not None
        state = self.state
        self._archive.note(key for key, _ in batch)
        for key, record in batch:
            if state.records.get(key) is record:
                state.forget(key)
            elif key in state.records:
                state.rested.append(key)
        state.gone.difference_update(gone)
        self.stats.archived += len(batch)

    async def _fill_filter(self) -> None:
        archive = self._archive
        assert archive is not None
        await self._in_background(archive.fill_filter)
        archive.use_filled()

    async def _snapshot(self, dropped_until: int | None = None) -> None:
        """Save the records in memory as they are at the end of the chain; with `dropped_until`, also what the archive
        alone holds of the segments up to there."""
        archive = self._archive
        assert archive is not None and archive.id is not None
        while self._syncing is not None:
            await self._settled()
        self._write_out()
        state = self.state
        header = header_of(self._position, archive.id, state.gone, state.audit)
        records = list(state.records.items())

        def items() -> Iterator[Saved]:
            held = {key for key, _ in records} if dropped_until is not None else set()
            for key, record in records:
                yield saved(key, record)
            if dropped_until is not None:
                for _, item in archive.beyond_segments(dropped_until):
                    if item.key not in held and item.key not in header.gone:
                        yield item

        prefix = PLAIN if dropped_until is None else HISTORY
        self._unsnapped_bytes = 0 if dropped_until is None else self._unsnapped_bytes
        size = await self._in_background(write_snapshot, self._files, prefix, header, items())
        assert isinstance(size, int)
        if dropped_until is None:
            self._snapshot_bytes = size
        else:
            self._history_bytes = size
        self.stats.snapshots += 1
        for name in snapshots.snapshot_names(self._files, prefix)[:-1]:
            self._files.remove(name)

    def _droppable(self, horizon: int) -> tuple[list[str], int]:
        """Whole segments in which everything happened before the horizon, and the last event of them."""
        names = segment_names(self._files)
        dropped: list[str] = []
        until = 0
        for name, following in pairwise(names):
            header = read_header(self._files, following)
            if header is None or header.at >= horizon or following > (self._position.file or ""):
                break
            dropped.append(name)
            until = header.first - 1
        return dropped, until

    async def _drop_segments(self, only_if_it_pays: bool) -> tuple[int, int]:
        horizon = self._clock.now_ms() - self.limits.retention_ms
        excess = self._excess_horizon()
        if excess > horizon:
            horizon = await self.run(CompactHistory(None, max(0, self._clock.now_ms() - excess)))
        dropped, until = self._droppable(horizon)
        size = sum(self._files.size(name) for name in dropped)
        if not dropped or (only_if_it_pays and size < max(self.limits.segment_bytes, self._history_bytes)):
            return 0, 0
        archive = self._archive
        assert archive is not None
        await self._in_background(archive.bury, horizon, self._clock.now_ms() - self.limits.dedup_ms)
        await self._snapshot(until)
        await self._snapshot()
        for name in dropped:
            self._files.remove(name)
        self._files.sync_folder()
        return len(dropped), size

    def _excess_horizon(self) -> int:
        """When the segments are larger than retention allows: the time at which the part that fits begins."""
        room = self.limits.retention_bytes
        begins = 0
        for name in reversed(segment_names(self._files)):
            room -= self._files.size(name)
            if room < 0:
                return begins
            header = read_header(self._files, name)
            begins = 0 if header is None else header.at
        return 0

    async def compact(self, older_than_ms: int | None) -> Compaction:
        """Everything that housekeeping would do, now."""
        horizon = await self.run(CompactHistory(None, older_than_ms))
        if self._housework is not None:
            await asyncio.wait([self._housework])
        job = asyncio.get_running_loop().create_task(self._compact(horizon))
        return await asyncio.shield(job)

    async def _compact(self, horizon: int) -> Compaction:
        forgotten_before = self._clock.now_ms() - self.limits.dedup_ms
        archive = self._archive
        assert archive is not None
        result = await self._in_background(archive.bury, horizon, forgotten_before)
        assert isinstance(result, tuple)
        tasks, tombstones = self.state.bury(horizon, forgotten_before)
        await self._snapshot()
        segments, size = await self._drop_segments(only_if_it_pays=False)
        return Compaction(tasks + result[0], tombstones + result[1], segments, size)

    # --- the chain ----------------------------------------------------------------------------------------

    async def head(self) -> Head:
        """The end of the chain as it is durable now."""
        await self._settled()
        return Head(self._position.seq, self._position.hash.decode())


def _is_resting(item: Saved) -> bool:
    return isinstance(item.record, Tombstone) or at_rest(item.record)


def _refusal_of(failed: OSError) -> StoreUnavailable:
    if failed.errno in _NO_ROOM:
        return StoreFull("the disk is full; the store reopens by itself when there is room", outcome="unknown")
    return StoreUnavailable(f"the store cannot write: {failed.strerror}; it is reopening", outcome="unknown")
