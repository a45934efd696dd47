"""The tasks of a run that its own worker does: how they are done, and how their results are told.

A result goes with the next commit of the run, one sync for both; if the function takes its time, or there is too much
for one commit, it is told beside.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from msgspec.json import encode

from covenant.agents.definition import TaskFunction
from covenant.agents.hold import Hold
from covenant.agents.host import Host
from covenant.agents.notes import Notes
from covenant.agents.tasks import Tasks
from covenant.model.error import CovenantError, LeaseSuperseded
from covenant.model.task import Result, Task
from covenant.model.view import Delivery
from covenant.rules.envelope import seal_result

LINGER_S: Final = 0.01  # how long a result waits for the next commit of the run

log = logging.getLogger("covenant.agents")


class OwnTasks:
    def __init__(self, host: Host, hold: Hold, notes: Notes, tasks: Tasks) -> None:
        self._host = host
        self._hold = hold
        self._notes = notes
        self._tasks = tasks
        self._doing: dict[str, asyncio.Task[None]] = {}
        self._others: set[str] = set()  # that somebody else has
        self._lingering: asyncio.TimerHandle | None = None
        self._telling: list[asyncio.Task[None]] = []
        self._lost: str | None = None  # one that was done here, and was no longer ours to answer

    # --- doing --------------------------------------------------------------------------------------------

    @property
    def are_done(self) -> bool:
        return not self._doing

    def is_doing(self, child_id: str) -> bool:
        return child_id in self._doing

    def can_do(self, child_id: str) -> bool:
        return child_id in self._doing or (self._tasks.is_local(child_id) and child_id not in self._others)

    def leave(self, child_id: str) -> None:
        """Somebody else has it."""
        self._others.add(child_id)

    def begin(self, child_id: str, lease_id: str, attempt: int, sent: Task | None) -> None:
        task = sent or self._tasks.sent(child_id)
        delivery = Delivery(task, lease_id, attempt, 2 * attempt)
        function = self._tasks.function_of(child_id)
        self._doing[child_id] = asyncio.create_task(self._do(function, delivery))

    async def _do(self, function: TaskFunction, delivery: Delivery) -> None:
        child_id = delivery.task.id
        try:
            result = await self._host.do(function, delivery)
        finally:
            self._doing.pop(child_id, None)
            self._hold.news.set()
        if result is None:
            self.leave(child_id)  # to be done again later, by whoever leases it
            return
        if self._tasks.is_canceled(child_id):
            return  # however it ended: that it was canceled stands
        told = self._kept(result)
        self._notes.memory.outcomes[child_id] = told
        size = len(encode(told))
        if not self._notes.carries(size):
            self._tell_beside()
        self._notes.batch.answers.append(told)
        self._notes.batch.bytes += size
        if self._lingering is None:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self._linger_no_more)

    def _kept(self, result: Result) -> Result:
        """As it will be read when it is read again; or that it cannot be kept."""
        try:
            return seal_result(result, self._hold.box.limits)
        except CovenantError as refused:
            message = f"{refused.code}: {refused.message}"
            return Result(result.task_id, "error", (), message, result.lease_id)

    def cancel(self, child_id: str) -> None:
        doing = self._doing.get(child_id)
        if doing is not None:
            doing.cancel()

    async def finish(self) -> None:
        """What is still being done when the function ends is nobody's to wait for any more: it is finished first."""
        if self._doing:
            await asyncio.wait(list(self._doing.values()))

    def drop(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
        for doing in self._doing.values():
            doing.cancel()

    # --- telling ------------------------------------------------------------------------------------------

    def _linger_no_more(self) -> None:
        self._lingering = None
        self._tell_beside()

    def _tell_beside(self) -> None:
        if not self._hold.is_dropped and self._notes.batch.answers:
            self._telling.append(self._hold.beside(self._tell()))

    async def _tell(self) -> None:
        """The function takes its time: what is done is told meanwhile."""
        hold, batch = self._hold, self._notes.batch
        answers, batch.answers = batch.answers, []
        batch.bytes -= sum(len(encode(result)) for result in answers)
        for result in answers:
            try:
                await hold.ask(partial(hold.box.send_result, result))
            except CovenantError as refused:
                log.warning("the result of task %s was refused: %s", result.task_id, refused.code)
                self._lost = result.task_id
                hold.news.set()

    @property
    def are_told(self) -> bool:
        return not self._telling and self._lost is None

    async def told(self) -> None:
        """What follows from a result must not be kept before the result is."""
        await self.all_told()
        if self._hold.is_dropped:
            raise LeaseSuperseded("the run is no longer held here", task_id=self._hold.run_id)

    async def all_told(self) -> None:
        while self._telling:
            await asyncio.wait([self._telling.pop()])
        if self._lost is not None:
            raise LeaseSuperseded("its result was refused", task_id=self._lost)

    def stop_lingering(self) -> None:
        """The next commit takes them all."""
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
