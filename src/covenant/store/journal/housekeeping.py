"""What keeps the journal small while it works: records at rest move to the archive, snapshots keep starts short, and
segments past retention go.

All of it runs beside the event loop, and none of it is needed for correctness: a crash in any of it leaves files that
the next start reads or removes. Archiving and saving are two jobs that do not wait for each other: under a steady load
there is always something to archive, and snapshots are due all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from covenant.model.command import Command, CompactHistory
from covenant.model.limits import Limits
from covenant.model.record import TaskRecord
from covenant.model.view import Compaction
from covenant.rules.context import Context
from covenant.store.clock import Clock
from covenant.store.journal.archive import BREATH, Archive
from covenant.store.journal.files import Files
from covenant.store.journal.line import Header
from covenant.store.journal.loading import forget, resting_batch
from covenant.store.journal.segment import read_header, segment_names
from covenant.store.journal.snapshot import HISTORY, PLAIN, Saved, header_of, saved, snapshot_names, write_snapshot
from covenant.store.journal.writer import Writer
from covenant.store.state import State

T = TypeVar("T")

log = logging.getLogger("covenant.journal")

_FORGET_AT_ONCE = 32
_BATCH_MAX = 8192


class House(Protocol):
    """What the housekeeper sees of the engine."""

    limits: Limits
    state: State

    @property
    def is_up(self) -> bool: ...
    def context_now(self) -> Context:
        """What the rules are given now; a copy."""

    async def run_by_itself(self, command: Command) -> Any:
        """Run what nobody asked for: the log says so."""

    async def settled(self) -> None:
        """Until everything that is in memory now is durable. What comes meanwhile is not waited for."""


class Housekeeper:
    """Of one opening of one folder: when the engine reopens, it gets another."""

    def __init__(
        self, house: House, files: Files, archive: Archive, writer: Writer, clock: Clock, threads: ThreadPoolExecutor
    ) -> None:
        self.archived = 0
        self.snapshots = 0
        self.unsaved_bytes = 0  # written since the last snapshot
        self.snapshot_bytes = 0  # of the last snapshot
        self._house = house
        self._state = house.state
        self._limits = house.limits
        self._files = files
        self._archive = archive
        self._writer = writer
        self._clock = clock
        self._threads = threads
        self._rested_max = rested_max(house.limits)
        self._archive_turn = asyncio.Lock()  # one at a time writes to the archive
        self._progress = asyncio.Event()
        self._failed_ms: int | None = None
        self._headers: dict[str, Header] = {}  # of segments
        self._archiving: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Start what is due. Called after every sync, so it costs next to nothing when nothing is."""
        if self._archiving is None and self._wants_archiving() and self._is_time():
            self._archiving = self._start(self._archive_what_is_due())
        if self._saving is None and self._wants_snapshot() and self._is_time():
            self._saving = self._start(self._save_what_is_due())

    def _start(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(job)
        task.add_done_callback(self._done)
        return task

    def _done(self, job: asyncio.Task[None]) -> None:
        if job is self._archiving:
            self._archiving = None
            self._tell_progress()
        else:
            self._saving = None
        if not job.cancelled() and job.exception() is not None:
            self._failed_ms = self._clock.now_ms()
            log.error("housekeeping failed and will be tried again: %s", job.exception())

    def _is_time(self) -> bool:
        """Not right after it failed; a clock that was set back since does not tell when that was."""
        return self._failed_ms is None or not 0 <= self._clock.now_ms() - self._failed_ms < self._limits.reopen_delay_ms

    async def finish(self) -> None:
        """Until no job is running."""
        while jobs := [job for job in (self._archiving, self._saving) if job is not None]:
            await asyncio.wait(jobs)

    @property
    def is_behind(self) -> bool:
        """Whether more waits for the archive than memory should hold."""
        return len(self._state.rested) > self._rested_max

    async def caught_up(self) -> None:
        """Until the archive has taken in some of what waits for it, or cannot."""
        while self._archiving is not None and self.is_behind:
            await self._progress.wait()

    def _tell_progress(self) -> None:
        """Let those who wait now look again."""
        self._progress.set()
        self._progress.clear()

    def _wants_archiving(self) -> bool:
        rested = len(self._state.rested) - self._limits.finished_tail_max
        return rested >= self._limits.archive_batch or self._archive.wants_filter

    def _goes_on(self) -> bool:
        return self._house.is_up and self._house.state is self._state

    def _wants_snapshot(self) -> bool:
        return self.unsaved_bytes >= max(self._limits.snapshot_every_bytes, self.snapshot_bytes)

    async def _aside(self, job: Callable[..., T], *values: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, job, *values)

    async def _archive_what_is_due(self) -> None:
        while self._goes_on() and self._wants_archiving():
            async with self._archive_turn:
                if self._archive.wants_filter:
                    await self._aside(self._archive.fill_filter)
                    self._archive.use_filled()
                elif not await self._move_to_archive(self._limits.finished_tail_max):
                    return

    async def _save_what_is_due(self) -> None:
        while self._goes_on() and self._wants_snapshot():
            await self._save(PLAIN)
            await self._drop_segments(only_if_it_pays=True)

    async def _move_to_archive(self, tail: int) -> bool:
        """Move the oldest records at rest, all but this many. False when there was none."""
        state = self._state
        backlog = len(state.rested) - tail
        limit = min(max(self._limits.archive_batch, backlog // 2), _BATCH_MAX)
        batch = resting_batch(state, limit, tail, self._writer.position.seq)
        if not batch:
            return False
        state.going, state.gone = state.gone, set()
        try:
            breath = max(BREATH, backlog // 32)  # the further behind, the less patient
            await self._aside(self._archive.store, batch, list(state.going), breath)
        except OSError:
            state.rested.extendleft(key for key, _ in reversed(batch))
            state.gone |= state.going
            raise
        finally:
            state.going = set()
        at_once = max(_FORGET_AT_ONCE, backlog // 8)
        for start in range(0, len(batch), at_once):
            forget(state, self._archive, batch[start : start + at_once])
            await asyncio.sleep(0)  # let others have their turn
        self.archived += len(batch)
        self._tell_progress()
        return True

    async def _save(self, prefix: str, dropped_until: int = 0) -> int:
        """Write a snapshot of the records in memory; a history one with what the archive alone holds of the segments
        up to `dropped_until`."""
        archive = self._archive
        archive_id = archive.id
        assert archive_id is not None
        header = header_of(self._writer.end, archive_id, dropped_until, self._state.gone | self._state.going)
        records = list(self._state.records.items())
        if prefix == PLAIN:
            self.unsaved_bytes = 0

        def items() -> Iterator[Saved]:
            for key, record in records:
                yield saved(key, record)
            if prefix == HISTORY:
                hidden = {key for key, _ in records}.union(header.gone)
                yield from (item for item in archive.beyond_segments(dropped_until) if item.key not in hidden)

        await self._house.settled()
        await self._aside(archive.settle, header.seq)
        size = await self._aside(write_snapshot, self._files, prefix, header, items())
        if prefix == PLAIN:
            self.snapshot_bytes = size
        self.snapshots += 1
        for name in snapshot_names(self._files, prefix)[:-1]:
            self._files.remove(name)
        return size

    # --- letting segments go ------------------------------------------------------------------------------

    async def compact(self) -> Compaction:
        """Everything that housekeeping would do in time, now."""
        await self.finish()
        job = asyncio.get_running_loop().create_task(self._compact())
        self._saving = self._start(_quietly(job))
        return await asyncio.shield(job)

    async def _compact(self) -> Compaction:
        await self._house.settled()
        async with self._archive_turn:
            while await self._move_to_archive(tail=0):
                pass
            tasks, tombstones = await self._bury()
        await self._save(PLAIN)
        segments, size = await self._drop_segments(only_if_it_pays=False)
        return Compaction(tasks, tombstones, segments, size)

    async def _bury(self) -> tuple[int, int]:
        in_memory = {key for key, record in self._state.records.items() if type(record) is TaskRecord}
        buried = await self._aside(self._archive.bury, self._house.context_now(), in_memory)
        self._state.forget_orphans()
        return buried

    async def _drop_segments(self, only_if_it_pays: bool) -> tuple[int, int]:
        """Let whole segments past retention go, after writing down what only they told."""
        now = self._clock.now_ms()
        horizon = now - self._limits.retention_ms
        excess = self._excess_until()
        if excess > horizon:
            horizon = excess
            await self._house.run_by_itself(CompactHistory(None, max(0, now - excess)))
        names, until = self._droppable(horizon)
        size = sum(self._files.size(name) for name in names)
        histories = snapshot_names(self._files, HISTORY)
        pays = size >= max(self._limits.segment_bytes, self._files.size(histories[-1]) if histories else 0)
        if not names or (only_if_it_pays and not pays):
            return 0, 0
        async with self._archive_turn:
            await self._bury()
            await self._save(HISTORY, until)
        await self._save(PLAIN)
        for name in names:
            self._files.remove(name)
            self._headers.pop(name, None)
        self._files.sync_folder()
        return len(names), size

    def _droppable(self, horizon: int) -> tuple[list[str], int]:
        """The segments in which everything happened before the horizon, and their last event."""
        names: list[str] = []
        until = 0
        for name, following in pairwise(segment_names(self._files)):
            header = self._header(following)
            if header is None or header.at >= horizon:
                break
            names.append(name)
            until = header.first - 1
        return names, until

    def _excess_until(self) -> int:
        """When the segments take more room than retention allows: the time at which the part that fits begins."""
        room = self._limits.retention_bytes
        begins = 0
        for name in reversed(segment_names(self._files)):
            room -= self._files.size(name)
            if room < 0:
                return begins
            header = self._header(name)
            begins = 0 if header is None else header.at
        return 0

    def _header(self, name: str) -> Header | None:
        """It never changes: each is read once, however often and however long a past is gone over."""
        header = self._headers.get(name) or read_header(self._files, name)
        if header is not None:
            self._headers[name] = header
        return header


def rested_max(limits: Limits) -> int:
    """How much of what is at rest memory holds before senders wait for the archive."""
    return limits.finished_tail_max + limits.unarchived_max


async def _quietly(job: asyncio.Task[Any]) -> None:
    """Wait for a job whose outcome belongs to somebody else."""
    await asyncio.wait([job])
