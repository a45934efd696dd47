"""The loop that the engines in this process share: decide, apply, wake; durability is what they differ in.

A command is decided and applied in one turn of the event loop, without an await, so commands never interleave. Memory
runs ahead of the disk, and no answer leaves before what it saw is durable.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from asyncio import get_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final, TypeAlias

from covenant.model.agent import AgentId
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
    SweepRun,
)
from covenant.model.daemon import DaemonState, DaemonView
from covenant.model.error import CovenantError, StoreClosed
from covenant.model.event import Event
from covenant.model.limits import Limits
from covenant.model.peer import Caller
from covenant.model.query import GetDialog, GetPlace, GetTask, ListInputs, Query
from covenant.model.record import Key, TaskRecord
from covenant.model.view import Compaction, Inputs, QueueEntry
from covenant.rules.context import Commit, Context, Ids, actor
from covenant.rules.decide import decide
from covenant.rules.lease import kind_in
from covenant.rules.peer import check_caller
from covenant.rules.query import answer
from covenant.rules.undo import undo
from covenant.rules.wait import has_come, has_moved, is_under_way
from covenant.store.audit import newest_rows
from covenant.store.clock import Clock, Timer
from covenant.store.engine import Notes, Place
from covenant.store.growth import Growth
from covenant.store.loop import NOT_OPEN, check_home
from covenant.store.process import label_of_process
from covenant.store.roll import Roll
from covenant.store.state import State, Tally
from covenant.store.waiters import ALL, Waiters

_STEPS_AT_ONCE = 10
SYSTEM = "system"


_ABOUT_ONE_TASK: Final = (GetTask, GetDialog, GetPlace)

Note: TypeAlias = Callable[[int, int, str, Sequence[Event], Sequence[int], Sequence[AuditRow]], None]
"""Takes what a `Logged` is made of."""


class Embedded(Roll):
    """Base of `Memory` and `Journal`."""

    def __init__(self, limits: Limits, clock: Clock, ids: Ids) -> None:
        self.limits = limits
        self.state = State()
        self._clock = clock
        self.context = Context(0, ids, limits)  # whoever opens the store may say more about trust in it
        self._ctx = self.context
        self._refusal: CovenantError | None = StoreClosed(NOT_OPEN)
        self._ready_waiters = Waiters(limits.waiters_max, self._watch)
        self._answer_waiters = Waiters(limits.waiters_max, self._watch)
        self._change_waiters = Waiters(limits.waiters_max, self._watch)
        self._end_waiters = Waiters(limits.waiters_max, self._watch)  # for the end of a task, or a question
        self._waiters = (self._ready_waiters, self._answer_waiters, self._change_waiters, self._end_waiters)
        self._record: Note = lambda *what: None  # notes a commit before it is applied
        self._steps: deque[Command] = deque()
        self._owed: list[Command] = []  # what gives back what nobody has, for when the store is up again
        self._timer: Timer | None = None
        self._timer_ms: int | None = None
        self._ended: list[Key] = []  # tasks whose end, or question, nobody was told of: it is not durable yet
        self._growth = Growth()
        self._on_push: Callable[[str], None] | None = None
        self._pubkey = ""
        self._ids = ids
        self._daemon_id: str | None = None
        self._home: asyncio.AbstractEventLoop | None = None  # the loop that opened it
        self._opened_ms: int | None = None

    is_shared = False

    @property
    def trust(self) -> State:
        return self.state

    def caller_of(self, token: str) -> Caller | None:
        return self.state.caller_of(token)

    def directory_mark(self) -> object:
        return self.state.directory_mark

    def join(self, pubkey: str, lost: Callable[[str], None]) -> None:
        self._pubkey = pubkey

    def keys(self) -> Collection[str]:
        return (self._pubkey,)

    async def refresh(self) -> int:
        return self.state.trust_order

    def leads(self) -> bool:
        return True

    def notes(self) -> Notes | None:
        return None

    def companions(self) -> int:
        return 1

    async def log_end(self) -> int:
        newest = await self.log_back(None, 1)
        return newest[0].last if newest else 0

    async def is_cut(self, after: int, first: int) -> bool:
        return first > after + 1

    async def tally(self, leases_max: int) -> Tally:
        return Tally(self.state.counts(), self.state.leases(0, leases_max))

    async def daemons(self) -> Sequence[DaemonView]:
        """This one alone: nobody else can have it open."""
        now = self._clock.now_ms()
        self._daemon_id = self._daemon_id or self._ids.lease()
        since = now if self._opened_ms is None else self._opened_ms
        return [DaemonView(self._daemon_id, self._pubkey, label_of_process(), since, now, DaemonState.ALIVE, 1)]

    # --- what engines differ in ---------------------------------------------------------------------------

    def _durable(self, order: int | None = None) -> Awaitable[None] | None:
        """What to wait for until everything applied so far, or up to this event, is durable; None when it is."""
        return None

    def _behind(self) -> bool:
        """Whether so much waits for the disk that a new command should wait too."""
        return False

    async def _catch_up(self) -> None:
        """What a new command waits for when the engine is behind."""
        await self._settled()

    # --- life ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._home = get_running_loop()
        self._start()

    async def close(self) -> None:
        if self._home is not None and not self._home.is_closed():  # where it is, nobody waits there any more
            check_home(self._home)
        self._stop(StoreClosed("the mailbox was closed"))

    def _start(self) -> None:
        """Take up work: first what a crash may have left half done."""
        self._opened_ms = self._clock.now_ms() if self._opened_ms is None else self._opened_ms
        self._refusal = None
        self._ctx.recalled.clear()  # what was decided on events that did not last must not be remembered
        self._ctx.ways.clear()
        self._watch()
        self._ctx.compaction = self.state.compaction
        self._steps.clear()
        self._steps.extend(SettleSlot(None, slot) for slot in self.state.unsettled())
        self._steps.extend(CancelChildren(None, task_id) for task_id in self.state.cascades)
        self._steps.extend(SweepRun(None, task_id) for task_id in self.state.sweeps)
        self._steps.extend(EndGrants(None, pubkey) for pubkey in self.state.left_grants())
        if self._on_push is not None:
            self.watch_pushes(self._on_push)
        self._run_steps()
        self._set_timer()
        owed, self._owed = self._owed, []
        for undoing in owed:
            self._pay_back(undoing)

    def _refused(self) -> CovenantError:
        """A fresh copy: an exception that is raised twice drags its first traceback along."""
        why = self._refusal
        assert why is not None
        return type(why)(why.message, **why.details)

    def _stop(self, why: CovenantError) -> None:
        self._refusal = why
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_ms = None
        for waiters in self._waiters:
            waiters.wake_everyone()
        self._ended.clear()
        self._growth.tell()

    # --- commands -----------------------------------------------------------------------------------------

    async def run(self, command: Command | Call) -> Any:
        if self._behind():
            await self._catch_up()
        try:
            commit = self._commit(command)
        except CovenantError:
            await self._settled()
            raise
        durable = self._durable()
        if durable is not None:
            try:
                await durable
            except asyncio.CancelledError:
                self._give_back(commit, command)
                raise
        reply = commit.reply
        if isinstance(reply, CovenantError):
            raise reply
        return reply

    async def run_and_settle(self, command: Call, place: Place) -> Any:
        """One wait for both: the end of a task is told when it is durable, and so is everything before it."""
        if self._behind():
            await self._catch_up()
        try:
            commit = self._commit(command)
        except CovenantError:
            await self._settled()
            raise
        durable, reply = self._durable(), commit.reply
        if not isinstance(reply, CovenantError):
            waiting = place(command.caller)
            if waiting is not None:
                try:
                    with waiting:
                        await self.settle(reply.task_id)
                except CovenantError:
                    pass  # it has been run: it is the wait that cannot be
        if durable is not None:
            await durable
        if isinstance(reply, CovenantError):
            raise reply
        return reply

    async def run_all(self, commands: Sequence[Command | Call]) -> list[Any]:
        replies: list[Any] = []
        for command in commands:
            if self._behind():
                await self._catch_up()
            try:
                replies.append(self._commit(command).reply)  # which may be a refusal, too
            except CovenantError as refusal:
                replies.append(refusal)
        await self._settled()
        return replies

    async def take(
        self,
        command: LeaseTasks | DrainResults | Call,
        wait_ms: int | None = None,
        undoing: list[Command] | None = None,
    ) -> list[Any]:
        """`wait_ms` None waits for ever; when the wait is over, nothing was taken."""
        waiters: Waiters | None = None  # among whom it has waited
        name = ""
        woken_by: str | None = None
        until: float | None = None
        while True:
            try:
                commit = self._commit(command)
            except CovenantError:
                if waiters is not None:
                    waiters.wake_one(name, woken_by)  # who is refused leaves it to the next
                raise
            taken: list[Any] | CovenantError = commit.reply
            if waiters is not None and _leaves(taken, woken_by):
                waiters.wake_one(name, woken_by)
            if taken or wait_ms == 0:
                durable = self._durable()
                if durable is not None:
                    try:
                        await durable
                    except asyncio.CancelledError:
                        self._give_back(commit, command)
                        raise
                if isinstance(taken, CovenantError):
                    raise taken
                if undoing is not None:
                    undoing.extend(undo(commit, command))
                return taken
            wait_s = None
            if wait_ms is not None:
                now = get_running_loop().time()
                until = now + wait_ms / 1000 if until is None else until
                if now >= until:
                    return []
                wait_s = until - now
            waiters, name, kinds = self._place_of(command)
            woken_by = await waiters.wait(name, wait_s, kinds)

    def _place_of(self, command: LeaseTasks | DrainResults | Call) -> tuple[Waiters, str, frozenset[str] | None]:
        """Where it waits: among whom, under which name, for what."""
        asked = command.command if type(command) is Call else command
        if isinstance(asked, LeaseTasks):
            return self._ready_waiters, _name_of(asked.recipient), asked.kinds
        assert isinstance(asked, DrainResults)
        return self._answer_waiters, _name_of(asked.peer), None

    def _give_back(self, commit: Commit, command: Command | Call) -> None:
        """The caller has gone away before it was durable: nobody will ever see what it took. Nobody waits for this
        either, so where it does not last it is done again."""
        for undoing in undo(commit, command):
            if self._refusal is None:
                self._pay_back(undoing)
            else:
                self._owed.append(undoing)

    def _pay_back(self, undoing: Command) -> None:
        self._commit(undoing)
        durable = self._durable()
        if durable is not None:
            lasting = asyncio.ensure_future(durable)
            lasting.add_done_callback(lambda lasted: self._owed.append(undoing) if lasted.exception() else None)

    async def ask(self, query: Query, caller: Caller | None = None) -> Any:
        if self._refusal is not None:
            raise self._refused()
        check_home(self._home)
        self._ctx.now = self._clock.now_ms()
        try:
            if caller is not None:
                check_caller(caller, self.state)
            found = answer(query, self.state, self._ctx)
        except CovenantError:
            await self._settled()
            raise
        durable = self._durable(self._told(query))
        if durable is not None:
            await durable
        return found

    def _told(self, query: Query) -> int | None:
        """Where the answer is about one task and nothing else, the last event of that task: what others do meanwhile
        is not in it, and need not be waited for."""
        if not isinstance(query, _ABOUT_ONE_TASK) or query.by is None:
            return None  # the operator also hears of results that came too late
        record = self.state.get(query.task_id)
        return record.order if type(record) is TaskRecord and record.waits_on is None else None

    async def _settled(self, order: int | None = None) -> None:
        durable = self._durable(order)
        if durable is not None:
            await durable

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
                    await self._wait_change(entry.task.id, entry.generation, asked)
                    entry = await self.ask(query, caller)
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
                    await self._wait_change(heard.task_id, heard.generation, cancel_known)
                    heard = await self.ask(query, caller)
        except TimeoutError:
            heard = await self.ask(query, caller)
        return heard

    async def settle(self, task_id: str) -> None:
        while self._refusal is None and is_under_way(self.state.get(task_id)):
            await self._end_waiters.wait(task_id)

    async def _wait_change(self, task_id: str, generation: int, cancel_requested: bool) -> None:
        record = self.state.get(task_id)
        if (
            isinstance(record, TaskRecord)
            and record.generation == generation
            and (record.cancel_reason is not None) == cancel_requested
        ):
            await self._change_waiters.wait(task_id)

    async def order_of(self, task_id: str) -> int:
        """The last event of a task."""
        record = self.state.get(task_id)
        return record.order if isinstance(record, TaskRecord) else 0

    async def sent_at(self, task_id: str) -> int:
        """The event with which a task was sent."""
        record = self.state.get(task_id)
        return record.sent_order if isinstance(record, TaskRecord) else 0

    async def audit(self, limit: int) -> list[AuditRow]:
        return await newest_rows(self.log_back, limit)

    @abstractmethod
    async def log_back(self, before: int | None, limit: int) -> list[Logged]:
        """Commits before this event, the newest first; only what is durable."""

    def growth(self) -> asyncio.Future[None]:
        return self._growth.future()

    def _tell_durable(self) -> None:
        """More of the log is durable. Who waits for the end of a task is woken by that, and not before: it would only
        have to wait again."""
        if self._ended:
            ended, self._ended = self._ended, []
            for key in ended:
                self._end_waiters.wake_all(key)
        self._growth.tell()

    def watch_pushes(self, tell: Callable[[str], None]) -> None:
        self._on_push = self.state.on_push = tell
        for task_id in self.state.pushed_tasks():
            tell(task_id)

    async def compact(self, command: CompactHistory | Call) -> Compaction:
        await self.run(command)
        return Compaction(*self.state.bury(self._ctx))

    # --- the loop -----------------------------------------------------------------------------------------

    def _commit(self, command: Command | Call, by: str | None = None) -> Commit:
        if self._refusal is not None:
            raise self._refused()
        check_home(self._home)
        ctx = self._ctx
        now = self._clock.now_ms()
        due = self._timer_ms
        if due is not None and due <= now:
            self._expire()  # what should have ended by now has ended before anything else is decided
        ctx.now = now
        commit = decide(command, self.state, ctx)
        if commit.events or commit.audit:
            self._apply(commit, now, by or actor(command))
        if commit.then:
            self._steps.extend(commit.then)
            self._run_steps()
        return commit

    def _apply(self, commit: Commit, now: int, by: str) -> None:
        state = self.state
        events = commit.events
        self._record(state.order + 1, now, by, events, state.orders_before(events), commit.audit)
        if events:
            state.apply(events, now, commit.fresh)
        else:
            state.order += 1
        ctx = self._ctx
        if ctx.compaction is not state.compaction:
            ctx.compaction = state.compaction
        if state.watched:
            self._wake()
        due_times = state.due_times
        if due_times.moved and due_times.next_ms() != self._timer_ms:
            self._set_timer()
        if (self._ended or self._growth.is_awaited) and self._durable() is None:
            self._tell_durable()

    def _watch(self) -> None:
        self.state.watched = True

    def _wake(self) -> None:
        """Wake those concerned: one waiter for each piece of work."""
        state = self.state
        ready, answers, changes, ends = self._waiters
        state.watched = bool(ready.count or answers.count or changes.count or ends.count)
        if state.readied:
            if ready.count:
                for recipient, kind in state.readied:
                    ready.wake_one(recipient, kind)
            state.readied.clear()
        if state.answered:
            if answers.count:
                for peer in state.answered:
                    answers.wake_one(peer)
            state.answered.clear()
        if state.changed:
            if changes.count:
                for key in state.changed:
                    changes.wake_all(key)
            if ends.count:
                self._ended += [key for key in state.changed if not is_under_way(state.records.get(key))]
            state.changed.clear()

    def _run_steps(self) -> None:
        """Bounded work that a commit left to be done; the rest of it in later turns of the loop."""
        for _ in range(_STEPS_AT_ONCE):
            if not self._steps:
                return
            command = self._steps.popleft()
            self._ctx.now = self._clock.now_ms()
            commit = decide(command, self.state, self._ctx)
            if commit.events or commit.audit:
                self._apply(commit, self._ctx.now, SYSTEM)
            self._steps.extend(commit.then)
        if self._steps:
            get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._refusal is None:
            self._run_steps()
            if not self._steps:
                self._ready_waiters.wake_everyone()  # what stood before their work has ended

    # --- time ---------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        due = self.state.due_times.next_ms()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_ms = due
        if due is not None:
            self._timer = self._clock.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._refusal is not None:
            return
        if self._timer_ms is not None and self._timer_ms <= self._clock.now_ms():
            self._expire()
        if self._timer is None:
            self._set_timer()

    def _expire(self) -> None:
        self._steps.append(Expire(None))
        self._run_steps()


def _name_of(agent: AgentId | None) -> str:
    return ALL if agent is None else agent.pubkey


def _leaves(taken: Sequence[Any] | CovenantError, woken_by: str | None) -> bool:
    """Whether what woke the taker is for another one now: it was refused, or has taken something of another kind."""
    if isinstance(taken, CovenantError):
        return True
    return woken_by is not None and bool(taken) and all(kind_in(delivery.task) != woken_by for delivery in taken)
