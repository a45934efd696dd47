"""The engine on PostgreSQL: it loads, calls the rules, saves, and wakes. (DESIGN 4.)

Commands go through a few lanes, questions through a reader; each of them takes all that waits into one transaction. Who
waits for something is woken by a commit of this process at once, by those of others through LISTEN, and by a slow look
in any case.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Final
from zlib import crc32

import asyncpg

from covenant.model.audit import AuditRow, Logged
from covenant.model.command import (
    Call,
    CancelChildren,
    Command,
    CompactHistory,
    DrainResults,
    EndGrants,
    Expire,
    LeaseTasks,
    SettleSlot,
    SignHead,
    SweepRun,
)
from covenant.model.daemon import DaemonState, DaemonView
from covenant.model.error import (
    BadSetting,
    ClockAstray,
    CovenantError,
    StoreClosed,
    StoreUnavailable,
)
from covenant.model.limits import RETENTION_BYTES, Limits
from covenant.model.peer import Caller, Grant
from covenant.model.query import GetTask, ListInputs, Query
from covenant.model.record import Key, TaskRecord
from covenant.model.view import Compaction, Delivery, Inputs, QueueEntry
from covenant.rules.context import Context, Ids, actor
from covenant.rules.lease import kind_in
from covenant.rules.undo import undo
from covenant.store.audit import newest_rows
from covenant.store.clock import Clock, SystemClock
from covenant.store.embedded import SYSTEM, is_under_way
from covenant.store.engine import Notes, Place
from covenant.store.growth import Growth
from covenant.store.postgres.bell import Bell
from covenant.store.postgres.connection import LOST, Where, borrowed, told
from covenant.store.postgres.depth import Depths
from covenant.store.postgres.due import Due
from covenant.store.postgres.entry import Entry, observed
from covenant.store.postgres.housekeeping import Housekeeper
from covenant.store.postgres.lane import Lane, is_exclusive
from covenant.store.postgres.log import CommitLog
from covenant.store.postgres.notes import SharedNotes
from covenant.store.postgres.pulse import LAPSE_S, Pulse, session_of
from covenant.store.postgres.queue import Queue
from covenant.store.postgres.reader import Reader
from covenant.store.postgres.rows import (
    ANSWERS,
    CASCADES,
    DELAYED,
    DUE,
    ENDED,
    FOLLOWERS,
    HELD,
    PARKED,
    PUSHES,
    READY,
    SWEEPS,
    TRUSTED,
    decoded,
)
from covenant.store.postgres.schema import checked, migrate
from covenant.store.postgres.trust import Trust
from covenant.store.postgres.view import Moved, Working
from covenant.store.process import label_of_process
from covenant.store.roll import Roll
from covenant.store.state import Counts, State, Tally
from covenant.store.waiters import ALL, Waiters

POLL_S: Final = 5.0  # the slow look, in case nobody rang
TIDY_S: Final = 60.0
_STEPS_AT_ONCE: Final = 10
_GIVING_BACK_S: Final = 2.0
_ENDING_S: Final = 5.0  # for what is on its way when the store is closed
_REGISTER: Final = """
    insert into daemon (id, pubkey, label, started_ms) values ($1, $2, $3, $4)
    on conflict (id) do update set seen = clock_timestamp() where daemon.ended is null returning id
"""
_OPEN_LANE: Final = f"""
    with mine as ({_REGISTER}) insert into lane (daemon, hash) select id, $5 from mine returning id
"""
_COUNTED: Final = (READY, FOLLOWERS, HELD, ANSWERS, PARKED, DELAYED, ENDED)
_COUNT: Final = "select shelf, name, count(*) from place where shelf = any($1) group by shelf, name"
_SILENT: Final = """
    select r.kind, r.body from place p join record r on r.key = p.key
    where p.shelf = $1 and p.name = '' order by p.ord limit $2
