"""The journal engine: live state in memory, every commit a line on disk before its answer leaves.

Writes are group-committed. All commits of one turn of the event loop go out with one write and one sync; a fast disk is
waited for on the spot, a slow one from a thread while the next batch fills. On any error of writing or syncing, all who
wait are told that the outcome is unknown, memory is dropped, and the engine reopens from what is durable: an fsync that
failed cannot be retried.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import Struct

from covenant.model.audit import AuditRow, Logged
from covenant.model.command import Call, Command, CompactHistory
from covenant.model.error import CovenantError, StoreClosed, StoreFull, StoreUnavailable
from covenant.model.event import Event
from covenant.model.limits import Limits
from covenant.model.record import Key
from covenant.model.view import Compaction
from covenant.rules.context import Context, Ids
from covenant.store.clock import Clock
from covenant.store.embedded import SYSTEM, Embedded
from covenant.store.journal.archive import Archive
from covenant.store.journal.files import Files, Lock
from covenant.store.journal.housekeeping import Housekeeper, rested_max
from covenant.store.journal.loading import load, remove_archive
from covenant.store.journal.log import Log
from covenant.store.journal.segment import Position
from covenant.store.journal.writer import Batch, Writer
from covenant.store.loop import check_home
from covenant.store.tail import Tail

T = TypeVar("T")

LOCK: Final = "lock"
_THREADS: Final = 2  # one archives, one saves
_LOG_TRIES: Final = 10
_TURNS_MAX: Final = 4  # of the loop, in which a batch gathers
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger("covenant.journal")


class Stats(Struct):
    """What the engine has done since it was opened."""

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


class Synced(asyncio.Future[None]):
    """One batch on its way to the disk. Many wait for it, so none of them can cancel it: who is cancelled while it is
    under way hears of it when the batch is done."""

    def cancel(self, msg: object = None) -> bool:
        return False


class Journal(Embedded):
    def __init__(self, folder: str | Path, limits: Limits, clock: Clock, ids: Ids, files: Files | None = None) -> None:
        super().__init__(limits, clock, ids)
        self._files = files or Files(folder)
        self._stats = Stats()
        self._lock: Lock | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._reader: ThreadPoolExecutor | None = None  # of the log: no snapshot holds it up
        self._syncer: ThreadPoolExecutor | None = None  # nobody else's work holds up a sync
        self._archive: Archive | None = None
        self._writer = Writer(self._files, Position(), self._on_first)
        self._keeper: Housekeeper | None = None
        self._unsynced_max = limits.unsynced_bytes_max
        self._rested_max = rested_max(limits)
        self._next: Synced | None = None  # what is in the buffer
        self._syncing: Synced | None = None  # the batch that a thread is writing
        self._reopening: asyncio.Task[None] | None = None
        self._archive_is_lost = False
        self._tail: Tail | None = None  # there once somebody has followed a task

    @property
    def stats(self) -> Stats:
        if self._keeper is not None:
            self._stats.archived = self._keeper.archived
            self._stats.snapshots = self._keeper.snapshots
        return self._stats

    @property
    def is_up(self) -> bool:
        return self._refusal is None

    # --- life ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._loop = self._home = asyncio.get_running_loop()
        try:
            self._files.make_folder()
            self._lock = self._files.lock(LOCK)
            self._threads = ThreadPoolExecutor(_THREADS, "covenant-journal")
            self._reader = ThreadPoolExecutor(1, "covenant-log")
            self._syncer = ThreadPoolExecutor(1, "covenant-sync")
            await self._load()
            if self._writer.position.file is None:
                self._writer.begin_segment(self._clock.now_ms())
            self._writer.resume()
            self._start()
        except OSError as failed:
            self._let_go()
            kind = StoreFull if failed.errno in _NO_ROOM else StoreUnavailable
            is_file = isinstance(failed, FileExistsError | NotADirectoryError)
            why = "a file is there, and no folder" if is_file else failed.strerror
            raise kind(f"{self._files.folder} does not open: {why}", outcome="not_stored") from failed
        except BaseException:
            self._let_go()
            raise

    async def _load(self) -> None:
        """Memory becomes what the disk says."""
        assert self._threads is not None
        if self._archive is not None:
            self._archive.close()
            self._archive = None
        if self._archive_is_lost:
            remove_archive(self._files)
            self._archive_is_lost = False
        loaded = await self._loop.run_in_executor(self._threads, load, self._files, self.limits, self._ids)
        self._archive = loaded.archive
        self._archive.on_damage = self._on_damage
        self._writer.close()
        self._writer = Writer(self._files, loaded.position, self._on_first)
        self._record = self._writer.add
        self._tail = None
        self.state = loaded.state
        self._keeper = Housekeeper(self, self._files, self._archive, self._writer, self._clock, self._threads)
        self._keeper.snapshot_bytes = loaded.snapshot_bytes
        self._keeper.unsaved_bytes = loaded.tail_bytes

    async def close(self) -> None:
        """Everything acknowledged is on disk already; what is still on its way is waited for."""
        if self._lock is None:
            return
        if self._loop.is_closed():  # nobody waits there any more
            self._refusal = StoreClosed("the mailbox was closed")
            self._let_go()
            return
        check_home(self._loop)
        try:
            await self.write_out()
        except CovenantError as failed:
            log.warning("the last writes before closing failed: %s", failed)
        self._stop(StoreClosed("the mailbox was closed"))
        await self._at_rest()
        if self._reopening is not None:
            await asyncio.wait([self._reopening])
        if self._keeper is not None:
            await self._keeper.finish()
        self._let_go()

    def _let_go(self) -> None:
        for threads in (self._threads, self._reader, self._syncer):
            if threads is not None:
                threads.shutdown(wait=True)
        self._threads = self._reader = self._syncer = None
        self._writer.close()
        if self._archive is not None:
            self._archive.close()
            self._archive = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # --- writing ------------------------------------------------------------------------------------------

    def _on_first(self) -> None:
        """Something waits to be written: with it goes whatever else this turn of the loop brings, and what the next one
        does in answer to it: a receive that was woken shares the sync of what woke it."""
        self._next = Synced(loop=self._loop)
        self._loop.call_soon(self._gather, 0, _TURNS_MAX)

    def _gather(self, known_bytes: int, turns: int) -> None:
        """As long as each turn brings more, a sync now would only have to be followed by another."""
        gathered = self._writer.buffered_bytes
        if gathered > known_bytes and turns:
            self._loop.call_soon(self._gather, gathered, turns - 1)
        else:
            self._flush()

    def _durable(self, order: int | None = None) -> Awaitable[None] | None:
        if order is not None and order <= self._writer.position.seq:
            return None
        return self._next or self._syncing

    def _behind(self) -> bool:
        return self._writer.buffered_bytes > self._unsynced_max or len(self.state.rested) > self._rested_max

    async def _catch_up(self) -> None:
        await super()._catch_up()
        if self._keeper is not None:
            await self._keeper.caught_up()

    def _flush(self) -> None:
        """Write what has gathered; or leave it, while a thread is still busy with the batch before."""
        writer, synced = self._writer, self._next
        if synced is None or self._syncing is not None:
            return
        self._next = None
        batch = writer.take()
        if writer.sync_us > self.limits.inline_sync_us_max:
            self._syncing = synced
            assert self._syncer is not None
            try:
                written = self._syncer.submit(writer.write, batch)
            except RuntimeError as failed:  # there is no thread to be had
                self._flushed(batch, failed)
            else:
                written.add_done_callback(lambda done: self._tell_flushed(batch, done.exception()))
            return
        try:
            writer.write(batch)
        except OSError as failed:
            self._fail(failed, synced)
        except BaseException as failed:
            self._fail(OSError(errno.EIO, f"interrupted by {type(failed).__name__}"), synced)
            raise
        else:
            self._written(batch, synced)

    def _tell_flushed(self, batch: Batch, failed: BaseException | None) -> None:
        """From the thread."""
        with suppress(RuntimeError):  # a loop that is closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._flushed, batch, failed)

    def _flushed(self, batch: Batch, failed: BaseException | None) -> None:
        """The thread is done. That it could not write is no news where the engine has given up meanwhile."""
        synced, self._syncing = self._syncing, None
        assert synced is not None
        if failed is None:
            self._written(batch, synced)
            self._flush()
            return
        error = failed if isinstance(failed, OSError) else OSError(errno.EIO, repr(failed))
        if self._refusal is None:
            self._fail(error, synced)
        else:
            synced.set_exception(_refusal_of(error))
            synced.exception()  # it may be that nobody waits for it

    async def _at_rest(self) -> None:
        """Until no thread writes."""
        if self._syncing is not None:
            await asyncio.wait([self._syncing])

    def _written(self, batch: Batch, synced: Synced) -> None:
        writer = self._writer
        stats = self._stats
        stats.commits += batch.lines
        stats.events += batch.seq - writer.position.seq
        stats.syncs += 1
        stats.bytes += len(batch.data)
        writer.written(batch)
        synced.set_result(None)
        self._tell_durable()
        keeper = self._keeper
        assert keeper is not None
        keeper.unsaved_bytes += len(batch.data)
        if self._refusal is None and writer.position.offset >= self.limits.segment_bytes and writer.is_empty:
            self._change_segment()
        if self._refusal is None:
            keeper.look()

    def _change_segment(self) -> None:
        try:
            self._writer.begin_segment(self._clock.now_ms())
        except OSError as failed:
            self._fail(failed)

    async def settled(self) -> None:
        await self._settled()

    async def write_out(self) -> None:
        """Until nothing is left to write."""
        while (durable := self._durable()) is not None:
            await durable

    # --- failure ------------------------------------------------------------------------------------------

    def _fail(self, failed: OSError, *batches: Synced) -> None:
        """The disk said no. Tell everybody, forget what was not durable, and come back when it says yes."""
        log.error("the journal cannot write and will reopen: %s", failed)
        why = _refusal_of(failed)
        self._stop(why)
        for synced in (*batches, self._next):
            if synced is not None:
                synced.set_exception(self._refused())
                synced.exception()  # it may be that nobody waits for it
        self._next = None
        why.details["outcome"] = "not_stored"  # for whoever calls from now on
        if self._syncing is None:
            self._writer.close()
        self._reopen_later()

    def _on_damage(self, failed: OSError) -> None:
        """The archive does not read, whichever thread found out. It is never the truth: start again without it."""
        self._archive_is_lost = True
        self._loop.call_soon_threadsafe(lambda: self._fail(failed) if self._refusal is None else None)

    def _reopen_later(self) -> None:
        """Reopen after `reopen_delay_ms`, or at once when the clock was set back: nobody knows how long it would be."""
        failed_ms = self._clock.now_ms()
        due_ms = failed_ms + self.limits.reopen_delay_ms

        def look() -> None:
            self._timer = None
            if isinstance(self._refusal, StoreClosed):
                return
            if failed_ms <= self._clock.now_ms() < due_ms:
                self._timer = self._clock.call_at(due_ms, look)
            else:
                self._reopening = self._loop.create_task(self._reopen())

        self._timer = self._clock.call_at(due_ms, look)

    async def _reopen(self) -> None:
        """Load what was synced and nothing else: lines behind it were never acknowledged."""
        try:
            await self._at_rest()
            if self._keeper is not None:
                await self._keeper.finish()
            assert self._lock is not None
            self._lock.check(self._files.folder)
            here = self._writer.position
            if here.file is not None:
                self._files.truncate(here.file, here.offset)
            await self._load()
            self._writer.begin_segment(self._clock.now_ms())
        except (OSError, StoreUnavailable) as failed:
            log.error("the journal cannot reopen yet: %s", failed)
            if not isinstance(self._refusal, StoreClosed):
                if isinstance(failed, OSError):
                    self._refusal = _refusal_of(failed, outcome="not_stored")
                self._reopen_later()
        except CovenantError as damaged:
            log.error("the journal cannot reopen: %s", damaged)
            self._refusal = damaged
        else:
            if not isinstance(self._refusal, StoreClosed):
                self._stats.reopened += 1
                log.warning("the journal is open again")
                self._start()

    # --- the operator's -----------------------------------------------------------------------------------

    async def compact(self, command: CompactHistory | Call) -> Compaction:
        await self.run(command)
        assert self._keeper is not None
        try:
            return await self._keeper.compact()
        except OSError as failed:
            kind = StoreFull if failed.errno in _NO_ROOM else StoreUnavailable
            raise kind(f"the compaction was not finished: {failed.strerror}", outcome="unknown") from failed

    async def run_by_itself(self, command: Command) -> Any:
        reply = self._commit(command, SYSTEM).reply
        await self._settled()
        return reply

    def context_now(self) -> Context:
        return Context(self._clock.now_ms(), self._ids, self.limits, self.state.compaction)

    # --- the log ------------------------------------------------------------------------------------------

    async def log(self, after: int, limit: int) -> list[Logged]:
        return await self._read_log(lambda log: log.after(after, limit))

    async def log_back(self, before: int | None, limit: int) -> list[Logged]:
        return await self._read_log(lambda log: log.before(before, limit))

    def _record_with_tail(
        self,
        seq: int,
        at: int,
        by: str,
        events: Sequence[Event],
        prev: Sequence[int],
        audit: Sequence[AuditRow],
    ) -> None:
        writer = self._writer
        before = writer.buffered_bytes
        writer.add(seq, at, by, events, prev, audit)
        assert self._tail is not None
        self._tail.add(Logged(seq, at, by, events, prev, audit), writer.buffered_bytes - before)

    async def log_trail(self, seq: int, key: Key, limit: int) -> list[Logged]:
        """From memory as far as that reaches; it is kept from the first time on that somebody asks."""
        await self._settled()
        if self._refusal is not None:
            raise self._refused()
        if self._tail is None:
            self._tail = Tail()
            self._record = self._record_with_tail
        near = self._tail.trail(seq, key, limit)
        if near:
            return near
        return await self._read_log(lambda log: log.trail(seq, key, limit))

    async def _read_log(self, read: Callable[[Log], T]) -> T:
        """From the files, as far as they are durable. The segment that was the last one may be gone by the time it is
        read: then others have come."""
        for _ in range(_LOG_TRIES):
            await self._settled()
            if self._refusal is not None:
                raise self._refused()
            here = self._writer.position
            try:
                return await self._loop.run_in_executor(
                    self._reader, _read_log, self._files, here.file, here.offset, read
                )
            except FileNotFoundError:
                continue
        raise StoreUnavailable("the segments go away while they are read", outcome="unknown")

    async def head(self) -> Head:
        """The end of the chain as it is durable now."""
        here = self._writer.position
        return Head(here.seq, here.hash.decode())


def _read_log(files: Files, last: str | None, size: int, read: Callable[[Log], T]) -> T:
    with Log(files, last, size) as log:
        return read(log)


def _refusal_of(failed: OSError, outcome: str = "unknown") -> StoreUnavailable:
    if failed.errno in _NO_ROOM:
        return StoreFull("the disk is full; the store reopens by itself when there is room", outcome=outcome)
    return StoreUnavailable(f"the store cannot write ({failed.strerror}); it is reopening", outcome=outcome)
