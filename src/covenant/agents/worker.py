"""A worker for durable agents: leases their runs and their tasks, and goes on with the runs of workers that died.

`AgentWorker("http://…", agents=[…], tasks=[…])` works for the agent whose token it has, `AgentWorker(box, …)` for the
agent of a mailbox that is open. Runs that wait cost no lease and no thread; the functions of the last thousand are
kept, so that what goes on soon goes on where it stands.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from covenant.agents import values
from covenant.agents.definition import Agent, TaskFunction, check_defined, input_for
from covenant.agents.driver import Driver, Left
from covenant.agents.error import Fatal
from covenant.agents.lock import Lock
from covenant.mailbox import Mailbox, OpenMailbox
from covenant.model.content import Json
from covenant.model.error import CovenantError, Malformed
from covenant.model.record import TaskState
from covenant.model.run import Evidence
from covenant.model.task import Result, Task
from covenant.model.view import Delivery, QueueEntry
from covenant.store.clock import Clock, RandomIds, SystemClock
from covenant.work.context import Ended
from covenant.worker import Release, Settled, WorkContext, Worker, in_thread, is_own_failure

HEARTBEAT_MS: Final = 5_000
CONCURRENCY: Final = 64
WARM_MAX: Final = 1_000
_REASON_CHARS: Final = 1_000
_BACKOFF_MS_MAX: Final = 5 * 60 * 1000

T = TypeVar("T")

log = logging.getLogger("covenant.agents")


def nothing(place: str) -> None:
    """Nobody tests this one."""


class AgentWorker:
    """`async with AgentWorker(…):` works until the block ends; `await worker.run()` until `stop` is called."""

    _worker_type: type[Worker] = Worker

    def __init__(
        self,
        where: str | Mailbox,
        *,
        agents: Sequence[Agent] = (),
        tasks: Sequence[TaskFunction] = (),
        token: str | None = None,
        home: str | Path | None = None,
        concurrency: int = CONCURRENCY,
        heartbeat_ms: int = HEARTBEAT_MS,
        warm_max: int = WARM_MAX,
        grace_ms: int = 30_000,
        clock: Clock | None = None,
        probe: Callable[[str], None] = nothing,
    ) -> None:
        """`home` is a folder of this worker alone: by the lock in it, a worker that starts there knows that the one
        before it is dead, and goes on with its runs at once. Without it, a silent worker's runs are taken up when
        its lease has lapsed."""
        if type(warm_max) is not int or warm_max < 0:
            raise Malformed("warm_max is a number from 0", field="warm_max")
        self.agents = _by_name(agents)
        self.tasks = _by_name(tasks)
        if not self.agents and not self.tasks:
            raise Malformed("a worker has agents or tasks", field="agents")
        for name in self.agents.keys() & self.tasks.keys():
            raise Malformed(f"{name} is an agent and a task", field="tasks")
        self.clock = clock or SystemClock()
        self.probe = probe
        self._where = where
        self._token = token
        self._home = None if home is None else Path(home)
        self._concurrency = concurrency
        self._heartbeat_ms = heartbeat_ms
        self._grace_ms = grace_ms
        self._warm_max = warm_max
        self._warm: OrderedDict[str, Driver] = OrderedDict()
        self.incarnation = RandomIds().lease()
        self._opened: OpenMailbox | None = None
        self._lock: Lock | None = None
        self._worker: Worker | None = None
        self._is_told_to_stop = False  # also before there is a worker
        self._scanning: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> AgentWorker:
        try:
            await self._open()
            assert self._worker is not None
            await self._worker.__aenter__()
            await self._worker.up()
        except BaseException:
            await self._close()
            raise
        self._scanning = asyncio.create_task(self._take_over())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._worker is not None
        if self._scanning is not None:
            self._scanning.cancel()
            await asyncio.wait([self._scanning])
        try:
            await self._worker.__aexit__(kind, error, trace)
        finally:
            for driver in self._warm.values():
                driver.drop()
            self._warm.clear()
            await self._close()

    async def _close(self) -> None:
        self._is_told_to_stop = False
        lock, self._lock = self._lock, None  # it may be entered again, and not get that far
        opened, self._opened = self._opened, None
        if lock is not None:
            lock.release()
        if opened is not None:
            await opened.close()

    async def run(self) -> None:
        """Until `stop` is called."""
        async with self:
            assert self._worker is not None and self._worker._running is not None
            await asyncio.wait([self._worker._running])

    def stop(self) -> None:
        """As that of `Worker`."""
        self._is_told_to_stop = True
        if self._worker is not None:
            self._worker.stop()

    async def _open(self) -> None:
        if isinstance(self._where, str):
            self._opened = Mailbox.open(self._where, token=self._token)
            box: Mailbox = await self._opened.__aenter__()
        else:
            box = self._where
        agent = box.agent
        self.box = box.of(agent, incarnation=self.incarnation)
        self._lock = None if self._home is None else Lock(self._home, agent.pubkey, self.incarnation)
        self._worker = self._worker_type(
            box,
            self._handle,
            self._concurrency,
            self._heartbeat_ms,
            self.incarnation,
            grace_ms=self._grace_ms,
            kinds=self._kinds(),
        )
        if self._is_told_to_stop:
            self._worker.stop()

    def _kinds(self) -> list[str]:
        """What it has functions for. What is of no kind, as a message of the A2A protocol, is for the first agent."""
        return [*self.agents, *self.tasks, *([""] if self.agents else [])]

    # --- what is leased -----------------------------------------------------------------------------------

    async def _handle(self, work: WorkContext) -> Any:
        task = work.task
        function = None if task.task_kind is None else self.tasks.get(task.task_kind)
        if function is not None:
            return await self._do_queued(function, work)
        definition = self._agent_for(task)
        assert definition is not None  # it receives what it has functions for
        await self._go_on(definition, work)
        return Settled()

    def _agent_for(self, task: Task) -> Agent | None:
        """By the kind of the task; what has none, as a message of the A2A protocol, is for the first."""
        if task.task_kind is not None:
            return self.agents.get(task.task_kind)
        return next(iter(self.agents.values()), None)

    async def _go_on(self, definition: Agent, work: WorkContext) -> None:
        run_id = work.task.id
        driver = self._warm.pop(run_id, None)
        left = Left.STALE
        if driver is not None:
            left = await self._take(driver, work)
        while left is Left.STALE:
            driver = Driver(definition, work.task, self)
            left = await self._take(driver, work)
        if left is Left.PARKED and driver is not None:
            self._keep(driver)

    async def _take(self, driver: Driver, work: WorkContext) -> Left:
        watching = asyncio.create_task(self._watch(driver, work))
        try:
            return await driver.take(work.lease_id)
        except asyncio.CancelledError:
            await self._give_back(work, driver)
            return Left.LOST
        finally:
            watching.cancel()

    async def _watch(self, driver: Driver, work: WorkContext) -> None:
        """A cancel reaches a run through the heartbeats of its lease."""
        await work.canceled()
        if work.is_lost:
            driver.drop()
        else:
            driver.hear_cancel()

    async def _give_back(self, work: WorkContext, driver: Driver | None = None) -> None:
        """The worker stops: what was not committed was not done, and anybody may go on."""
        try:
            async with asyncio.timeout(5):
                if driver is not None and not await driver.call_off():
                    return
                await self.box.release(work.lease_id, reason="worker stopped")
        except (CovenantError, TimeoutError) as failed:
            log.warning("run %s could not be given back: %s", work.task.id, failed)

    def _keep(self, driver: Driver) -> None:
        """Another may be here: of the time before the run was taken up by the one that has parked now."""
        former = self._warm.pop(driver.run_id, None)
        if former is not None:
            former.drop()
        self._warm[driver.run_id] = driver
        while len(self._warm) > self._warm_max:
            _, oldest = self._warm.popitem(last=False)
            oldest.drop()

    # --- tasks --------------------------------------------------------------------------------------------

    async def _do_queued(self, function: TaskFunction, work: WorkContext) -> Any:
        result = await self._attempt(function, work.delivery, work)
        if isinstance(result, Release):
            raise result
        return result

    async def do(self, function: TaskFunction, delivery: Delivery) -> Result | None:
        """A task of a run that this worker holds, too; None when it was given back for another attempt, or its
        function has said the last word."""
        assert self._worker is not None
        work = self._worker.context_of(delivery)
        with self._worker.holding(work):
            try:
                result = await self._attempt(function, delivery, work)
            except asyncio.CancelledError:
                if function.safety == "idempotent":
                    await self._give_back(work)
                raise
            except Ended:
                if work._ending is None:
                    raise
            if work._ending is not None:
                await self._worker._settle(work, work._ending)
                return None
            if isinstance(result, Release):
                await self.patiently(
                    lambda: self.box.release(delivery, reason=result.reason, not_before_ms=result.not_before_ms)
                )
                return None
            return result

    async def _attempt(self, function: TaskFunction, delivery: Delivery, work: WorkContext) -> Result | Release:
        attempts, backoff_ms = _policy(function, delivery.task)
        try:
            value = await self._call(function, delivery.task, work)
            return Result.ok(delivery, values.blocks_of(value))
        except Release as release:
            return release
        except BaseException as failed:
            if not is_own_failure(failed):
                raise
            if delivery.attempt < attempts and not isinstance(failed, Fatal) and delivery.task.is_idempotent:
                delay_ms = min(backoff_ms * 2 ** (delivery.attempt - 1), _BACKOFF_MS_MAX)
                log.info("task %s failed at attempt %d of %d", delivery.task.id, delivery.attempt, attempts)
                return Release(
                    not_before_ms=self.clock.now_ms() + delay_ms,
                    reason=f"{type(failed).__name__}: {failed}"[:_REASON_CHARS],
                )
            log.info("task %s failed", delivery.task.id, exc_info=failed)
            limit = self.box.limits.text_bytes_max
            return Result.error(delivery, values.clipped(f"{type(failed).__name__}: {failed}", limit))

    async def _call(self, function: TaskFunction, task: Task, work: WorkContext) -> Any:
        self.probe("a task")
        given = input_for(function, task)
        arguments = (work, *given) if function.takes_context else given
        if asyncio.iscoroutinefunction(function.function):
            return await function.function(*arguments)
        return await in_thread(lambda: function.function(*arguments))

    async def perform(self, function: Callable[..., Any], key: str, idempotent: bool) -> Any:
        """An effect of a run; the function gets the key if it needs an argument."""
        made = function(key) if _needs_argument(function) else function()
        return await made if inspect.isawaitable(made) else made

    def chance(self, key: str) -> bytes:
        return os.urandom(16)

    # --- the runs of the dead -----------------------------------------------------------------------------

    async def _take_over(self) -> None:
        """For as long as the worker lives: a scan that is refused is made again at the next turn."""
        before, pause_s = None if self._lock is None else self._lock.before, self.box.limits.run_lapse_ms / 3000
        if before is None:
            await asyncio.sleep(pause_s)
        while True:
            try:
                if before is not None:
                    await self._resume_all("attested", before)
                    before = None
                else:
                    await self._resume_all("lapsed")
            except CovenantError as refused:
                log.warning("the runs of dead workers cannot be looked for: %s", refused)
            await asyncio.sleep(pause_s)

    async def take_all_over(self) -> None:
        """For the one worker of a store that nobody else can have open: whatever is held is held by the dead."""
        await self._resume_all("attested")

    async def _resume_all(self, evidence: Evidence, dead: str | None = None) -> None:
        """Take up the runs of a worker that is known to be dead, or of those that are silent."""
        silent_ms = 0 if evidence == "attested" else self.box.limits.run_lapse_ms
        cursor: str | None = None
        while True:
            page = await self.patiently(
                partial(self.box.task_queue, 100, state=TaskState.IN_FLIGHT, min_lease_age_ms=silent_ms, cursor=cursor)
            )
            for entry in page.tasks:
                if self._is_ours_to_resume(entry):
                    await self._resume(entry, evidence, dead)
            cursor = page.cursor
            if cursor is None:
                return

    def _is_ours_to_resume(self, entry: QueueEntry) -> bool:
        """Runs, and tasks of runs that may be done twice. The others are in doubt, and not for a worker to decide; a
        task that no run asked for is for the retry gate."""
        task = entry.task
        if task.recipient != self.box.agent:
            return False
        if task.task_kind is not None and task.task_kind in self.tasks:
            return entry.of_run and task.is_idempotent
        return self._agent_for(task) is not None

    async def _resume(self, entry: QueueEntry, evidence: Evidence, dead: str | None) -> None:
        assert self._worker is not None
        holder, task_id = entry.incarnation, entry.task.id
        if holder is None or holder == self.incarnation or (dead is not None and holder != dead):
            return
        reason = "its worker is dead" if evidence == "attested" else "its worker is silent"
        try:
            resumed = await self.patiently(
                lambda: self.box.resume_run(task_id, dead=holder, evidence=evidence, reason=reason)
            )
        except CovenantError as refused:
            log.info("task %s is not taken up: %s", task_id, refused.code)
            return
        if resumed.lease_id:
            self._worker.begin(Delivery(resumed.task, resumed.lease_id, resumed.attempt, resumed.generation))

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        assert self._worker is not None
        return await self._worker.patiently(call)


def _needs_argument(function: Callable[..., Any]) -> bool:
    """What has a default is the function's own: `lambda step=step: …` keeps the value that a loop gave it."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(function).parameters.values()
    return any(p.kind in positional and p.default is inspect.Parameter.empty for p in given)


N = TypeVar("N", Agent, TaskFunction)


def _by_name(defined: Sequence[N]) -> dict[str, N]:
    named: dict[str, N] = {}
    for one in defined:
        check_defined(one)
        if one.name in named:
            raise Malformed(f"{one.name} is defined twice", field="agents")
        named[one.name] = one
    return named


def _policy(function: TaskFunction, task: Task) -> tuple[int, int]:
    """How often a task is tried: as its sender says, or else as its function does."""
    options: dict[str, Any] = {}
    for block in task.content[1:]:
        if isinstance(block, Json) and isinstance(block.value, dict):
            options = block.value.get("covenant") or {}
    attempts, backoff_ms = options.get("attempts"), options.get("backoff_ms")
    return (
        attempts if isinstance(attempts, int) else function.attempts,
        backoff_ms if isinstance(backoff_ms, int) else function.backoff_ms,
    )
