"""The mailbox: every verb that an agent or an operator has, over any store.

`Mailbox.open(url)` is the box of the program that owns the store: it sees everything, and receives for everybody.
`box.of(agent)` is the same box bound to one agent: it sends as that agent, receives for it, and sees what it sent or
received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from covenant.model.agent import AgentId, check_agent
from covenant.model.audit import AuditRow
from covenant.model.command import (
    BeatLease,
    CancelTask,
    Command,
    DrainResults,
    ForgetCached,
    LeaseTasks,
    PostResult,
    ReleaseLease,
    RepairTask,
    RetryStale,
    SendTask,
)
from covenant.model.error import CovenantError, Malformed, NotPermitted
from covenant.model.limits import Limits
from covenant.model.record import TaskState
from covenant.model.repair import RepairOutcome, RepairRequest, RetryPolicy, RetryReport
from covenant.model.task import Result, Task
from covenant.model.view import (
    Answer,
    CachePage,
    Canceled,
    Compaction,
    Delivery,
    LeaseStatus,
    Posted,
    QueueEntry,
    QueuePage,
    Released,
    Sent,
    Tree,
)
from covenant.rules import query
from covenant.rules.context import Context, Ids, View
from covenant.rules.envelope import check_count, check_text
from covenant.store.clock import Clock, RandomIds, SystemClock
from covenant.store.engine import Engine
from covenant.store.registry import engine_for

T = TypeVar("T")

_PAGE = 10
_WAIT_MS_MAX = 24 * 60 * 60 * 1000


class Mailbox:
    """Open one with `Mailbox.open(url)`, bind it with `of(agent)`."""

    def __init__(self, engine: Engine, agent: AgentId | None, incarnation: str) -> None:
        self._engine = engine
        self._agent = agent
        self._incarnation = incarnation

    @staticmethod
    def open(
        url: str, *, limits: Limits | None = None, clock: Clock | None = None, ids: Ids | None = None
    ) -> OpenMailbox:
        """`memory:` or `file:./data`. Use it with `async with`, or `await` it and close it yourself."""
        ids = ids or RandomIds()
        engine = engine_for(url, limits or Limits(), clock or SystemClock(), ids)
        return OpenMailbox(engine, ids.lease())

    def of(self, agent: AgentId | str, *, incarnation: str | None = None) -> Mailbox:
        """This box as one agent sees it. A lease belongs to an incarnation; by default there is one for each time
        that the box was opened."""
        if isinstance(agent, str):
            agent = AgentId.named(agent)
        check_agent(agent)
        if incarnation is not None:
            check_text(incarnation, "incarnation", self.limits.key_bytes_max)
        if self._agent is not None and agent != self._agent:
            raise NotPermitted(f"this box is bound to {self._agent}")
        return Mailbox(self._engine, agent, incarnation or self._incarnation)

    @property
    def agent(self) -> AgentId:
        """Whose box this is."""
        if self._agent is None:
            raise Malformed("this box is bound to no agent: use box.of(agent)")
        return self._agent

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    # --- tasks --------------------------------------------------------------------------------------------

    def send_task(self, task: Task) -> Coroutine[Any, Any, Sent]:
        """Durable when it returns. The same id with the same content is the same send."""
        return self._engine.run(SendTask(self._agent, task))

    async def send_tasks(self, tasks: Sequence[Task]) -> list[Sent | CovenantError]:
        """Many at once. Each stands for itself: a refusal is returned in its place."""
        if not isinstance(tasks, (list, tuple)):
            raise Malformed("a list of tasks is needed", field="tasks")
        check_count(len(tasks), "tasks", self.limits.batch_max)
        commands: list[Command] = [SendTask(self._agent, task) for task in tasks]
        return await self._engine.run_all(commands)

    async def recv_task(self) -> Delivery:
        """Wait for the oldest task and lease it: for this agent, or for anyone when the box is bound to none."""
        taken: list[Delivery] = await self._engine.take(LeaseTasks(self._agent, self._agent, self._incarnation))
        return taken[0]

    async def recv_tasks(self, limit: int, wait_ms: int | None = None) -> list[Delivery]:
        """Lease up to `limit` tasks; waits until there is one, or returns none when `wait_ms` is over."""
        return await self._take(LeaseTasks(self._agent, self._agent, self._incarnation, limit), limit, wait_ms)

    async def try_recv_task_for(self, recipient: AgentId | None = None) -> Delivery | None:
        """Lease the oldest task for this recipient if there is one now."""
        recipient = self._myself(recipient)
        leased: list[Delivery] = await self._engine.run(LeaseTasks(self._agent, recipient, self._incarnation))
        return leased[0] if leased else None

    async def heartbeat(self, lease: Delivery | str) -> LeaseStatus:
        """Show that the work goes on; learn whether a cancel was asked for."""
        status: LeaseStatus = await self._engine.run(BeatLease(self._agent, _lease_id(lease)))
        return status

    async def release(
        self, lease: Delivery | str, *, reason: str = "released", not_before_ms: int | None = None
    ) -> Released:
        """Give the task back without a result: same id, next attempt."""
        command = ReleaseLease(self._agent, _lease_id(lease), reason, not_before_ms)
        released: Released = await self._engine.run(command)
        return released

    async def cancel_task(
        self, task_id: str, *, reason: str = "canceled", graceful: bool = False, cascade: bool = False
    ) -> Canceled:
        """End the task and answer its sender. `graceful` asks a holder first; `cascade` takes the children along."""
        command = CancelTask(self._agent, task_id, reason, graceful, cascade)
        canceled: Canceled = await self._engine.run(command)
        return canceled

    async def get_task(self, task_id: str) -> QueueEntry:
        return await self._read(lambda view, ctx: query.get_task(task_id, self._agent, view, ctx))

    async def wait_generation(self, task_id: str, after: int, wait_ms: int | None = None) -> QueueEntry:
        """The task once its generation is higher than `after`, or a cancel is asked for meanwhile; as it is when the
        wait ends or the task has ended."""
        if type(after) is not int:
            raise Malformed("after is a generation", field="after")
        entry = await self.get_task(task_id)
        task_id, asked = entry.task.id, entry.cancel_requested
        try:
            async with asyncio.timeout(_seconds(wait_ms)):
                while entry.generation <= after and entry.outcome is None and entry.cancel_requested == asked:
                    await self._engine.wait_change(task_id, entry.generation, asked)
                    entry = await self.get_task(task_id)
        except TimeoutError:
            entry = await self.get_task(task_id)
        return entry

    async def recent_tasks(self, limit: int = _PAGE) -> list[Task]:
        """Newest first, in any state."""
        return await self._read(lambda view, ctx: query.recent_tasks(limit, self._agent, view, ctx))

    async def task_queue(
        self,
        limit: int = _PAGE,
        *,
        state: TaskState | str | None = None,
        min_lease_age_ms: int | None = None,
        deadline_within_ms: int | None = None,
        cursor: str | None = None,
    ) -> QueuePage:
        """What is queued and in flight, and what waits to be drained."""
        wanted = _state(state)
        return await self._read(
            lambda view, ctx: query.task_queue(
                limit, wanted, min_lease_age_ms, deadline_within_ms, cursor, self._agent, view, ctx
            )
        )

    async def task_tree(self, root: str) -> Tree:
        """The tree that hangs on a task, or on an intent that is no task."""
        return await self._read(lambda view, ctx: query.task_tree(root, self._agent, view, ctx))

    # --- results ------------------------------------------------------------------------------------------

    def send_result(self, result: Result) -> Coroutine[Any, Any, Posted]:
        """Answer a leased task. The same result again gets the same answer."""
        return self._engine.run(PostResult(self._agent, result, self._incarnation))

    async def recv_result(self) -> Answer:
        """Wait for the oldest result for this agent, or for anyone."""
        taken: list[Answer] = await self._engine.take(DrainResults(self._agent, self._agent))
        return taken[0]

    async def recv_results(self, limit: int, wait_ms: int | None = None) -> list[Answer]:
        return await self._take(DrainResults(self._agent, self._agent, limit), limit, wait_ms)

    async def try_recv_result_for(self, peer: AgentId | None = None) -> Answer | None:
        peer = self._myself(peer)
        drained: list[Answer] = await self._engine.run(DrainResults(self._agent, peer))
        return drained[0] if drained else None

    async def get_result(self, task_id: str) -> Answer | None:
        """The final result, also after it was drained; None while there is none."""
        return await self._read(lambda view, ctx: query.get_result(task_id, self._agent, view, ctx))

    async def recent_results(self, limit: int = _PAGE) -> list[Answer]:
        return await self._read(lambda view, ctx: query.recent_results(limit, self._agent, view, ctx))

    # --- the operator's -----------------------------------------------------------------------------------

    async def repair_task(self, request: RepairRequest) -> RepairOutcome:
        """Requeue a leased task, or end it with an error."""
        outcome: RepairOutcome = await self._engine.run(RepairTask(self._agent, request))
        return outcome

    async def retry_stale(
        self, policy: RetryPolicy | None = None, *, cursor: str | None = None, scheduled: bool = False
    ) -> RetryReport:
        """One pass of the retry gate; it only reports unless the policy is enabled."""
        command = RetryStale(self._agent, policy or RetryPolicy(), cursor, scheduled)
        report: RetryReport = await self._engine.run(command)
        return report

    async def cached_results(self, limit: int = _PAGE, *, cursor: str | None = None) -> CachePage:
        return await self._read(lambda view, ctx: query.cached_results(limit, cursor, self._agent, view, ctx))

    async def forget_cached(self, entry_id: str, *, reason: str) -> None:
        """Drop a cached result: the next send under its key does the work again."""
        await self._engine.run(ForgetCached(self._agent, entry_id, reason))

    async def compact(self, *, older_than_ms: int | None = None) -> Compaction:
        """Let go of resolved tasks past retention, or older than this."""
        self._operator("compacts")
        return await self._engine.compact(older_than_ms)

    async def recent_audit(self, limit: int = _PAGE) -> list[AuditRow]:
        self._operator("reads the audit")
        return await self._engine.audit(check_count(limit, "limit", self.limits.page_max))

    # --- inside -------------------------------------------------------------------------------------------

    async def _read(self, question: Callable[[View, Context], T]) -> T:
        return await self._engine.read(question)

    async def _take(self, command: LeaseTasks | DrainResults, limit: int, wait_ms: int | None) -> list[Any]:
        if check_count(limit, "limit", self.limits.batch_max) < 1:
            raise Malformed("limit is a number from 1", field="limit")
        if wait_ms is None:
            return await self._engine.take(command)
        if wait_ms == 0:
            taken: list[Any] = await self._engine.run(command)
            return taken
        try:
            async with asyncio.timeout(_seconds(wait_ms)):
                return await self._engine.take(command)
        except TimeoutError:
            return []

    def _myself(self, agent: AgentId | None) -> AgentId | None:
        if self._agent is None:
            if agent is not None:
                check_agent(agent)
            return agent
        if agent is not None and agent != self._agent:
            raise NotPermitted(f"{self._agent} cannot receive for {agent}")
        return self._agent

    def _operator(self, does: str) -> None:
        if self._agent is not None:
            raise NotPermitted(f"only the operator {does}")


class OpenMailbox(Mailbox):
    """The box of the program that owns the store."""

    def __init__(self, engine: Engine, incarnation: str) -> None:
        super().__init__(engine, None, incarnation)

    def __await__(self) -> Any:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> OpenMailbox:
        await self._engine.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._engine.close()


def _lease_id(lease: Delivery | str) -> str:
    return lease.lease_id if isinstance(lease, Delivery) else lease


def _state(state: TaskState | str | None) -> TaskState | None:
    try:
        return None if state is None else TaskState(state)
    except ValueError:
        raise Malformed(f"no such state: {state}", field="state") from None


def _seconds(wait_ms: int | None) -> float | None:
    return None if wait_ms is None else check_count(wait_ms, "wait_ms", _WAIT_MS_MAX) / 1000
