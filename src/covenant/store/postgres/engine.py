"""The engine on PostgreSQL: it loads, calls the rules, saves, and wakes. (DESIGN 4.)

Commands go through a few lanes, questions through a reader; each of them takes all that waits into one transaction.
Beside them stand, each in its module: what is due, those who wait, the replies and what is given back, this daemon
among the others, and the rounds that look for whatever was missed. Here they are put together to the verbs of a store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final
from zlib import crc32

import asyncpg

from covenant.model.audit import AuditRow, Logged
from covenant.model.command import Call, Command, CompactHistory, DrainResults, LeaseTasks, SignHead
from covenant.model.daemon import DaemonView
from covenant.model.error import BadSetting, ClockAstray, CovenantError, StoreClosed, StoreUnavailable
from covenant.model.limits import RETENTION_BYTES, Limits
from covenant.model.peer import Caller, Grant
from covenant.model.query import GetTask, ListInputs, Query
from covenant.model.record import Key, TaskRecord
from covenant.model.view import Compaction, Inputs, QueueEntry
from covenant.rules.context import Context, Ids, actor
from covenant.rules.lease import kind_in
from covenant.rules.undo import undo
from covenant.rules.wait import has_come, has_moved, is_under_way
from covenant.store.audit import newest_rows
from covenant.store.clock import Clock, SystemClock
from covenant.store.directory import TRUSTED, Directory
from covenant.store.embedded import SYSTEM
from covenant.store.engine import Notes, Place
from covenant.store.loop import NOT_OPEN, check_home
from covenant.store.postgres.ahead import Ahead
from covenant.store.postgres.batch import Batches
from covenant.store.postgres.bell import Bell
from covenant.store.postgres.connection import LOST, Where, borrowed, told
from covenant.store.postgres.depth import Depths
from covenant.store.postgres.due import Due
from covenant.store.postgres.entry import Entry, Group, observed
from covenant.store.postgres.hooks import Hooks
from covenant.store.postgres.housekeeping import Housekeeper
from covenant.store.postgres.lane import Lane, is_exclusive
from covenant.store.postgres.log import CommitLog
from covenant.store.postgres.member import Member, everybody
from covenant.store.postgres.moved import Moved
from covenant.store.postgres.notes import SharedNotes
from covenant.store.postgres.pulse import Pulse
from covenant.store.postgres.queue import Queue
from covenant.store.postgres.reader import Reader
from covenant.store.postgres.recall import Recall
from covenant.store.postgres.replies import Replies
from covenant.store.postgres.rounds import Rounds
from covenant.store.postgres.rows import ANSWERS, DUE, PUSHES, READY, decoded
from covenant.store.postgres.schema import checked, migrate
from covenant.store.postgres.tally import tallied
from covenant.store.postgres.trust import Trust
from covenant.store.postgres.view import Working
from covenant.store.postgres.waking import Waking, is_dealt_with
from covenant.store.roll import Roll
from covenant.store.state import Tally

_ENDING_S: Final = 5.0  # for what is on its way when the store is closed
_ANCHORS_MAX: Final = 64

log = logging.getLogger("covenant.store")


class Postgres(Roll):
    """Implements `Store`."""

    is_shared = True

    def __init__(self, url: str, limits: Limits, clock: Clock, ids: Ids) -> None:
        self.where = Where.of(url)
        self.limits = limits
        self.context = Context(0, ids, limits)
        self.known = Trust(self.context)
        self.known.on_anew = self._begin_anew
        self.member = Member(ids, clock)
        self._refreshing: asyncio.Task[int] | None = None
        self.is_closing = True
        self._home: asyncio.AbstractEventLoop | None = None  # the loop that opened it
        self.space = crc32(self.where.schema.encode()) & 0x7FFFFFFF
        self.channel = f"covenant_{self.where.schema}"
        self._clock = clock
        self._ids = ids
        self.queue = Queue()
        self.replies = Replies(self)
        self.hooks = Hooks(self.leads)
        self.waking = Waking(limits.waiters_max, self.hooks)
        self.depths = Depths(limits.queue_depth_max)
        self.recall = Recall()
        self.ahead = Ahead(self)
        self._lanes: list[Lane] = []
        self._reader = Reader(self)
        self.due = Due(self, clock, self._reader)
        self._bell = Bell(self)
        self._pulse = Pulse(self)
        self.housekeeper = Housekeeper(self)
        self._rounds = Rounds(self, self._reader)
        self._log = CommitLog(self._reader, self.recall.numbers)
        self._jobs: list[asyncio.Task[None]] = []
        self._writing: list[asyncio.Task[None]] = []  # those of them that commit

    def now(self) -> int:
        return self._clock.now_ms()

    @property
    def is_up(self) -> bool:
        """The database has answered of late, and its clock is ours."""
        return not self.is_closing and self._pulse.is_answered and not self._pulse.is_astray

    @property
    def ails(self) -> str:
        """Why it is not up."""
        return ClockAstray.code if self._pulse.is_astray else StoreUnavailable.code

    @property
    def is_wall_clock(self) -> bool:
        """One that a test moves by hand is compared with nothing."""
        return isinstance(self._clock, SystemClock)

    @property
    def is_on_time(self) -> bool:
        return not self._pulse.is_astray

    # --- life ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self.limits.retention_bytes != RETENTION_BYTES:
            why = "retention_bytes is a bound of the journal: on PostgreSQL, retention_ms bounds what is kept"
            raise BadSetting(why, name="retention_bytes")
        self._home = asyncio.get_running_loop()
        try:
            connection = await self._reader.connected()
            if not (await checked(connection, self.where.schema)).is_current:
                async with borrowed(self.where) as patient:  # which may take long
                    await migrate(patient, self.where.schema)
            await self._pulse.check_clock(connection)
            await self.member.register(connection)
            await self.known.meet(connection)
            self.ahead.is_owed = True
            await self.ahead.mend(connection)  # the others are refused from here on, if one is ahead
            self.is_closing = False
            self.queue.open()
            self._lanes = [Lane(self) for _ in range(self.where.lanes)]
            for lane in self._lanes:
                await lane.open()
            await self._pulse.open()
            self.tell_of_me()
            await self._bell.tell()  # before anybody waits here for what the others do
        except (*LOST, asyncpg.PostgresError) as failed:
            await self._let_go()
            raise told(failed, "not_stored") from failed
        except CovenantError:
            await self._let_go()
            raise
        self._writing = [asyncio.create_task(Batches(self, lane).work()) for lane in self._lanes]
        others = (self._reader.work(), self._bell.work(), self._pulse.work(), *self._rounds.all())
        self._jobs = [*self._writing, *(asyncio.create_task(work) for work in others)]
        await self._rounds.look()
        await self._rounds.go_on()

    def tell_of_me(self) -> None:
        """The others learn that somebody listens."""
        self._bell.ring((), (), (), True)

    def join(self, pubkey: str, lost: Callable[[str], None]) -> None:
        self.member.pubkey = pubkey
        self.known.on_lost = lost

    def keys(self) -> Collection[str]:
        return self.known.keys

    async def refresh(self) -> int:
        """Who asks while somebody else does shares the answer."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
        return await asyncio.shield(self._refreshing)

    async def _refresh(self) -> int:
        try:
            (row,) = await self._reader.fetch("select trust from meta")
            if row["trust"] != self.known.learnt:
                await self._reader.use(self.known.learn)
            return self.known.learnt
        finally:
            self._refreshing = None

    def closed_error(self) -> CovenantError:
        return StoreClosed(NOT_OPEN if self._home is None else "the mailbox was closed")

    def _check_open(self) -> None:
        if self.is_closing:
            raise self.closed_error()
        check_home(self._home)

    async def close(self) -> None:
        if self.is_closing and not self._jobs:
            return
        check_home(self._home)
        await self.replies.finish()
        self.is_closing = True
        await self.ahead.close(_ENDING_S)
        self.queue.end()
        await asyncio.wait(self._writing, timeout=_ENDING_S)  # what was begun gets its true answer
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        self._jobs = []
        for entry in [entry for lane in self._lanes for entry in lane.own]:
            entry.fail(self.closed_error())
        self.queue.fail(self.closed_error())
        self.waking.wake_all()
        await self._say_goodbye()
        await self._let_go()

    async def _let_go(self) -> None:
        self.is_closing = True
        self.due.close()
        self._bell.close()
        self._pulse.close()
        self.ahead.let_go()
        await asyncio.gather(*(lane.close() for lane in self._lanes))
        self._lanes = []
        await self._reader.close()

    async def _say_goodbye(self) -> None:
        try:
            async with asyncio.timeout(_ENDING_S):
                await self.member.say_goodbye(await self._reader.connected())
        except (*LOST, asyncpg.PostgresError, CovenantError):
            log.warning("the database is away: this daemon could not say that it ends")

    # --- commands -----------------------------------------------------------------------------------------

    def entry(self, command: Command | Call, by: str | None = None) -> Entry:
        assert self._home is not None
        return Entry(command, by or actor(command), self._ids, self._home)

    def submit(self, command: Command | Call, by: str | None = None) -> Entry:
        self._check_open()
        entry = self.entry(command, by)
        if self.ahead.stretch is None or not self.ahead.take(entry):
            entry.have_patience()
            entry.is_exclusive = is_exclusive(command)
            self.queue.append(entry)
        return entry

    async def run(self, command: Command | Call) -> Any:
        entry = self.submit(command)
        try:
            return await entry.future
        except asyncio.CancelledError:
            await self.replies.gone(entry)
            raise

    async def run_all(self, commands: Sequence[Command | Call]) -> list[Any]:
        entries = [self.submit(command) for command in commands]
        group = Group()
        for entry in entries:
            entry.group = group
        replies = await asyncio.gather(*(entry.future for entry in entries), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, CovenantError):
                raise reply
        return replies

    async def take(
        self,
        command: LeaseTasks | DrainResults | Call,
        wait_ms: int | None = None,
        undoing: list[Command] | None = None,
    ) -> list[Any]:
        if not wait_ms:
            entry = None
            if self._is_expected(command):  # who will hardly have to wait needs no place for it
                entry = self.submit(command)
                if not await self.replies.to(entry) and wait_ms is None:
                    entry = None
            entry = entry or await self._take(command, wait_ms is None)
        else:
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    entry = await self._take(command, True)
            except TimeoutError:
                return []
        assert entry.commit is not None
        if undoing is not None:
            undoing.extend(undo(entry.commit, command))
        taken: list[Any] = entry.commit.reply
        return taken

    def _is_expected(self, command: LeaseTasks | DrainResults | Call) -> bool:
        """Whether there is something to be taken, as far as is remembered."""
        asked = command.command if type(command) is Call else command
        if type(asked) is LeaseTasks:
            shelf, agent = READY, asked.recipient if asked.kinds is None else None
        else:
            assert type(asked) is DrainResults
            shelf, agent = ANSWERS, asked.peer
        if agent is None:
            return False
        stretch = self.ahead.stretch
        if stretch is not None and stretch.work.expects((shelf, agent.pubkey)):
            return True
        return self.recall.expects(shelf, agent.pubkey)

    async def _take(self, command: LeaseTasks | DrainResults | Call, waits: bool) -> Entry:
        asked = command.command if type(command) is Call else command
        assert isinstance(asked, (LeaseTasks, DrainResults))
        waiters, name, kinds = self.waking.place_of(asked)
        is_woken, woken_by = False, None
        while True:
            ticket = waiters.enter(name, kinds)  # before the look: what comes after it is not missed
            is_used = False
            try:
                entry = self.submit(command)
                reply = None
                try:
                    reply = await self.replies.to(entry)
                finally:
                    if is_woken and not is_dealt_with(woken_by, reply):
                        waiters.wake_some(name, woken_by)
                if reply or not waits:
                    return entry
                with waiters.room():
                    woken_by = await ticket
                is_woken = is_used = True
            finally:
                waiters.leave(name, ticket, is_passed_on=not is_used)

    def committed(self, entries: Iterable[Entry], work: Working, moved: Moved) -> None:
        """Durable now: wake who is concerned, then answer."""
        readied, answered, changed = [], [], []
        is_trust = False
        for (shelf, name, order), key in moved.all_taken():
            if shelf == READY:
                record = work.records[key]
                assert type(record) is TaskRecord
                readied.append((name, kind_in(record.task)))
            elif shelf == ANSWERS:
                answered.append(name)
            elif shelf == DUE:
                self.due.heed(order)
            elif shelf == PUSHES:
                self.hooks.add(name)
                changed.append(name)
        for name, _ in readied:
            self.depths.count(name, 1)
        for (shelf, name, _), _ in moved.all_left():
            if shelf == READY:
                self.depths.count(name, -1)
        for key in work.touched:
            was, now = work.were.get(key), work.records.get(key)
            if type(now) is TaskRecord:
                if self.hears_of(was, now):
                    changed.append(key)
            elif type(now) in TRUSTED or type(was) in TRUSTED:
                if work.trust is self.trust:
                    self.known.put(key, now)
                is_trust = is_trust or not isinstance(now, Grant) or not isinstance(was, Grant) or now.uses == was.uses
        if self.is_alone:
            self.recall.learn(work, moved)
        if work.touched:
            self.waking.wake(readied, answered, changed)
            if self._pulse.companions > 1:
                self._bell.ring([name for name, _ in readied], answered, changed, is_trust)
        if passed := work.passed_by():
            self._tell_of_passed(passed)
        for entry in entries:
            self.replies.committed(entry)

    def hears_of(self, was: Any, now: TaskRecord) -> bool:
        """Whether anybody wants to know that a task has moved on, and it has."""
        return (self.waking.hears_of_changes or not self.is_alone) and _has_moved(was, now)

    def _tell_of_passed(self, shelves: Iterable[tuple[bytes, str]]) -> None:
        """Who looked while it was locked has not seen it, and may wait for it."""
        readied = [name for shelf, name in shelves if shelf == READY]
        answered = [name for shelf, name in shelves if shelf == ANSWERS]
        self.waking.rung(readied, answered, ())
        if self._pulse.companions > 1:
            self._bell.ring(readied, answered, (), False)

    @property
    def is_alone(self) -> bool:
        """No other daemon is known to have this store open."""
        return self._pulse.companions == 1

    def may_recall(self) -> bool:
        """Whether it is worth a try to decide on what is remembered: others would have changed it, drawn numbers in
        between, or be waiting for what is due."""
        if not self.is_alone:
            self.recall.forget()
            return False
        return self.is_on_time and not self.queue.hurries and not self.due.has_come(self.now())

    # --- what is known --------------------------------------------------------------------------------------

    @property
    def trust(self) -> Directory:
        return self.known.state

    def _begin_anew(self) -> None:
        """The store is not what it was: nothing that was counted there holds."""
        self.depths.forget()
        self.recall.begin_anew()
        self._log.forget()
        self.waking.wake_all()

    # --- questions ------------------------------------------------------------------------------------------

    async def ask(self, query: Query, caller: Caller | None = None) -> Any:
        self._check_open()
        await self.due.passed()  # the clock came first
        return await self._reader.ask(query, caller)

    async def watch(
        self,
        query: GetTask,
        after: int,
        wait_ms: int | None = None,
        caller: Caller | None = None,
        cancel_known: bool | None = None,
    ) -> QueueEntry:
        entry: QueueEntry = await self.ask(query, caller)
        asked = entry.cancel_requested if cancel_known is None else cancel_known
        try:
            async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                while not has_moved(entry, after, asked):
                    with self.waking.changes.ticket(entry.task.id) as ticket:
                        entry = await self.ask(query, caller)
                        if not has_moved(entry, after, asked):
                            await ticket
        except TimeoutError:
            entry = await self.ask(query, caller)
        return entry

    async def listen(
        self,
        query: ListInputs,
        wait_ms: int | None = None,
        cancel_known: bool = False,
        caller: Caller | None = None,
    ) -> Inputs:
        heard: Inputs = await self.ask(query, caller)
        try:
            async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                while not has_come(heard, cancel_known):
                    with self.waking.changes.ticket(heard.task_id) as ticket:
                        heard = await self.ask(query, caller)
                        if not has_come(heard, cancel_known):
                            await ticket
        except TimeoutError:
            heard = await self.ask(query, caller)
        return heard

    async def run_and_settle(self, command: Call, place: Place) -> Any:
        reply = await self.run(command)
        waiting = place(command.caller)
        if waiting is not None:
            try:
                with waiting:
                    await self.settle(reply.task_id)
            except CovenantError:
                pass  # it has been run: it is the wait that cannot be
        return reply

    async def settle(self, task_id: str) -> None:
        while not self.is_closing:
            with self.waking.changes.ticket(task_id) as ticket:
                if not is_under_way(await self._record(task_id)):
                    return
                await ticket

    async def _record(self, key: Key) -> Any:
        found = await self._reader.fetch("select kind, body from record where key = $1", key)
        return decoded(found[0]["kind"], found[0]["body"]) if found else None

    # --- who and where --------------------------------------------------------------------------------------

    async def order_of(self, task_id: str) -> int:
        record = await self._record(task_id)
        return record.order if isinstance(record, TaskRecord) else 0

    async def sent_at(self, task_id: str) -> int:
        record = await self._record(task_id)
        return record.sent_order if isinstance(record, TaskRecord) else 0

    # --- the log --------------------------------------------------------------------------------------------

    async def audit(self, limit: int) -> list[AuditRow]:
        self._check_open()
        return await newest_rows(self.log_back, limit)

    async def log_back(self, before: int | None, limit: int) -> list[Logged]:
        return await self._log.back(before, limit)

    async def log(self, after: int, limit: int) -> list[Logged]:
        return await self._log.after(after, limit)

    async def log_end(self) -> int:
        return await self._log.end()

    async def is_cut(self, after: int, first: int) -> bool:
        return await self._log.is_pruned(after)

    async def log_trail(self, seq: int, key: Key, limit: int) -> list[Logged]:
        return await self._log.trail(seq, key, limit)

    def growth(self) -> asyncio.Future[None]:
        return self.waking.growth.future()

    # --- waking ---------------------------------------------------------------------------------------------

    def rung(self, readied: Sequence[str], answered: Sequence[str], changed: Sequence[Key], is_trust: bool) -> None:
        """Another daemon has committed, or has just come."""
        self.waking.rung(readied, answered, changed)
        if is_trust and not self.is_closing:
            refreshing = asyncio.ensure_future(self.refresh())
            refreshing.add_done_callback(observed)

    def watch_pushes(self, tell: Callable[[str], None]) -> None:
        self.hooks.watch(tell)

    # --- signatures -----------------------------------------------------------------------------------------

    async def sign_lanes(self, sign: Callable[[int, str], str]) -> None:
        """Vouch for the end of each chain of this daemon, and say how far the others were."""
        pubkey = self.member.pubkey
        assert pubkey is not None
        self.housekeeper.sign = lambda seq, mark: (sign(seq, mark), pubkey)
        unsigned = [lane for lane in self._lanes if lane.seq > lane.signed]
        if not unsigned:
            return
        others = await self._reader.fetch(
            "select id, seq, hash from lane where seq > 0 and not closed and id <> all($1) order by id limit $2",
            [lane.id for lane in self._lanes],
            _ANCHORS_MAX,
        )
        anchors = tuple(f"{row['id']}:{row['seq']}:{row['hash']}" for row in others)
        for lane in unsigned:
            seq, mark = lane.seq, lane.hash.decode()
            entry = self.entry(SignHead(None, seq, mark, sign(seq, mark), pubkey, anchors), SYSTEM)
            entry.have_patience()
            entry.lane = lane.id
            lane.own.append(entry)
            self.queue.ring_all()
            await entry.future
            lane.signed = lane.seq

    # --- housekeeping ---------------------------------------------------------------------------------------

    async def compact(self, command: CompactHistory | Call) -> Compaction:
        self._pulse.must_be_on_time()
        await self.run(command)
        return Compaction(*await self.housekeeper.tidy())

    def leads(self) -> bool:
        return self._pulse.leads and self.is_on_time

    def notes(self) -> Notes | None:
        return SharedNotes(self._reader, "alerts")

    def companions(self) -> int:
        return self._pulse.companions

    async def tally(self, leases_max: int) -> Tally:
        return await tallied(self._reader, leases_max)

    async def daemons(self) -> list[DaemonView]:
        return await everybody(self._reader)


def _has_moved(was: Any, now: TaskRecord) -> bool:
    return type(was) is not TaskRecord or was.generation != now.generation or was.cancel_reason != now.cancel_reason