"""
_DAEMONS: Final = """
    select id, coalesce(pubkey, '') as pubkey, label, started_ms,
           (extract(epoch from seen) * 1000)::bigint as seen_ms,
           (extract(epoch from ended) * 1000)::bigint as ended_ms,
           case when proof = 'said' then 'ended'
                when proof = 'silent' or seen < clock_timestamp() - $1::text::interval then 'silent'
                else 'alive' end as state,
           (select count(*) from lane l where l.daemon = d.id) as lanes
    from daemon d where ended is null or ended > clock_timestamp() - interval '7 days'
    order by started_ms desc limit 1000
"""
_ANCHORS_MAX: Final = 64
_WATCHED_MAX: Final = 20_000

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
        self.daemon_id = ids.lease()
        self.pubkey: str | None = None
        self._refreshing: asyncio.Task[int] | None = None
        self.is_closing = True
        self.space = crc32(self.where.schema.encode()) & 0x7FFFFFFF
        self._clock = clock
        self._ids = ids
        self.queue = Queue()
        self.due = Due(self, clock)
        self._lanes: list[Lane] = []
        self._reader = Reader(self)
        self.channel = f"covenant_{self.where.schema}"
        self._bell = Bell(self)
        self._pulse = Pulse(self)
        self.housekeeper = Housekeeper(self)
        self._log = CommitLog(self._reader, self.space)
        self._jobs: list[asyncio.Task[None]] = []
        self._writing: list[asyncio.Task[None]] = []  # those of them that commit
        self._steps: set[asyncio.Task[None]] = set()
        self.depths = Depths(limits.queue_depth_max)
        self._ready_waiters = Waiters(limits.waiters_max)
        self._answer_waiters = Waiters(limits.waiters_max)
        self._change_waiters = Waiters(limits.waiters_max)
        self._waiters = (self._ready_waiters, self._answer_waiters, self._change_waiters)
        self._growth = Growth()
        self._pushed: set[str] = set()  # tasks with webhooks
        self._watched: dict[Key, int] = {}  # tasks that somebody waits for, as the last slow look saw them
        self._on_push: Callable[[str], None] | None = None

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
        try:
            connection = await self._reader.connected()
            if not (await checked(connection, self.where.schema)).is_current:
                async with borrowed(self.where) as patient:  # which may take long
                    await migrate(patient, self.where.schema)
            await self._pulse.check_clock(connection)
            await self.register(connection)
            await self.known.meet(connection)
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
        self._writing = [asyncio.create_task(lane.work()) for lane in self._lanes]
        others = (
            *(self._reader.work(), self._bell.work(), self._pulse.work()),
            *(self._keep_looking(), self._keep_going_on(), self._keep_house()),
        )
        self._jobs = [*self._writing, *(asyncio.create_task(work) for work in others)]
        await self._look()
        await self._go_on()

    async def register(self, connection: asyncpg.Connection[Any]) -> None:
        """Be one of the daemons of this store."""
        await connection.execute(_REGISTER, *self._myself())

    async def open_lane(self, connection: asyncpg.Connection[Any], head: str) -> int:
        """A lane under this daemon's name; under a new one, if the others have taken it for dead."""
        while True:
            name = self.daemon_id
            lane: int | None = await connection.fetchval(_OPEN_LANE, *self._myself(), head)
            if lane is not None:
                return lane
            self.rename(name)

    def rename(self, name: str) -> None:
        """The others took the daemon of this name for dead."""
        if name == self.daemon_id:  # nobody else here has found that out meanwhile
            log.warning("others took this daemon for dead; it goes on under a new name")
            self.daemon_id = self._ids.lease()

    def tell_of_me(self) -> None:
        """The others learn that somebody listens."""
        self._bell.ring((), (), (), True)

    def lead(self) -> None:
        """From now on, for all of them."""
        if self._on_push is not None:
            for task_id in self._pushed:
                self._on_push(task_id)

    def _myself(self) -> tuple[str, str | None, str, int]:
        return self.daemon_id, self.pubkey, label_of_process(), self.now()

    def join(self, pubkey: str, lost: Callable[[str], None]) -> None:
        self.pubkey = pubkey
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
        return StoreClosed("the mailbox was closed")

    async def close(self) -> None:
        if self.is_closing and not self._jobs:
            return
        if self._steps:
            await asyncio.wait(set(self._steps))  # and not for those that others begin meanwhile
        self.is_closing = True
        self.due.close()
        self.queue.end()
        await asyncio.wait(self._writing, timeout=_ENDING_S)  # what was begun gets its true answer
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        self._jobs = []
        for entry in [entry for lane in self._lanes for entry in lane.own]:
            entry.fail(self.closed_error())
        self.queue.fail(self.closed_error())
        for waiters in self._waiters:
            waiters.wake_everyone()
        self._growth.tell()
        await self._say_goodbye()
        await self._let_go()

    async def _let_go(self) -> None:
        self.is_closing = True
        self._bell.close()
        self._pulse.close()
        for lane in self._lanes:
            await lane.close()
        self._lanes = []
        await self._reader.close()

    async def _say_goodbye(self) -> None:
        try:
            connection = await self._reader.connected()
            await connection.execute(
                f"""update daemon set ended = clock_timestamp(), proof = 'said' where id = '{self.daemon_id}';
                update lane set closed = true where daemon = '{self.daemon_id}'"""
            )
        except (*LOST, asyncpg.PostgresError, CovenantError):
            log.warning("the database is away: this daemon could not say that it ends")

    # --- commands -----------------------------------------------------------------------------------------

    def entry(self, command: Command | Call, by: str | None = None) -> Entry:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry = Entry(command, by or actor(command), self._ids, future)
        entry.is_exclusive = is_exclusive(command)
        return entry

    def submit(self, command: Command | Call, by: str | None = None) -> Entry:
        if self.is_closing:
            raise self.closed_error()
        entry = self.entry(command, by)
        self.queue.append(entry)
        return entry

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Something that is done before this store is closed."""
        task = asyncio.ensure_future(work)
        self._steps.add(task)
        task.add_done_callback(self._steps.discard)
        return task

    async def fetch(self, sql: str, *values: Any) -> list[Any]:
        return await self._reader.fetch(sql, *values)

    async def run(self, command: Command | Call) -> Any:
        return await self._replied(self.submit(command))

    async def _replied(self, entry: Entry) -> Any:
        """The reply. Who goes away before has taken nothing: what was taken is given back first, unless that lasts."""
        try:
            return await entry.future
        except asyncio.CancelledError:
            if entry.is_begun:
                entry.settled = asyncio.get_running_loop().create_future()
                if not entry.future.cancelled():
                    self._give_back(entry)
                await asyncio.wait([entry.settled], timeout=_GIVING_BACK_S)
            raise

    async def run_all(self, commands: Sequence[Command | Call]) -> list[Any]:
        entries = [self.submit(command) for command in commands]
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
            entry = await self._take(command, wait_ms is None)
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

    async def _take(self, command: LeaseTasks | DrainResults | Call, waits: bool) -> Entry:
        asked = command.command if type(command) is Call else command
        kinds = None
        if isinstance(asked, LeaseTasks):
            waiters, agent, kinds = self._ready_waiters, asked.recipient, asked.kinds
        else:
            assert isinstance(asked, DrainResults)
            waiters, agent = self._answer_waiters, asked.peer
        name = ALL if agent is None else agent.pubkey
        is_woken, woken_by = False, None
        while True:
            ticket = waiters.enter(name, kinds)  # before the look: what comes after it is not missed
            is_used = False
            try:
                entry = self.submit(command)
                reply = None
                try:
                    reply = await self._replied(entry)
                finally:
                    if is_woken and not _is_for(woken_by, reply):
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
                self._pushed.add(name)
                changed.append(name)
        for name, _ in readied:
            self.depths.count(name, 1)
        for (shelf, name, _), _ in moved.all_left():
            if shelf == READY:
                self.depths.count(name, -1)
        for key in work.touched:
            was, now = work.were.get(key), work.records.get(key)
            if type(now) is TaskRecord and _has_moved(was, now):
                changed.append(key)
            if type(now) in TRUSTED or type(was) in TRUSTED:
                if work.trust is self.trust:
                    self.known.put(key, now)
                is_trust = is_trust or not isinstance(now, Grant) or not isinstance(was, Grant) or now.uses == was.uses
        if work.touched:
            self._wake(readied, answered, changed)
            if self._pulse.companions > 1:
                self._bell.ring([name for name, _ in readied], answered, changed, is_trust)
        if passed := work.passed_by():
            self._tell_of_passed(passed)
        for entry in entries:
            self._answer(entry)

    def _tell_of_passed(self, shelves: Iterable[tuple[bytes, str]]) -> None:
        """Who looked while it was locked has not seen it, and may wait for it."""
        readied = [name for shelf, name in shelves if shelf == READY]
        answered = [name for shelf, name in shelves if shelf == ANSWERS]
        self.rung(readied, answered, (), False)
        if self._pulse.companions > 1:
            self._bell.ring(readied, answered, (), False)

    def _answer(self, entry: Entry) -> None:
        if entry.refusal is not None:
            entry.fail(entry.refusal)
            return
        commit = entry.commit
        assert commit is not None
        then = commit.then
        if type(entry.command) is Expire:  # whoever asked for it asks again by itself
            then = tuple(step for step in then if type(step) is not Expire)
        if then and not entry.is_step:
            self.begin(self._run_steps(entry, then))
        else:
            self._reply(entry)

    def _reply(self, entry: Entry) -> None:
        commit = entry.commit
        assert commit is not None
        if entry.future.cancelled():
            self._give_back(entry)
        elif not entry.future.done():
            if isinstance(commit.reply, CovenantError):
                entry.future.set_exception(commit.reply)
            else:
                entry.future.set_result(commit.reply)

    def _give_back(self, entry: Entry) -> None:
        """Nobody will ever see what was taken."""
        commands = [] if entry.commit is None or self.is_closing else undo(entry.commit, entry.command)
        if not commands:
            entry.settle()
        for command in commands:
            given = self.submit(command).future
            given.add_done_callback(observed)
            given.add_done_callback(lambda _: entry.settle())

    async def _run_steps(self, entry: Entry, then: Iterable[Command]) -> None:
        """Bounded work that a commit left to be done: the first of it before the answer."""
        steps = deque(then)
        count, is_answered = 0, False
        try:
            while steps:
                if count == _STEPS_AT_ONCE:
                    is_answered = True
                    self._reply(entry)
                step = self.submit(steps.popleft(), SYSTEM)
                step.is_step = True
                await step.future
                assert step.commit is not None
                steps.extend(step.commit.then)
                count += 1
        except CovenantError as failed:
            log.warning("a step is left for later: %s", failed)
        finally:
            if not is_answered:
                self._reply(entry)

    # --- what is known --------------------------------------------------------------------------------------

    @property
    def trust(self) -> State:
        return self.known.state

    def _begin_anew(self) -> None:
        """The store is not what it was: nothing that was counted there holds."""
        self.depths.forget()
        self._log.forget()
        self.wake_all()

    # --- questions ------------------------------------------------------------------------------------------

    async def ask(self, query: Query, caller: Caller | None = None) -> Any:
        if self.is_closing:
            raise self.closed_error()
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

        def is_there() -> bool:
            return entry.generation > after or entry.outcome is not None or entry.cancel_requested != asked

        try:
            async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                while not is_there():
                    with self._change_waiters.ticket(entry.task.id) as ticket:
                        entry = await self.ask(query, caller)
                        if not is_there():
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
                while not heard.inputs and heard.cancel_requested == cancel_known:
                    with self._change_waiters.ticket(heard.task_id) as ticket:
                        heard = await self.ask(query, caller)
                        if not heard.inputs and heard.cancel_requested == cancel_known:
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
            with self._change_waiters.ticket(task_id) as ticket:
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
        return self._growth.future()

    # --- waking ---------------------------------------------------------------------------------------------

    def _wake(self, readied: Iterable[tuple[str, str]], answered: Iterable[str], changed: Iterable[Key]) -> None:
        ready, answers, changes = self._waiters
        if ready.count:
            for name, kind in readied:
                ready.wake_one(name, kind)
        if answers.count:
            for name in answered:
                answers.wake_one(name, "")
        if changes.count or self._pushed:
            for key in changed:
                changes.wake_all(key)
                if key in self._pushed:
                    self._tell_push(key)
        self._growth.tell()

    def rung(self, readied: Iterable[str], answered: Iterable[str], changed: Iterable[Key], is_trust: bool) -> None:
        """Another daemon has committed, or has just come."""
        for name in readied:
            self._ready_waiters.wake_some(name)
        for name in answered:
            self._answer_waiters.wake_some(name)
        self._wake((), (), changed)
        if is_trust and not self.is_closing:
            refreshing = asyncio.ensure_future(self.refresh())
            refreshing.add_done_callback(observed)

    # --- signatures -----------------------------------------------------------------------------------------

    async def sign_lanes(self, sign: Callable[[int, str], str]) -> None:
        """Vouch for the end of each chain of this daemon, and say how far the others were."""
        assert self.pubkey is not None
        pubkey = self.pubkey
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
            entry.lane = lane.id
            lane.own.append(entry)
            self.queue.ring_all()
            await entry.future
            lane.signed = lane.seq

    def wake_all(self) -> None:
        """Something may have been missed: everybody looks."""
        for waiters in self._waiters:
            waiters.wake_everyone()
        self._growth.tell()

    def watch_pushes(self, tell: Callable[[str], None]) -> None:
        self._on_push = tell
        for task_id in self._pushed:
            self._tell_push(task_id)

    def _tell_push(self, task_id: str) -> None:
        """One daemon posts for all of them."""
        if self._on_push is not None and self.leads():
            self._on_push(task_id)

    # --- housekeeping ---------------------------------------------------------------------------------------

    async def compact(self, command: CompactHistory | Call) -> Compaction:
        self._pulse.must_be_on_time()
        await self.run(command)
        return Compaction(*await self.housekeeper.tidy())

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._look()
            except CovenantError as failed:
                log.warning("the database could not be looked at: %s", failed)
            except Exception:
                log.exception("the slow look failed")

    async def _keep_going_on(self) -> None:
        """Beside the look, which must not wait for a step that somebody holds up."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._go_on()
            except CovenantError as failed:
                log.warning("what was left half done is left for later: %s", failed)
            except Exception:
                log.exception("what was left half done could not be looked for")

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            try:
                if self.is_on_time:
                    await self.housekeeper.tidy()
            except CovenantError as failed:
                log.warning("what is past its time is left for later: %s", failed)
            except Exception:
                log.exception("what is past its time could not be forgotten")

    @property
    def session(self) -> str:
        """What the sessions of this daemon are called in the database."""
        return session_of(self.daemon_id)

    def leads(self) -> bool:
        return self._pulse.leads and self.is_on_time

    def notes(self) -> Notes | None:
        return SharedNotes(self._reader, "alerts")

    def companions(self) -> int:
        return self._pulse.companions

    async def tally(self, leases_max: int) -> Tally:
        """Counted in the listings: as many as are open, and no more."""
        counted: dict[bytes, int] = {}
        woken = 0
        for shelf, name, count in await self._reader.fetch(
            _COUNT, [READY, FOLLOWERS, HELD, ANSWERS, PARKED, DELAYED, ENDED]
        ):
            counted[shelf] = counted.get(shelf, 0) + count
            woken += count if shelf == PARKED and name == "woken" else 0
        (parts,) = await self._reader.fetch(
            "select count(*) as n from place where shelf = $1 and key like 'part:%'", ANSWERS
        )
        held = await self._reader.fetch(_SILENT, HELD, leases_max)
        ready = counted.get(READY, 0) - woken
        following, delayed = counted.get(FOLLOWERS, 0), counted.get(DELAYED, 0)
        answers = counted.get(ANSWERS, 0)
        counts = Counts(
            queued=ready + following + delayed,
            ready=ready,
            following=following,
            in_flight=counted.get(HELD, 0),
            result_pending=answers - parts["n"] + counted.get(ENDED, 0),
            answers=answers,
            parked=counted.get(PARKED, 0),
            woken=woken,
        )
        return Tally(counts, [decoded(row["kind"], row["body"]) for row in held])

    async def daemons(self) -> list[DaemonView]:
        """Everybody who has this store open, and who had it of late."""
        found = await self._reader.fetch(_DAEMONS, f"{LAPSE_S} seconds")
        return [DaemonView(**{**row, "state": DaemonState(row["state"])}) for row in found]

    async def _look(self) -> None:
        """What should have been noticed and may not have been."""
        names = [name for name in self._ready_waiters.names() if name != ALL]
        waited = [name for name in self._answer_waiters.names() if name != ALL]
        found = await self._reader.fetch(
            """select 'r' as what, n as name from unnest($1::text[]) n
                   where exists (select 1 from place p where p.shelf = 'R' and p.name = n)
               union all select 'a', n from unnest($2::text[]) n
                   where exists (select 1 from place p where p.shelf = 'A' and p.name = n)
               union all (select distinct 'u', name from place where shelf = $3)
               union all (select 'd', ord::text from place where shelf = $4 order by name, ord limit 1)
            """,
            names,
            waited,
            PUSHES,
            DUE,
        )
        told_of: dict[str, list[str]] = {}
        for what, name in found:
            told_of.setdefault(what, []).append(name)
        for name in told_of.get("r", ()):
            self._ready_waiters.wake_some(name)
        for name in told_of.get("a", ()):
            self._answer_waiters.wake_some(name)
        self._growth.tell()
        for waiters in (self._ready_waiters, self._answer_waiters):
            waiters.wake_some(ALL)
        if told_of.get("d") and self.is_on_time:
            self.due.heed(int(told_of["d"][0]))
        await self._look_at_watched()
        pushed = set(told_of.get("u", ()))
        for task_id in pushed - self._pushed:
            self._tell_push(task_id)
        self._pushed = pushed

    async def _go_on(self) -> None:
        """With what a crash has left half done."""
        found = await self._reader.fetch(
            """(select shelf, key from place where shelf = $1 limit 100)
               union all (select shelf, key from place where shelf = $2 limit 100)""",
            CASCADES,
            SWEEPS,
        )
        steps: list[Command] = [
            CancelChildren(None, key) if shelf == CASCADES else SweepRun(None, key.split(":")[1])
            for shelf, key in found
        ]
        steps += [SettleSlot(None, slot) for slot in await self._unsettled()]
        steps += [EndGrants(None, pubkey) for pubkey in self.trust.left_grants()]
        for step in steps:
            try:
                await self.submit(step, SYSTEM).future
            except CovenantError as refused:  # one of them, and no reason to leave the others
                log.warning("a step is left for later: %s", refused)

    async def _look_at_watched(self) -> None:
        """Tasks that have moved on, though nobody rang."""
        watched = self._change_waiters.names()[:_WATCHED_MAX]
        if not watched:
            self._watched = {}
            return
        found = await self._reader.fetch("select key, ord from record where key = any($1)", watched)
        seen = {row["key"]: row["ord"] for row in found}
        for key, order in seen.items():
            if self._watched.get(key) != order:
                self._change_waiters.wake_all(key)
        self._watched = seen

    async def _unsettled(self) -> list[Key]:
        """Slots whose result has not reached all their followers."""
        found = await self._reader.fetch(
            """select distinct p.name from place p join record r on r.key = p.name
               join place s on s.shelf = 'S' and s.name = '' and s.ord = r.ord and s.key = r.key
               where p.shelf = $1 limit 100""",
            FOLLOWERS,
        )
        return [row["name"] for row in found]


def _is_for(woken_by: str | None, taken: Sequence[Any] | None) -> bool:
    """Whether what somebody was woken for is dealt with: it was taken, or nothing was there. This process names what it
    wakes somebody for; a ring of others names nothing, and stands for any number of tasks."""
    if not taken:
        return taken is not None
    if woken_by is None:
        return False
    return any(not isinstance(one, Delivery) or kind_in(one.task) == woken_by for one in taken)


def _has_moved(was: Any, now: TaskRecord) -> bool:
    return type(was) is not TaskRecord or was.generation != now.generation or was.cancel_reason != now.cancel_reason
