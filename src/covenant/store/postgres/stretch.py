"""One stretch of being ahead of the tables: decided on memory, appended to the log, answered, and put there later.

What is decided is seen at once by what is decided next, and told to nobody before it is in the log. Appends go out one
after the other, each with all that has gathered during the one before. If one of them is refused, nothing that came
after it has happened: those commands are decided again, on what the tables show once they are whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from covenant.model.command import Call, Command
from covenant.model.error import CovenantError
from covenant.model.event import Answered, Drained, Event, Leased, PushSet, Sent
from covenant.model.record import Key, TaskRecord
from covenant.rules.context import Commit, Need
from covenant.rules.decide import decide
from covenant.rules.lease import kind_in
from covenant.store.journal.line import Line, encode
from covenant.store.postgres.batch import Batches, unknown
from covenant.store.postgres.chain import Chain
from covenant.store.postgres.connection import LANE_CLOSED, LOST, told
from covenant.store.postgres.entry import Entry
from covenant.store.postgres.hint import hint, is_plainest
from covenant.store.postgres.numbers import BLOCK, BLOCKS_AHEAD
from covenant.store.postgres.pace import Pace
from covenant.store.postgres.recall import RECORD_BYTES_MAX, RECORDS_MAX, STANDING_MAX
from covenant.store.postgres.rows import ANSWERS
from covenant.store.postgres.trust import TRUST_EVENTS
from covenant.store.postgres.view import Working
from covenant.store.postgres.want import First, Fresh

if TYPE_CHECKING:
    from covenant.store.postgres.ahead import Ahead
    from covenant.store.postgres.engine import Postgres
    from covenant.store.postgres.lane import Lane

OWED: Final = 512  # records that the tables lack: then they are brought up to date
OWED_SHARE: Final = 4  # or this many times as many as were under way last time: each of those is put there twice
OWED_MAX: Final = 4096  # and then this waits until they are
OWED_BYTES_MAX: Final = 16 << 20  # of lines
LOOK_S: Final = 0.01  # between two looks at whether this is the time for it: a few commands more are no matter
IDLE_S: Final = 0.2  # without a command: then the tables are made whole
PAUSE_S: Final = 0.05  # for an append, while the tables are brought up to date
NUMBERS_LEFT_MIN: Final = BLOCKS_AHEAD * BLOCK // 2  # then more are drawn
GATHERING_TURNS: Final = 4  # of the loop, in which an append gathers
_NOT_AHEAD: Final = TRUST_EVENTS | {PushSet}  # who posts to webhooks looks for them in the tables
_OF_A_TASK: Final = frozenset((Sent, Leased, Answered, Drained))

log = logging.getLogger("covenant.store")


class Gathered:
    """What goes out with the next append, and whom it concerns."""

    __slots__ = ("answered", "chain", "entries", "fresh", "readied")

    def __init__(self, mark: bytes) -> None:
        self.chain = Chain(mark)
        self.entries: list[Entry] = []
        self.fresh: list[Key] = []  # taken for such
        self.readied: list[tuple[str, str]] = []
        self.answered: list[str] = []


class Stretch:
    def __init__(self, engine: Postgres, ahead: Ahead, lane: Lane, work: Working, block: int) -> None:
        self._engine = engine
        self._ahead = ahead
        self._lane = lane
        self._block = block  # the last that was drawn
        self._settled = lane.seq
        self._decided = lane.seq  # the last that is to be appended
        self._owed_bytes = 0
        self._putting: Collection[Key] = ()  # on their way into the tables
        self._large: set[Key] = set()  # not worth its room once it is in the tables
        self._gathered = Gathered(lane.hash)
        self._going = Gathered(lane.hash)  # with the append that is under way
        self._is_ending = False
        self.is_spoilt = False  # by a fault of ours: the tables are to be made whole from the log
        self.takes = 0
        self.looked = len(work.were)  # records
        self._loop = asyncio.get_running_loop()
        self._bell: asyncio.Future[None] | None = None
        self._progress: asyncio.Future[None] = self._loop.create_future()
        self._settling: asyncio.Task[None] | None = None
        self.work = work
        self._now, self._due, self._depths = engine.now, engine.due, engine.depths
        self._numbers_end = block + BLOCK
        self._pace = Pace()
        self._worked_s, self._takes_then = thread_time(), 0
        self._looks_at_s = 0.0
        work.heed()
        self._writing = asyncio.ensure_future(self._write())
        self._writing.add_done_callback(self._has_written)
        self._idling = self._loop.call_later(IDLE_S, self._look_idle, 0)

    # --- deciding -----------------------------------------------------------------------------------------

    def take(self, entry: Entry) -> bool:
        """Decide it. False where it wants more than is remembered, and where the tables should come first."""
        work, command = self.work, entry.command
        now = self._now()
        due_ms = self._due.next_ms
        if entry.is_alone or self._writing.done() or (due_ms is not None and due_ms <= now):
            return False
        if len(work.touched) >= OWED_MAX or self._owed_bytes >= OWED_BYTES_MAX:
            return False
        fresh = None
        if not is_plainest(command):
            wanted = hint(command)
            if wanted is None:
                return False
            if wanted and type(wanted[0]) is Fresh and wanted[0].key not in work.records:
                fresh = wanted[0].key
                if fresh in self._putting:
                    return False
                work.absent.add(fresh)  # if it is not so, the append will say it
        try:
            commit = self._commit_of(entry, now)
            events = commit.events
            is_simple = fresh is None and len(events) == 1 and _is_simple(events[0], commit, work)
            if not is_simple:
                work.require(events)
        except Need as need:
            shelves = (want for want in need.wanted if type(want) is First and want.is_plain)
            work.strange.update({(want.shelf, want.name): None for want in shelves})
            return False
        except CovenantError:
            return False
        if commit.then or work.order + len(events) + 1 >= self._numbers_end:
            return False
        if not is_simple and not self._may_go_ahead(commit, command, fresh):
            return False
        if events or commit.audit:
            self._go_on(entry, commit, is_simple, now)
            if fresh is not None:
                self._gathered.fresh.append(fresh)
        entry.commit = commit
        entry.is_begun = True
        self._gathered.entries.append(entry)
        self.takes += 1
        if self._bell is not None:
            self._ring()
        return True

    def _ring(self) -> None:
        """Something is to be appended, or this is over."""
        bell, self._bell = self._bell, None
        if bell is not None and not bell.done():
            bell.set_result(None)

    def _commit_of(self, entry: Entry, now: int) -> Commit:
        """Decided again, it may be given other ids: nobody has been told of these."""
        command, work, ctx = entry.command, self.work, self._engine.context
        if type(command) is Call:  # what it draws besides is drawn once
            return self._lane.decide(entry, work, now)
        ctx.ids, ctx.now, ctx.compaction = entry.source, now, work.trust.compaction
        return decide(command, work, ctx)

    def _may_go_ahead(self, commit: Commit, command: Command | Call, fresh: Key | None) -> bool:
        events = commit.events
        if not events and commit.reply == []:
            wanted = hint(command)
            if wanted and self.work.expects((wanted[0].shelf, wanted[0].name)):
                return False  # what stands there is due, and the clock comes first
        return _NOT_AHEAD.isdisjoint(map(type, events)) and (fresh is None or bool(events))

    def _go_on(self, entry: Entry, commit: Commit, is_simple: bool, now: int) -> None:
        """It will be the next in the log, and is so in memory."""
        work, chain, events = self.work, self._gathered.chain, commit.events
        if not is_simple:
            line = Line(work.order + 1, now, 0, events, entry.by, work.orders_before(events), commit.audit)
            raw, mark = encode(line, chain.mark)  # before memory follows it
            work.follow(line)
            self._note(line, len(raw))
            chain.add(line, raw, mark)  # once nothing can go wrong: it is appended, whoever is answered
            return
        old: Any = work.records.get(events[0].key)
        before = 0 if old is None else old.order
        line = Line(work.order + 1, now, 0, events, entry.by, (before,) if before else (), commit.audit)
        raw, mark = encode(line, chain.mark)
        work.follow_task(events[0], old, now)
        self._note(line, len(raw))
        chain.add_of_task(line, raw, mark, before)

    def _note(self, line: Line, size: int) -> None:
        """Whom it will concern once it is in the log."""
        work, gathered = self.work, self._gathered
        self._decided = work.order
        self._owed_bytes += size
        if size >= RECORD_BYTES_MAX:
            self._large.update(event.key for event in line.events)
        if work.due_ms is not None:
            self._due.heed(work.due_ms)
        waking = self._engine.waking
        for shelf, was, now, key in work.moves:
            if shelf == ANSWERS:
                if now is not None and waking.answers.count:  # who comes later will look, and find it
                    gathered.answered.append(now)
                continue
            if was is not None:
                self._depths.count(was, -1)
            if now is not None:
                self._depths.count(now, 1)
                if waking.ready.count:
                    record = work.records[key]
                    assert type(record) is TaskRecord
                    gathered.readied.append((now, kind_in(record.task)))
        work.moves.clear()

    # --- appending ----------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            if not self._gathered.entries:
                if self._is_ending:
                    return
                self._bell = self._loop.create_future()
                await self._bell
                continue
            known = 0
            for _ in range(GATHERING_TURNS):  # as long as each turn brings more, and not all have come that may
                if not known < len(self._gathered.entries) < self._pace.share:
                    break
                known = len(self._gathered.entries)
                await asyncio.sleep(0)
            if self._numbers_end - self.work.order < NUMBERS_LEFT_MIN:
                await self._draw_further()
            await self._append()
            if monotonic() >= self._looks_at_s:
                self._looks_at_s = monotonic() + LOOK_S
                if not self._engine.may_recall():
                    self._ahead.end()

    async def _draw_further(self) -> None:
        """Numbers for what comes: those that are left run out soon."""
        block, drawn = self._block, await self._lane.draw_ahead(BLOCKS_AHEAD)
        if drawn != [block + BLOCK * number for number in range(1, BLOCKS_AHEAD + 1)]:
            raise ConnectionError("somebody else has drawn numbers")
        self._block, self._numbers_end = drawn[-1], drawn[-1] + BLOCK

    async def _append(self) -> None:
        gathered = self._going = self._gathered
        self._gathered = Gathered(gathered.chain.mark)
        begun_s = monotonic()
        if gathered.chain.lines:
            await self._lane.append(gathered.chain, self._block, gathered.fresh)
        elif not await self._lane.is_ahead():  # whoever is told that there is nothing is told what is so
            raise ConnectionError("what is remembered may not be so")
        self._going = Gathered(gathered.chain.mark)
        try:
            self._keep_pace(monotonic() - begun_s, len(gathered.entries))
            self._tell(gathered)
        finally:  # it is in the log: a fault of ours must not leave anybody waiting for ever
            self._answer(gathered.entries)
        self._go_forward()
        may_settle = self._settling is None and not self._is_ending and not self.is_spoilt
        enough = min(max(OWED, OWED_SHARE * len(self.work.were)), OWED_MAX // 2)
        if may_settle and len(self.work.touched) >= enough:
            self._settling = asyncio.ensure_future(self._settle())
            self._settling.add_done_callback(self._has_settled)

    def _keep_pace(self, append_s: float, answered: int) -> None:
        worked_s, takes = thread_time(), self.takes
        crowd = answered + len(self._gathered.entries)
        self._pace.appended(append_s, worked_s - self._worked_s, takes - self._takes_then, crowd)
        self._worked_s, self._takes_then = worked_s, takes

    def _tell(self, appended: Gathered) -> None:
        """Wake whom it concerns."""
        waking, lines = self._engine.waking, appended.chain.lines
        changed = {event.key: None for line in lines for event in line.events} if waking.hears_of_changes else {}
        waking.wake(appended.readied, appended.answered, [*changed])

    def _go_forward(self) -> None:
        """Whoever waits for an append looks again."""
        progress, self._progress = self._progress, self._loop.create_future()
        if not progress.done():
            progress.set_result(None)

    def _has_written(self, done: asyncio.Task[None]) -> None:
        self._go_forward()
        if done.cancelled() or done.exception() is not None:
            self._ahead.end()  # nobody waits until the next one comes

    def _answer(self, entries: list[Entry]) -> None:
        """All at once; or in halves, if that is better and they are not: what the first ask for next goes out while the
        others are answered. What has gathered meanwhile goes out before."""
        is_one_crowd = self._pace.is_halved and 2 * len(self._gathered.entries) < len(entries)
        half = len(entries) // 2 if is_one_crowd else len(entries)
        if self._gathered.entries:
            self._loop.call_soon(self._answer_all, entries[:half])
        else:
            self._answer_all(entries[:half])
        if half < len(entries):
            self._loop.call_soon(self._answer_all, entries[half:])

    def _answer_all(self, entries: list[Entry]) -> None:
        for entry in entries:
            future, commit = entry.future, entry.commit
            if commit is None or future.done() or isinstance(commit.reply, CovenantError):
                self._engine.replies.committed(entry)  # who is refused, or has gone away
            else:
                future.set_result(commit.reply)

    # --- the tables ---------------------------------------------------------------------------------------

    async def _settle(self, is_last: bool = False) -> None:
        """What they lack now is put there, once it is in the log."""
        if self.is_spoilt:  # since this was called for
            return
        owed, upto = self.work, self._decided
        self.work = owed.go_on(self._large, STANDING_MAX, RECORDS_MAX)
        self._owed_bytes = 0
        self._large = set()
        self._putting = owed.touched
        while self._lane.seq < upto:
            if self._writing.done():
                raise ConnectionError("what was decided has not been appended")
            await self._progress
        pause = None if is_last else self._let_one_append
        await self._ahead.settle(self._lane.id, self._settled, upto, owed, pause)
        self._settled = upto
        self._putting = ()

    async def _let_one_append(self, owed: int) -> bool:
        """If one is under way, between portions of what is owed: so the server has no more to do at one time than at
        another. Unless as much is owed again, or this ends. Not for long, as locks are held meanwhile: the append may
        wait for somebody who waits for those. Whether another one is worth a pause."""
        if self._going.entries and len(self.work.touched) < owed and not self._is_ending and not self._writing.done():
            done, _ = await asyncio.wait([self._progress], timeout=PAUSE_S)
            return bool(done)
        return True

    def _has_settled(self, done: asyncio.Task[None]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._ahead.end()  # which looks at it again
        elif done is self._settling:
            self._settling = None

    def _look_idle(self, takes: int) -> None:
        if self.takes == takes:
            self._ahead.end()
        else:
            self._idling = self._loop.call_later(IDLE_S, self._look_idle, self.takes)

    # --- the end ------------------------------------------------------------------------------------------

    async def finish(self) -> bool:
        """Until all that was decided is answered, and the tables are whole. Whether they are."""
        self._is_ending = True
        self._idling.cancel()
        self._ring()
        try:
            if not await self._is_put_there():
                return False
        except BaseException:  # the store is closed, and the database takes too long
            self._writing.cancel()
            for entry in self._going.entries:
                entry.fail(unknown())
            for entry in self._gathered.entries:
                entry.fail(self._engine.closed_error())
            raise
        recall, work = self._engine.recall, self.work
        recall.take_over(work)
        recall.notice(work.strange)
        recall.numbers.drawn(self._block)
        recall.numbers.go_on(self._block, work.order, self._block + BLOCK)
        return True

    async def _is_put_there(self) -> bool:
        try:
            await self._writing
            if self._settling is not None:
                await self._settling
            if self.is_spoilt:
                raise RuntimeError("memory may not be what the log tells")
            await self._settle(is_last=True)
        except Exception as failed:
            await self._break_off(failed)
            return False
        return True

    async def _break_off(self, failed: Exception) -> None:
        """What was not appended is decided again. Of the append under way it is found out whether it was."""
        engine, lane = self._engine, self._lane
        await asyncio.wait([self._writing])
        if self._settling is not None:  # what it would put there is read from the log
            self._ahead.let_go()
            await asyncio.wait([self._settling])
        if not isinstance(failed, (*LOST, asyncpg.PostgresError)):
            log.error("what was decided ahead of the tables could not be appended", exc_info=failed)
        going = self._going.entries
        for entry in (*going, *self._gathered.entries):
            entry.have_patience()
        if lane.is_in_doubt:
            going = going[await self._recovered(failed) :]
        elif isinstance(failed, asyncpg.PostgresError) and failed.sqlstate == LANE_CLOSED:
            await lane.end_chain()
        left = [*going, *self._gathered.entries]
        for entry in left:
            entry.commit = None
        engine.recall.forget()
        engine.depths.forget()
        engine.waking.wake_all()
        engine.queue.put_back([entry for entry in left if not entry.is_over])

    async def _recovered(self, failed: Exception) -> int:
        """How many of those under way were committed all the same. Where a fault of ours keeps us from finding it out,
        they are told so, and the chain ends."""
        lane, going = self._lane, self._going
        try:
            recovered = await Batches(self._engine, lane).recover(going.entries, failed)
        except Exception as fault:
            log.exception("what became of an append could not be found out")
            await lane.end_chain()
            for entry in going.entries:
                entry.fail(told(fault, "unknown"))
            return 0
        if recovered:
            self._tell(going)
        return recovered


def _is_simple(event: Event, commit: Commit, work: Working) -> bool:
    """Whether the only event of a commit makes another of a task that is here, or a task where nothing can be."""
    kind = type(event)
    if kind not in _OF_A_TASK:
        return False
    old = work.records.get(event.key)
    return type(old) is TaskRecord if kind is not Sent else old is None and event.key == commit.fresh
