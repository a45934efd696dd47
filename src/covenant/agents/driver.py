"""One run in the hands of one worker: its function is called, and what it does is committed from wait to wait.

While the function waits for others the run is parked: no lease, no thread, only the function itself, which may be put
away at any time. When the run is taken up again it goes on where it stands, if it is still here; if not, it is called
from its first line, and finds everything that it did. (Contract 20, 22-24.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import structs

from covenant.agents import values
from covenant.agents.checkpoints import Checkpoints
from covenant.agents.context import AgentContext
from covenant.agents.definition import Agent, called_with
from covenant.agents.entries import Entries
from covenant.agents.error import CancelRequested, Suspended
from covenant.agents.hold import LOST, Hold
from covenant.agents.host import Host
from covenant.agents.inbox import Inbox
from covenant.agents.lookout import Lookout
from covenant.agents.memory import Batch
from covenant.agents.notes import Notes
from covenant.agents.own_tasks import OwnTasks
from covenant.agents.tasks import Tasks
from covenant.agents.times import Times
from covenant.agents.waits import Waits
from covenant.model.agent import AgentId
from covenant.model.error import (
    CovenantError,
    NotPermitted,
    UnknownPeer,
)
from covenant.model.run import (
    RunCommit,
    SignalSeen,
    Standing,
    Wait,
)
from covenant.model.task import Result, Task

T = TypeVar("T")

# Of these every other task for the same recipient would hear, too.
_OF_RECIPIENT: Final = (NotPermitted, UnknownPeer)

log = logging.getLogger("covenant.agents")


class Left(Enum):
    """How a driver lets go of a lease."""

    PARKED = "parked"
    ENDED = "ended"
    LOST = "lost"
    STALE = "stale"  # the run went on elsewhere, or a task of it that was done here: what is here is of the past


class _Reduced(Exception):
    """A commit was refused for some of its tasks: without them it is to be tried again."""


class Driver:
    def __init__(self, definition: Agent, task: Task, host: Host) -> None:
        self.definition = definition
        self.task = task
        self.run_id = task.id
        self.agent: AgentId = task.recipient
        self.hold = Hold(task.id, host)
        self.notes = Notes(host.box)
        self.times = Times(host.clock, self.notes)
        self.inbox = Inbox()
        self.waits = Waits(self.hold, self.notes, self.inbox)
        self.lookout = Lookout(self.hold, self.notes, self.times, self.inbox, self.waits, self.drop)
        self.entries = Entries(self.hold, self.notes, self.times, self.lookout)
        self.tasks = Tasks(self.agent, self.hold, self.notes, self.times, self.waits, host.tasks)
        self.own = OwnTasks(host, self.hold, self.notes, self.tasks)
        self.checkpoints = Checkpoints(self.hold, self.notes, self.waits, self.entries, self.tasks)
        self._host = host
        self._box = host.box
        self._effects = 0  # under way
        self._function: asyncio.Task[Any] | None = None

    # --- under a lease ------------------------------------------------------------------------------------

    async def take(self, lease_id: str) -> Left:
        """Go on until the run waits for others, or ends, or is somebody else's."""
        self.hold.lease_id = lease_id
        self.hold.is_held = True
        try:
            if self._function is None:
                await self._load()
                self._function = asyncio.create_task(self._call())
                self._function.add_done_callback(self._hear_end)
            elif not await self._is_fresh():
                self.drop()
                return Left.STALE
            return await self._go_on()
        except LOST as lost:
            self.drop()
            if lost.details.get("task_id", self.run_id) != self.run_id:
                log.info("run %s is called anew: its task %s", self.run_id, lost)
                return Left.STALE
            log.info("run %s is no longer held here: %s", self.run_id, lost.code)
            return Left.LOST
        except BaseException:
            self.drop()
            raise
        finally:
            self.hold.is_held = False

    def drop(self) -> None:
        """Put the function away: it is not to do anything any more."""
        self.hold.is_dropped = True
        self.own.drop()
        if self._function is not None and not self._function.done():
            self._function.cancel()
        self.waits.drop()

    async def _load(self) -> None:
        after = 0
        while True:
            loaded = await self.hold.ask(partial(self._box.load_run, self.hold.lease_id, after))
            self.notes.memory.learn(loaded)
            if loaded.next is None:
                break
            after = loaded.next
        self.times.learn(loaded.now_ms)
        self.hold.learn(loaded)
        self.checkpoints.learn(loaded)
        self.entries.learn(loaded, self.task.message)

    async def _is_fresh(self) -> bool:
        """Whether the run stands where this function left it."""
        union = self.waits.union(self.notes.memory.outcomes) or Wait(until_ms=0)
        looked = structs.replace(union, tasks=union.tasks - self.notes.batch.tasks.keys())
        if not looked.tasks and not looked.signals and looked.until_ms is None:
            looked = Wait(until_ms=0)
        standing = await self.hold.ask(lambda: self._box.look_around(self.hold.lease_id, looked))
        if standing.number != self.hold.number:
            return False
        self.lookout.absorb(standing)
        return True

    async def _call(self) -> Any:
        arguments = called_with(self.definition, values.input_of(self.task))
        return await self.definition.function(AgentContext(self), *arguments)

    async def _go_on(self) -> Left:
        while True:
            assert self._function is not None
            await self.waits.until_still(self._function)
            if self._function.done():
                return await self._end(self._function)
            if not self.own.are_told:
                await self.own.told()
                continue
            wait = self._prepare()
            if wait is None and self.notes.batch.is_empty and not self.waits.is_commit_due:
                self.hold.news.clear()
                await self.hold.news.wait()
                continue
            waits = self.waits.all
            try:
                standing = await self._commit(wait)
            except _Reduced:
                continue
            if standing.parked:
                went_on = not self.notes.batch.is_empty or any(waiting not in waits for waiting in self.waits.all)
                if went_on or self._function.done():
                    self.hold.wake()  # while it was being parked
                return Left.PARKED
            is_asked = wait is not None and standing.cancel_requested
            if is_asked and not self.waits.is_told and not self.waits.is_any_there:
                self.waits.tell_cancel()

    def _hear_end(self, function: asyncio.Task[Any]) -> None:
        """A function that ends while the run is parked has waited for something of its own."""
        self.hold.news.set()
        if not self.hold.is_held and not self.hold.is_dropped:
            self.hold.wake()

    def _prepare(self) -> Wait | None:
        """What the next commit waits for. What this worker can do itself is begun instead of waited for."""
        awaited = self.waits.awaited
        wanted = {i for wait in awaited for i in wait.tasks if i not in self.notes.memory.outcomes}
        mine = {i for i in wanted if self.own.can_do(i)}
        only_mine = wanted == mine and all(not wait.signals and wait.until_ms is None for wait in awaited)
        if only_mine:
            begun, room = self.notes.batch.begins, self._box.limits.batch_max - len(self.notes.batch.begins)
            begun += [i for i in sorted(mine) if not self.own.is_doing(i) and i not in begun][:room]
        is_busy = not self.own.are_done or self._effects or self.lookout.under_way
        if only_mine or is_busy or self.waits.flushing or self.notes.cancels_due:
            return None
        return self.waits.union(self.notes.memory.outcomes)

    # --- committing ---------------------------------------------------------------------------------------

    async def _commit(self, wait: Wait | None, result: Result | None = None) -> Standing:
        self.own.stop_lingering()
        await self.own.told()
        batch = self.notes.hand_over()
        flushed = self.waits.flushing
        self.waits.is_commit_due = False
        commit = batch.commit(self.hold.number + 1, self.entries.leaf, wait, result, self.waits.is_told)
        try:
            standing = await self._commit_once(commit)
        except LOST:
            raise
        except CovenantError as refusal:
            self._leave_out(refusal, batch, wait)
            raise _Reduced(f"{refusal.code}: {refusal.message}") from refusal
        self.hold.number = standing.number
        self.inbox.forget_taken(batch.takes, is_looking=self.lookout.under_way > 0)
        self.notes.batch.cancels += self.notes.cancels_due
        self.notes.cancels_due = []
        for waiting in flushed:
            waiting.go_on()
        self.lookout.absorb(standing)
        for child_id in batch.begins:
            lease_id = standing.leases.get(child_id)
            if lease_id is None:
                self.own.leave(child_id)
            else:
                self.own.begin(child_id, lease_id, standing.attempts.get(child_id, 1), batch.tasks.get(child_id))
        return standing

    def _leave_out(self, refusal: CovenantError, batch: Batch, wait: Wait | None) -> None:
        """Raise it unless it is about tasks alone: those have failed then, and all else is still to be committed."""
        child_id = refusal.details.get("task_id")
        if child_id not in batch.tasks and (wait is None or child_id not in wait.tasks):
            raise refusal
        refused = [child_id]
        if isinstance(refusal, _OF_RECIPIENT) and child_id in batch.tasks:
            to = batch.tasks[child_id].recipient.pubkey
            refused = [i for i, task in batch.tasks.items() if task.recipient.pubkey == to]
        self.notes.take_back(batch)
        for child in refused:
            log.warning("run %s: task %s is not taken: %s (%s)", self.run_id, child, refusal, refusal.code)
            self.tasks.refuse(child, refusal)
        self.notes.cancels_due = [child for child in self.notes.cancels_due if child not in refused]

    async def _commit_once(self, commit: RunCommit) -> Standing:
        self.hold.probe("before a commit")
        standing = await self.hold.ask(lambda: self._box.commit_run(self.hold.lease_id, commit))
        self.hold.probe("after a commit")
        return standing

    async def _end(self, function: asyncio.Task[Any]) -> Left:
        if self.hold.is_dropped:
            return Left.LOST
        failed = None if function.cancelled() else function.exception()
        if function.cancelled() or isinstance(failed, Suspended):
            result = self._error("the agent was canceled from inside")
        elif failed is not None:
            if not isinstance(failed, Exception):
                raise failed
            if self.hold.cancel_requested and isinstance(failed, CancelRequested):
                return await self._end_canceled()
            log.info("run %s failed", self.run_id, exc_info=failed)
            result = self._error(str(failed) or type(failed).__name__, failed)
        else:
            result = self._ok(function.result())
        await self.own.finish()
        try:
            await self._commit_last(result)
        except LOST:
            raise
        except CovenantError as refused:
            self.notes.batch = Batch()
            self.entries.give_up()
            await self._commit(None, self._error(f"{refused.code}: {refused.message}"))
        return Left.ENDED

    async def _commit_last(self, result: Result) -> None:
        """Nobody can hear any more that a task was refused: the run itself ends with that."""
        while True:
            try:
                if self.notes.cancels_due:
                    await self._commit(None)
                await self._commit(None, result)
                return
            except _Reduced as reduced:
                result = result if result.status == "error" else self._error(str(reduced))

    async def _end_canceled(self) -> Left:
        """It has cleaned up: what it noted while doing so is kept, and the task ends as it was asked to."""
        while self.notes.cancels_due or not self.notes.batch.is_empty:
            with suppress(_Reduced):
                await self._commit(None)
        await self.hold.ask(lambda: self._box.release(self.hold.lease_id, reason="canceled"))
        return Left.ENDED

    def _ok(self, value: Any) -> Result:
        try:
            return Result(self.run_id, "ok", values.blocks_of(value))
        except (TypeError, ValueError, NotImplementedError) as wrong:
            return self._error(f"what the agent returned is no JSON: {wrong}")

    def _error(self, message: str, failed: BaseException | None = None) -> Result:
        text = message if failed is None else f"{type(failed).__name__}: {message}"
        limit = self._box.limits.text_bytes_max
        return Result(self.run_id, "error", (), text.encode(errors="replace")[:limit].decode(errors="ignore"))

    # --- for the context ----------------------------------------------------------------------------------

    def chance(self, key: str) -> bytes:
        return self._host.chance(self.checkpoints.outside(key))

    async def hear(self, patterns: tuple[str, ...], until: int | None, doubt: str | None = None) -> SignalSeen | None:
        """The oldest signal that fits, or None when the time is over."""
        wait = Wait(signals=patterns, until_ms=until, doubt=doubt)
        await self.waits.make_room()
        while True:  # another place may have been quicker to take what was there
            await self.waits.wait(wait, lambda: self.inbox.heard(patterns) is not None or self.times.is_over(until))
            heard = self.inbox.heard(patterns)
            if heard is None and self.times.is_over(until):
                await self.lookout.look(wait)  # it may have come before the time was over
                heard = self.inbox.heard(patterns)
            if heard is not None or self.times.is_over(until):
                return heard

    async def first_of(self, wait: Wait) -> SignalSeen | None:
        outcomes = self.notes.memory.outcomes

        def has_come() -> bool:
            return any(i in outcomes for i in wait.tasks) or self.inbox.heard(wait.signals) is not None

        def is_there() -> bool:
            return has_come() or self.times.is_over(wait.until_ms)

        await self.waits.make_room()
        while True:  # another place may have been quicker to take what was there
            await self.waits.wait(wait, is_there)
            if not has_come() and is_there():
                await self.lookout.look(wait)  # it may have come before the time was over
            if is_there():
                break
        if any(i in outcomes for i in wait.tasks):
            return None
        return self.inbox.heard(wait.signals)

    async def signals_like(self, pattern: str) -> list[SignalSeen]:
        if not self.hold.number or self.notes.batch.takes or self.notes.batch.entries:
            # A run hears what was said before it began once it has; and a commit takes so many.
            await self.waits.flush()
        looked = Wait(signals=(pattern,))
        standing = await self.lookout.look_up(lambda: self._box.look_around(self.hold.lease_id, looked, every=True))
        return [signal for signal in standing.signals if signal.id not in self.inbox.taken]

    async def perform(self, function: Callable[..., Any], key: str, idempotent: bool) -> dict[str, Any]:
        """An effect: what it returned, or how it failed."""
        self.hold.probe("an effect")
        self._effects += 1  # the run is held as long as it lasts
        try:
            outcome = {
                "value": values.plain(await self._host.perform(function, self.checkpoints.outside(key), idempotent))
            }
            self.notes.check_value(values.raw(outcome))
            return outcome
        except Exception as failed:
            return {"error": f"{type(failed).__name__}: {failed}"}
        finally:
            self._effects -= 1
            self.hold.news.set()
