"""The loop that the engines in this process share: decide, apply, wake; durability is what they differ in.

A command is decided and applied in one turn of the event loop, without an await, so commands never interleave. Memory
runs ahead of the disk, and no answer leaves before what it saw is durable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from covenant.model.audit import AuditRow
from covenant.model.command import CancelChildren, Command, CompactHistory, DrainResults, Expire, LeaseTasks, SettleSlot
from covenant.model.error import CovenantError, StoreClosed
from covenant.model.limits import Limits
from covenant.model.record import TaskRecord
from covenant.model.view import Compaction
from covenant.rules.context import Commit, Context, Ids, View
from covenant.rules.decide import decide
from covenant.rules.undo import undo
from covenant.store.clock import Clock, Timer
from covenant.store.state import State
from covenant.store.waiters import ALL, Waiters

T = TypeVar("T")

_STEPS_AT_ONCE = 10


class Embedded:
    """Base of `Memory` and `Journal`."""

    def __init__(self, limits: Limits, clock: Clock, ids: Ids) -> None:
        self.limits = limits
        self.state = State(limits.audit_tail_max)
        self._clock = clock
        self._ctx = Context(0, ids, limits)
        self._refusal: CovenantError | None = StoreClosed("the mailbox is not open")
        self._ready_waiters = Waiters(limits.waiters_max, self._watch)
        self._answer_waiters = Waiters(limits.waiters_max, self._watch)
        self._change_waiters = Waiters(limits.waiters_max, self._watch)
        self._record: Callable[[Commit, int], None] = lambda commit, at: None  # notes a commit before it is applied
        self._steps: deque[Command] = deque()
        self._timer: Timer | None = None
        self._timer_ms: int | None = None

    # --- what engines differ in ---------------------------------------------------------------------------

    def _durable(self) -> Awaitable[None] | None:
        """What to wait for until everything applied so far is durable; None when it is."""
        return None

    def _behind(self) -> bool:
        """Whether so much waits for the disk that a new command should wait too."""
        return False

    async def _catch_up(self) -> None:
        """What a new command waits for when the engine is behind."""
        await self._settled()

    # --- life ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._start()

    async def close(self) -> None:
        self._stop(StoreClosed("the mailbox was closed"))

    def _start(self) -> None:
        """Take up work: first what a crash may have left half done."""
        self._refusal = None
        self._watch()
        self._ctx.compaction = self.state.compaction
        self._steps.clear()
        self._steps.extend(SettleSlot(None, slot) for slot in self.state.unsettled())
        self._steps.extend(CancelChildren(None, task_id) for task_id in self.state.cascades)
        self._run_steps()
        self._set_timer()

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
        for waiters in (self._ready_waiters, self._answer_waiters, self._change_waiters):
            waiters.wake_everyone()

    # --- commands -----------------------------------------------------------------------------------------

    async def run(self, command: Command) -> Any:
        if self._behind():
            await self._catch_up()
        try:
            commit = self._commit(command)
        except CovenantError:
            await self._settled()
            raise
        return await self._hand_over(commit)

    async def run_all(self, commands: list[Command]) -> list[Any]:
        replies: list[Any] = []
        for command in commands:
            if self._behind():
                await self._catch_up()
            try:
                replies.append(self._commit(command).reply)
            except CovenantError as refusal:
                replies.append(refusal)
        await self._settled()
        return replies

    async def take(self, command: LeaseTasks | DrainResults) -> list[Any]:
        if isinstance(command, LeaseTasks):
            waiters, agent = self._ready_waiters, command.recipient
        else:
            waiters, agent = self._answer_waiters, command.peer
        name = ALL if agent is None else agent.pubkey
        while True:
            commit = self._commit(command)
            if commit.reply:
                return await self._hand_over(commit)  # type: ignore[no-any-return]
            await waiters.wait(name)

    async def _hand_over(self, commit: Commit) -> Any:
        """The reply, once it is durable. If the caller goes away before, nobody will ever see what it took: that is
        given back."""
        durable = self._durable()
        if durable is not None:
            try:
                await durable
            except asyncio.CancelledError:
                if self._refusal is None:
                    for command in undo(commit):
                        self._commit(command)
                raise
        reply = commit.reply
        if isinstance(reply, CovenantError):
            raise reply
        return reply

    async def read(self, query: Callable[[View, Context], T]) -> T:
        if self._refusal is not None:
            raise self._refused()
        self._ctx.now = self._clock.now_ms()
        try:
            answer = query(self.state, self._ctx)
        except CovenantError:
            await self._settled()
            raise
        await self._settled()
        return answer

    async def _settled(self) -> None:
        durable = self._durable()
        if durable is not None:
            await durable

    async def wait_change(self, task_id: str, generation: int, cancel_requested: bool) -> None:
        record = self.state.get(task_id)
        if (
            isinstance(record, TaskRecord)
            and record.generation == generation
            and (record.cancel_reason is not None) == cancel_requested
        ):
            await self._change_waiters.wait(task_id)

    async def audit(self, limit: int) -> list[AuditRow]:
        return await self.read(lambda _view, _ctx: list(self.state.audit)[max(0, len(self.state.audit) - limit) :])

    async def compact(self, older_than_ms: int | None) -> Compaction:
        await self.run(CompactHistory(None, older_than_ms))
        return Compaction(*self.state.bury(self._ctx))

    # --- the loop -----------------------------------------------------------------------------------------

    def _commit(self, command: Command) -> Commit:
        if self._refusal is not None:
            raise self._refused()
        ctx = self._ctx
        now = self._clock.now_ms()
        due = self._timer_ms
        if due is not None and due <= now:
            self._expire()  # what should have ended by now has ended before anything else is decided
        ctx.now = now
        commit = decide(command, self.state, ctx)
        if commit.events or commit.audit:
            self._apply(commit, now)
        if commit.then:
            self._steps.extend(commit.then)
            self._run_steps()
        return commit

    def _apply(self, commit: Commit, now: int) -> None:
        state = self.state
        self._record(commit, now)
        if commit.events:
            state.apply(commit.events, now)
        else:
            state.order += 1
        if commit.audit:
            state.audit.extend(commit.audit)
        self._ctx.compaction = state.compaction
        if state.watched:
            self._wake()
        if state.due_times.moved and state.due_times.next_ms() != self._timer_ms:
            self._set_timer()

    def _watch(self) -> None:
        self.state.watched = True

    def _wake(self) -> None:
        """Wake those concerned: one waiter for each piece of work."""
        state = self.state
        state.watched = bool(self._ready_waiters.count or self._answer_waiters.count or self._change_waiters.count)
        if state.readied:
            if self._ready_waiters.count:
                for recipient in state.readied:
                    self._ready_waiters.wake_one(recipient)
            state.readied.clear()
        if state.answered:
            if self._answer_waiters.count:
                for peer in state.answered:
                    self._answer_waiters.wake_one(peer)
            state.answered.clear()
        if state.changed:
            if self._change_waiters.count:
                for key in state.changed:
                    self._change_waiters.wake_all(key)
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
                self._apply(commit, self._ctx.now)
            self._steps.extend(commit.then)
        if self._steps:
            asyncio.get_running_loop().call_soon(self._go_on)

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
