"""One run in the hands of one worker: its function is called, and what it does is committed from wait to wait.

While the function waits for others the run is parked: no lease, no thread, only the function itself, which may be put
away at any time. When the run is taken up again it goes on where it stands, if it is still here; if not, it is called
from its first line, and finds everything that it did. (Contract 20, 22-24.)
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import structs

from covenant.agents import values
from covenant.agents.context import AgentContext
from covenant.agents.definition import Agent, called_with
from covenant.agents.error import CancelRequested, Suspended
from covenant.agents.hold import LOST
from covenant.agents.host import Host
from covenant.agents.memory import Batch
from covenant.agents.run import Run
from covenant.model.error import (
    CovenantError,
    NotPermitted,
    UnknownPeer,
)
from covenant.model.run import (
    RunCommit,
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
        self._definition = definition
        self.run_id = task.id
        self.run = Run(task, host, self.drop)
        self._box = host.box
        self._function: asyncio.Task[Any] | None = None

    # --- under a lease ------------------------------------------------------------------------------------

    async def take(self, lease_id: str) -> Left:
        """Go on until the run waits for others, or ends, or is somebody else's."""
        self.run.hold.lease_id = lease_id
        self.run.hold.is_held = True
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
            self.run.hold.is_held = False

    def drop(self) -> None:
        """Put the function away: it is not to do anything any more."""
        self.run.hold.is_dropped = True
        self.run.own.drop()
        if self._function is not None and not self._function.done():
            self._function.cancel()
        self.run.waits.drop()

    async def _load(self) -> None:
        after = 0
        while True:
            loaded = await self.run.hold.ask(partial(self._box.load_run, self.run.hold.lease_id, after))
            self.run.notes.memory.learn(loaded)
            if loaded.next is None:
                break
            after = loaded.next
        self.run.times.learn(loaded.now_ms)
        self.run.hold.learn(loaded)
        self.run.checkpoints.learn(loaded)
        self.run.entries.learn(loaded, self.run.task.message)

    async def _is_fresh(self) -> bool:
        """Whether the run stands where this function left it."""
        union = self.run.waits.union(self.run.notes.memory.outcomes) or Wait(until_ms=0)
        looked = structs.replace(union, tasks=union.tasks - self.run.notes.batch.tasks.keys())
        if not looked.tasks and not looked.signals and looked.until_ms is None:
            looked = Wait(until_ms=0)
        standing = await self.run.hold.ask(lambda: self._box.look_around(self.run.hold.lease_id, looked))
        if standing.number != self.run.hold.number:
            return False
        self.run.lookout.absorb(standing)
        return True

    async def _call(self) -> Any:
        arguments = called_with(self._definition, values.input_of(self.run.task))
        return await self._definition.function(AgentContext(self.run, self._definition.state_type), *arguments)

    async def _go_on(self) -> Left:
        while True:
            assert self._function is not None
            await self.run.waits.until_still(self._function)
            if self._function.done():
                return await self._end(self._function)
            if not self.run.own.are_told:
                await self.run.own.told()
                continue
            wait = self._prepare()
            if wait is None and self.run.notes.batch.is_empty and not self.run.waits.is_commit_due:
                self.run.hold.news.clear()
                await self.run.hold.news.wait()
                continue
            waits = self.run.waits.all
            try:
                standing = await self._commit(wait)
            except _Reduced:
                continue
            if standing.parked:
                went_on = not self.run.notes.batch.is_empty or any(
                    waiting not in waits for waiting in self.run.waits.all
                )
                if went_on or self._function.done():
                    self.run.hold.wake()  # while it was being parked
                return Left.PARKED
            is_asked = wait is not None and standing.cancel_requested
            if is_asked and not self.run.waits.is_told and not self.run.waits.is_any_there:
                self.run.waits.tell_cancel()

    def _hear_end(self, function: asyncio.Task[Any]) -> None:
        """A function that ends while the run is parked has waited for something of its own."""
        self.run.hold.news.set()
        if not self.run.hold.is_held and not self.run.hold.is_dropped:
            self.run.hold.wake()

    def _prepare(self) -> Wait | None:
        """What the next commit waits for. What this worker can do itself is begun instead of waited for."""
        awaited = self.run.waits.awaited
        wanted = {i for wait in awaited for i in wait.tasks if i not in self.run.notes.memory.outcomes}
        mine = {i for i in wanted if self.run.own.can_do(i)}
        only_mine = wanted == mine and all(not wait.signals and wait.until_ms is None for wait in awaited)
        if only_mine:
            begun, room = self.run.notes.batch.begins, self._box.limits.batch_max - len(self.run.notes.batch.begins)
            begun += [i for i in sorted(mine) if not self.run.own.is_doing(i) and i not in begun][:room]
        is_busy = not self.run.own.are_done or self.run.effects.under_way or self.run.lookout.under_way
        if only_mine or is_busy or self.run.waits.flushing or self.run.notes.cancels_due:
            return None
        return self.run.waits.union(self.run.notes.memory.outcomes)

    # --- committing ---------------------------------------------------------------------------------------

    async def _commit(self, wait: Wait | None, result: Result | None = None) -> Standing:
        self.run.own.stop_lingering()
        await self.run.own.told()
        batch = self.run.notes.hand_over()
        flushed = self.run.waits.flushing
        self.run.waits.is_commit_due = False
        commit = batch.commit(self.run.hold.number + 1, self.run.entries.leaf, wait, result, self.run.waits.is_told)
        try:
            standing = await self._commit_once(commit)
        except LOST:
            raise
        except CovenantError as refusal:
            self._leave_out(refusal, batch, wait)
            raise _Reduced(f"{refusal.code}: {refusal.message}") from refusal
        self.run.hold.number = standing.number
        self.run.inbox.forget_taken(batch.takes, is_looking=self.run.lookout.under_way > 0)
        self.run.notes.batch.cancels += self.run.notes.cancels_due
        self.run.notes.cancels_due = []
        for waiting in flushed:
            waiting.go_on()
        self.run.lookout.absorb(standing)
        for child_id in batch.begins:
            lease_id = standing.leases.get(child_id)
            if lease_id is None:
                self.run.own.leave(child_id)
            else:
                self.run.own.begin(child_id, lease_id, standing.attempts.get(child_id, 1), batch.tasks.get(child_id))
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
        self.run.notes.take_back(batch)
        for child in refused:
            log.warning("run %s: task %s is not taken: %s (%s)", self.run_id, child, refusal, refusal.code)
            self.run.tasks.refuse(child, refusal)
        self.run.notes.cancels_due = [child for child in self.run.notes.cancels_due if child not in refused]

    async def _commit_once(self, commit: RunCommit) -> Standing:
        self.run.hold.probe("before a commit")
        standing = await self.run.hold.ask(lambda: self._box.commit_run(self.run.hold.lease_id, commit))
        self.run.hold.probe("after a commit")
        return standing

    async def _end(self, function: asyncio.Task[Any]) -> Left:
        if self.run.hold.is_dropped:
            return Left.LOST
        failed = None if function.cancelled() else function.exception()
        if function.cancelled() or isinstance(failed, Suspended):
            result = self._error("the agent was canceled from inside")
        elif failed is not None:
            if not isinstance(failed, Exception):
                raise failed
            if self.run.hold.cancel_requested and isinstance(failed, CancelRequested):
                return await self._end_canceled()
            log.info("run %s failed", self.run_id, exc_info=failed)
            result = self._error(str(failed) or type(failed).__name__, failed)
        else:
            result = self._ok(function.result())
        await self.run.own.finish()
        try:
            await self._commit_last(result)
        except LOST:
            raise
        except CovenantError as refused:
            self.run.notes.batch = Batch()
            self.run.entries.give_up()
            await self._commit(None, self._error(f"{refused.code}: {refused.message}"))
        return Left.ENDED

    async def _commit_last(self, result: Result) -> None:
        """Nobody can hear any more that a task was refused: the run itself ends with that."""
        while True:
            try:
                if self.run.notes.cancels_due:
                    await self._commit(None)
                await self._commit(None, result)
                return
            except _Reduced as reduced:
                result = result if result.status == "error" else self._error(str(reduced))

    async def _end_canceled(self) -> Left:
        """It has cleaned up: what it noted while doing so is kept, and the task ends as it was asked to."""
        while self.run.notes.cancels_due or not self.run.notes.batch.is_empty:
            with suppress(_Reduced):
                await self._commit(None)
        await self.run.hold.ask(lambda: self._box.release(self.run.hold.lease_id, reason="canceled"))
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
