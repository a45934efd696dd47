"""One run in the hands of one worker: its function is called, and what it does is committed from wait to wait.

While the function waits for others the run is parked: no lease, no thread, only the function itself, which may be put
away at any time. When the run is taken up again it goes on where it stands, if it is still here; if not, it is called
from its first line, and finds everything that it did. (Contract 20, 22-24.)

What the function may ask for is in `context`, what there is of the run in `run`, a module for each part of it.
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum
from functools import partial
from typing import Any

from msgspec import structs

from covenant.agents.commits import Commits, Reduced
from covenant.agents.context import AgentContext
from covenant.agents.definition import Agent, input_for
from covenant.agents.ending import Ending
from covenant.agents.hold import LOST
from covenant.agents.host import Host
from covenant.agents.run import Run
from covenant.model.error import CovenantError
from covenant.model.run import Wait
from covenant.model.task import Task

log = logging.getLogger("covenant.agents")


class Left(Enum):
    """How a driver lets go of a lease."""

    PARKED = "parked"
    ENDED = "ended"
    LOST = "lost"
    STALE = "stale"  # the run went on elsewhere, or a task of it that was done here: what is here is of the past


class Driver:
    def __init__(self, definition: Agent, task: Task, host: Host) -> None:
        self.run_id = task.id
        self._definition = definition
        self._run = Run(task, host, self.drop)
        self._hold = self._run.hold
        self._commits = Commits(self._run)
        self._ending = Ending(self._run, self._commits)
        self._function: asyncio.Task[Any] | None = None

    async def take(self, lease_id: str) -> Left:
        """Go on until the run waits for others, or ends, or is somebody else's."""
        self._hold.lease_id = lease_id
        self._hold.is_held = True
        try:
            if self._function is None:
                await self._load()
                self._function = asyncio.create_task(self._call())
                self._function.add_done_callback(self._hear_end)
            elif not await self._is_fresh():
                self.drop()
                return Left.STALE
            return await self._go_on(self._function)
        except LOST as lost:
            self.drop()
            if self._is_of_task(lost):
                log.info("run %s is called anew: its task %s", self.run_id, lost)
                return Left.STALE
            log.info("run %s is no longer held here: %s", self.run_id, lost.code)
            return Left.LOST
        except BaseException:
            self.drop()
            raise
        finally:
            self._hold.is_held = False

    def drop(self) -> None:
        """Put the function away: it is not to do anything any more."""
        self._hold.is_dropped = True
        self._run.own.drop()
        if self._function is not None and not self._function.done():
            self._function.cancel()
        self._run.waits.drop()

    async def call_off(self) -> bool:
        """After it was canceled: whether the run is still held. What it was about to begin is taken back."""
        try:
            return await self._commits.call_off()
        except CovenantError as refused:
            log.info("run %s: its last commit was refused: %s", self.run_id, refused.code)
            return not isinstance(refused, LOST) or self._is_of_task(refused)

    def _is_of_task(self, lost: CovenantError) -> bool:
        """And not of the run itself."""
        return bool(lost.details.get("task_id", self.run_id) != self.run_id)

    def hear_cancel(self) -> None:
        self._hold.cancel_requested = True
        self._hold.news.set()

    async def _load(self) -> None:
        hold, run = self._hold, self._run
        after = 0
        while True:
            loaded = await hold.ask(partial(hold.box.load_run, hold.lease_id, after))
            run.notes.memory.learn(loaded)
            if loaded.next is None:
                break
            after = loaded.next
        run.times.learn(loaded.now_ms)
        hold.learn(loaded)
        run.checkpoints.learn(loaded)
        run.entries.learn(loaded, run.task.message)

    async def _is_fresh(self) -> bool:
        """Whether the run stands where this function left it."""
        hold, run = self._hold, self._run
        union = run.waits.union(run.notes.memory.outcomes) or Wait(until_ms=0)
        looked = structs.replace(union, tasks=union.tasks - run.notes.batch.tasks.keys())
        if not looked.tasks and not looked.signals and looked.until_ms is None:
            looked = Wait(until_ms=0)
        standing = await hold.ask(lambda: hold.box.look_around(hold.lease_id, looked))
        if standing.number != hold.number:
            return False
        run.lookout.absorb(standing)
        return True

    async def _call(self) -> Any:
        given = input_for(self._definition, self._run.task)
        return await self._definition.function(AgentContext(self._run, self._definition.state_type), *given)

    def _hear_end(self, function: asyncio.Task[Any]) -> None:
        """A function that ends while the run is parked has waited for something of its own."""
        self._hold.news.set()
        if self._hold.is_dropped:
            if not function.cancelled():
                function.exception()  # however it ended: nobody asks, and nobody is to be told so
        elif not self._hold.is_held:
            self._hold.wake()

    async def _go_on(self, function: asyncio.Task[Any]) -> Left:
        """From wait to wait of the function: each is a commit."""
        hold, notes, waits, own = self._hold, self._run.notes, self._run.waits, self._run.own
        while True:
            await waits.until_still(function)
            if function.done():
                return await self._end(function)
            if not own.are_told:
                await own.told()
                continue
            wait = self._prepare()
            if wait is None and notes.batch.is_empty and not waits.is_commit_due:
                hold.news.clear()
                await hold.news.wait()
                continue
            before = waits.all
            try:
                standing = await self._commits.commit(wait)
            except Reduced:
                continue
            if standing.parked:
                went_on = not notes.batch.is_empty or any(waiting not in before for waiting in waits.all)
                if went_on or function.done():
                    hold.wake()  # while it was being parked
                return Left.PARKED
            if wait is not None and standing.cancel_requested and not waits.is_told and not waits.is_any_there:
                waits.tell_cancel()

    def _prepare(self) -> Wait | None:
        """What the next commit waits for. What this worker can do itself is begun instead of waited for."""
        notes, waits, own = self._run.notes, self._run.waits, self._run.own
        awaited, outcomes = waits.awaited, notes.memory.outcomes
        wanted = {i for wait in awaited for i in wait.tasks if i not in outcomes}
        mine = {i for i in wanted if own.can_do(i)}
        only_mine = wanted == mine and all(not wait.signals and wait.until_ms is None for wait in awaited)
        if only_mine:
            begun, room = notes.batch.begins, self._hold.box.limits.batch_max - len(notes.batch.begins)
            begun += [i for i in sorted(mine) if not own.is_doing(i) and i not in begun][:room]
        is_busy = not own.are_done or self._run.effects.under_way or self._run.lookout.under_way
        if only_mine or is_busy or waits.flushing or notes.cancels_due:
            return None
        return waits.union(outcomes)

    async def _end(self, function: asyncio.Task[Any]) -> Left:
        if self._hold.is_dropped:
            return Left.LOST
        await self._ending.end(function)
        return Left.ENDED
