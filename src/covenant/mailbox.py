"""The mailbox: every verb that an agent or an operator has, over any store.

`Mailbox.open(url)` is the box of the program that owns the store: it sees everything, and receives for everybody.
`box.of(agent)` is the same box bound to one agent: it sends as that agent, receives for it, and sees what it sent or
received.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Coroutine, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Any, TypeVar

from msgspec import Raw
from msgspec.json import encode

from covenant.client.remote import ADDRESS, REMOTE, Tokens, remote_engine
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.agent import AgentId, check_agent
from covenant.model.audit import AuditRow
from covenant.model.card import Card, CardPage
from covenant.model.error import CovenantError, Malformed, NotPermitted
from covenant.model.limits import Limits
from covenant.model.message import Artifact, Message, Part, Role
from covenant.model.record import Asks, TaskState
from covenant.model.repair import RepairOutcome, RepairRequest, RetryPolicy, RetryReport
from covenant.model.run import (
    NOTHING,
    EntryFound,
    EntryPage,
    Evidence,
    Resumed,
    RunCommit,
    RunLoaded,
    RunPage,
    RunSeen,
    RunStatus,
    Signaled,
    Standing,
    Verdict,
    Wait,
)
from covenant.model.task import Result, Task
from covenant.model.view import (
    Answer,
    CachePage,
    Canceled,
    Compaction,
    Delivery,
    Inputs,
    LeaseStatus,
    Moved,
    Posted,
    QueueEntry,
    QueuePage,
    Released,
    Sent,
    Tree,
)
from covenant.rules.card import plain_card
from covenant.rules.context import Ids
from covenant.rules.envelope import check_batch, check_count, check_json, check_text
from covenant.store.clock import Clock, RandomIds, SystemClock
from covenant.store.engine import Engine
from covenant.store.registry import engine_for

_PAGE = 10
_WAIT_MS_MAX = 24 * 60 * 60 * 1000

K = TypeVar("K", bound=StrEnum)


class Mailbox:
    """Open one with `Mailbox.open(url)`, bind it with `of(agent)`."""

    def __init__(self, engine: Engine, agent: AgentId | None, incarnation: str) -> None:
        self._engine = engine
        self._agent = agent
        self._incarnation = incarnation

    @staticmethod
    def open(
        url: str,
        *,
        limits: Limits | None = None,
        clock: Clock | None = None,
        ids: Ids | None = None,
        token: str | None = None,
        tokens: Tokens | None = None,
    ) -> OpenMailbox:
        """`memory:`, `file:./data`, `postgresql://user@host/name`, `http://host:port` or `unix:/path/to/sock`. Use it
        with `async with`, or `await` it and close it yourself.

        A daemon wants a `token`: that of the operator opens the whole box, that of a peer the box of that peer.
        `tokens` are those of the agents that `of` is asked for."""
        ids = ids or RandomIds()
        if limits is not None and not isinstance(limits, Limits):
            raise Malformed("limits is a Limits, such as Limits(page_max=100)", field="limits")
        if isinstance(url, str) and url.startswith(REMOTE):
            if limits is not None or clock is not None:
                raise Malformed("a daemon has its own limits and its own clock", field="limits")
            return OpenMailbox(remote_engine(url, token, tokens), ids.lease())
        if token is not None or tokens is not None:
            raise Malformed(f"only a daemon takes tokens: {ADDRESS}", field="token")
        besides = f"; or a daemon: {ADDRESS}"
        engine = engine_for(url, limits or Limits(), clock or SystemClock(), ids, besides)
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
        return self._engine.run(c.SendTask(self._agent, task))

    async def send_tasks(self, tasks: Sequence[Task]) -> list[Sent | CovenantError]:
        """Many at once, in their order. Each stands for itself: a refusal is returned in its place."""
        if not isinstance(tasks, (list, tuple)):
            raise Malformed("a list of tasks is needed", field="tasks")
        check_count(len(tasks), "tasks", self.limits.batch_max)
        commands: list[c.Command] = [c.SendTask(self._agent, task) for task in tasks]
        return await self._engine.run_all(commands)

    async def recv_task(self) -> Delivery:
        """Wait for the oldest task and lease it: for this agent, or for anyone when the box is bound to none."""
        taken: list[Delivery] = await self._engine.take(c.LeaseTasks(self._agent, self._agent, self._incarnation))
        return taken[0]

    async def recv_tasks(
        self, limit: int, wait_ms: int | None = None, *, kinds: Collection[str] | None = None
    ) -> list[Delivery]:
        """Lease up to `limit` tasks; waits until there is one, or returns none when `wait_ms` is over. With `kinds`,
        of these alone; an empty name stands for tasks without a kind."""
        wanted = None if kinds is None else _kinds(kinds)
        command = c.LeaseTasks(self._agent, self._agent, self._incarnation, limit, wanted)
        return await self._take(command, limit, wait_ms)

    async def try_recv_task_for(self, recipient: AgentId | None = None) -> Delivery | None:
        """Lease the oldest task for this recipient if there is one now."""
        recipient = self._myself(recipient)
        leased: list[Delivery] = await self._engine.run(c.LeaseTasks(self._agent, recipient, self._incarnation))
        return leased[0] if leased else None

    async def heartbeat(self, lease: Delivery | str) -> LeaseStatus:
        """Show that the work goes on; learn whether a cancel was asked for."""
        status: LeaseStatus = await self._engine.run(c.BeatLease(self._agent, _lease_id(lease)))
        return status

    async def release(
        self, lease: Delivery | str, *, reason: str = "released", not_before_ms: int | None = None
    ) -> Released:
        """Give the task back without a result: same id, next attempt."""
        command = c.ReleaseLease(self._agent, _lease_id(lease), reason, not_before_ms)
        released: Released = await self._engine.run(command)
        return released

    async def cancel_task(
        self, task_id: str, *, reason: str = "canceled", graceful: bool = False, cascade: bool = False
    ) -> Canceled:
        """End the task and answer its sender. `graceful` asks a holder first; `cascade` takes the children along."""
        command = c.CancelTask(self._agent, task_id, reason, graceful, cascade)
        canceled: Canceled = await self._engine.run(command)
        return canceled

    async def get_task(self, task_id: str) -> QueueEntry:
        entry: QueueEntry = await self._engine.ask(q.GetTask(self._agent, task_id))
        return entry

    async def wait_generation(self, task_id: str, after: int, wait_ms: int | None = None) -> QueueEntry:
        """The task once its generation is higher than `after`, or a cancel is asked for meanwhile; as it is when the
        wait ends or the task has ended."""
        if type(after) is not int:
            raise Malformed("after is a generation", field="after")
        return await self._engine.watch(q.GetTask(self._agent, task_id), after, _wait(wait_ms))

    async def recent_tasks(self, limit: int = _PAGE) -> list[Task]:
        """Newest first, in any state."""
        tasks: list[Task] = await self._engine.ask(q.RecentTasks(self._agent, limit))
        return tasks

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
        wanted = _one_of(TaskState, state, "state")
        query = q.ListQueue(self._agent, limit, wanted, min_lease_age_ms, deadline_within_ms, cursor)
        page: QueuePage = await self._engine.ask(query)
        return page

    async def task_tree(self, root: str) -> Tree:
        """The tree that hangs on a task, or on an intent that is no task."""
        tree: Tree = await self._engine.ask(q.GetTree(self._agent, root))
        return tree

    # --- the dialog ---------------------------------------------------------------------------------------

    async def add_message(self, task_id: str, message: Message | str, if_generation: int | None = None) -> Moved:
        """More to an open task of this agent's, as input for who holds it, or will. With `if_generation`, only if
        nothing has happened to it since."""
        command = c.AddMessage(self._agent, task_id, said(message, "ROLE_USER"), if_generation)
        moved: Moved = await self._engine.run(command)
        return moved

    async def update(self, lease: Delivery | str, message: Message | str, *, receipt: str | None = None) -> Moved:
        """Say how far the work is. Under the same receipt, the same update again is the same update."""
        command = c.UpdateTask(self._agent, _lease_id(lease), said(message), receipt=receipt)
        moved: Moved = await self._engine.run(command)
        return moved

    async def artifact(
        self,
        lease: Delivery | str,
        artifact: Artifact,
        *,
        append: bool = False,
        last: bool = False,
        receipt: str | None = None,
    ) -> Moved:
        """Hand over what was made: a whole artifact, or with `append` a piece of one."""
        command = c.AddArtifact(self._agent, _lease_id(lease), artifact, append, last, receipt)
        moved: Moved = await self._engine.run(command)
        return moved

    async def ask(
        self,
        lease: Delivery | str,
        message: Message | str | None = None,
        *,
        asks: Asks | str = Asks.INPUT,
        after: int | None = None,
        receipt: str | None = None,
    ) -> Moved:
        """Wait for the sender: `inputs` brings what it says. With `after`, nothing is asked if the sender has said
        something behind that number already."""
        question = None if message is None else said(message)
        command = c.UpdateTask(self._agent, _lease_id(lease), question, _asks(asks), after, receipt)
        moved: Moved = await self._engine.run(command)
        return moved

    async def inputs(
        self, lease: Delivery | str, after: int = 0, wait_ms: int | None = 0, *, cancel_known: bool = False
    ) -> Inputs:
        """What the sender has said since its first message, behind a number. A wait ends when there is something, or
        when a cancel is asked for that the caller does not know of; `wait_ms` None waits for ever."""
        query = q.ListInputs(self._agent, _lease_id(lease), after)
        return await self._engine.listen(query, _wait(wait_ms), cancel_known)

    async def reject(self, lease: Delivery | str, message: Message | str) -> Moved:
        """Refuse the task, and say why."""
        moved: Moved = await self._engine.run(c.RejectTask(self._agent, _lease_id(lease), said(message)))
        return moved

    async def reply(self, lease: Delivery | str, message: Message | str) -> Moved:
        """A message is the whole answer, and there was no task: only for what came by the A2A protocol. Where a client
        has seen the task already, the message is its last word."""
        moved: Moved = await self._engine.run(c.ReplyDirectly(self._agent, _lease_id(lease), said(message)))
        return moved

    # --- results ------------------------------------------------------------------------------------------

    def send_result(self, result: Result) -> Coroutine[Any, Any, Posted]:
        """Answer a leased task. The same result again gets the same answer."""
        return self._engine.run(c.PostResult(self._agent, result, self._incarnation))

    async def recv_result(self) -> Answer:
        """Wait for the oldest result for this agent, or for anyone."""
        taken: list[Answer] = await self._engine.take(c.DrainResults(self._agent, self._agent))
        return taken[0]

    async def recv_results(self, limit: int, wait_ms: int | None = None) -> list[Answer]:
        return await self._take(c.DrainResults(self._agent, self._agent, limit), limit, wait_ms)

    async def try_recv_result_for(self, peer: AgentId | None = None) -> Answer | None:
        peer = self._myself(peer)
        drained: list[Answer] = await self._engine.run(c.DrainResults(self._agent, peer))
        return drained[0] if drained else None

    async def get_result(self, task_id: str) -> Answer | None:
        """The final result, also after it was drained; None while there is none."""
        answer: Answer | None = await self._engine.ask(q.GetResult(self._agent, task_id))
        return answer

    async def recent_results(self, limit: int = _PAGE) -> list[Answer]:
        results: list[Answer] = await self._engine.ask(q.RecentResults(self._agent, limit))
        return results

    # --- runs ---------------------------------------------------------------------------------------------

    async def commit_run(self, lease: Delivery | str, commit: RunCommit) -> Standing:
        """All that a run did since its last commit, and what it waits for or ends with. Repeated, it is done once."""
        command = c.CommitRun(self._agent, _lease_id(lease), commit, self._incarnation)
        standing: Standing = await self._engine.run(command)
        return standing

    async def load_run(self, lease: Delivery | str, after: int = 0) -> RunLoaded:
        """What a run remembers, for its holder: the first page, or the one behind a step."""
        loaded: RunLoaded = await self._engine.ask(q.LoadRun(self._agent, _lease_id(lease), after))
        return loaded

    async def look_around(self, lease: Delivery | str, wait: Wait, *, every: bool = False) -> Standing:
        """What of this is there, for the holder of a run: the first signal for each pattern, or every one."""
        standing: Standing = await self._engine.ask(q.LookAround(self._agent, _lease_id(lease), wait, every))
        return standing

    async def find_entry(self, lease: Delivery | str, key: str) -> EntryFound | None:
        """The entry that was added under a key, for the holder of a run."""
        found: EntryFound | None = await self._engine.ask(q.FindEntry(self._agent, _lease_id(lease), key))
        return found

    async def resume_run(self, task_id: str, *, dead: str, evidence: Evidence = "lapsed", reason: str) -> Resumed:
        """Take a run from the incarnation of a worker that is dead: silent for long enough, or known to be."""
        command = c.ResumeRun(self._agent, task_id, self._incarnation, dead, evidence, reason)
        resumed: Resumed = await self._engine.run(command)
        return resumed

    async def wake_run(self, task_id: str) -> Moved:
        """Make a run that waits ready to be taken up: for its own agent."""
        moved: Moved = await self._engine.run(c.WakeRun(self._agent, task_id))
        return moved

    async def signal_run(
        self, task_id: str, name: str, value: Any = None, *, key: str | None = None, start: Task | None = None
    ) -> Signaled:
        """Tell a run something. Under the same key it is told once; with `start`, the run begins with it if there is
        none yet. A start that another task would answer, under its idempotency key, is refused (`not_a_run`)."""
        command = c.SignalRun(self._agent, task_id, name, _raw(value, self.limits), key, start)
        signaled: Signaled = await self._engine.run(command)
        return signaled

    async def judge_effect(
        self, task_id: str, effect: str, verdict: Verdict, *, reason: str, value: Any = None
    ) -> Moved:
        """Say what became of an effect that is in doubt: `done` with its value, `failed` with a message, or `retry`."""
        command = c.JudgeEffect(self._agent, task_id, effect, verdict, reason, _raw(value, self.limits))
        moved: Moved = await self._engine.run(command)
        return moved

    async def get_run(self, task_id: str) -> RunSeen:
        run: RunSeen = await self._engine.ask(q.GetRun(self._agent, task_id))
        return run

    async def list_runs(
        self, limit: int = _PAGE, *, status: RunStatus | str | None = None, cursor: str | None = None
    ) -> RunPage:
        """Newest first."""
        wanted = _one_of(RunStatus, status, "status")
        page: RunPage = await self._engine.ask(q.ListRuns(self._agent, limit, wanted, cursor))
        return page

    async def run_entries(
        self,
        task_id: str,
        limit: int = _PAGE,
        *,
        leaf: int | None = None,
        before: int | None = None,
        every: bool = False,
    ) -> EntryPage:
        """The way to a leaf of a run, oldest first; with `every`, its other branches too."""
        page: EntryPage = await self._engine.ask(q.ListEntries(self._agent, task_id, limit, leaf, before, every))
        return page

    # --- agents -------------------------------------------------------------------------------------------

    async def publish_agent(self, card: dict[str, Any] | None = None, agent: AgentId | None = None) -> Card:
        """Let the A2A protocol reach this agent, or for the operator that one; without a card, by a plain one."""
        whose = agent or self.agent
        command = c.PublishCard(self._agent, whose, plain_card(whose) if card is None else card)
        published: Card = await self._engine.run(command)
        return published

    async def withdraw_agent(self, agent: AgentId | None = None) -> None:
        await self._engine.run(c.WithdrawCard(self._agent, agent or self.agent))

    async def get_agent(self, agent: AgentId) -> Card | None:
        """Its card as it was published; None when there is none."""
        check_agent(agent)
        card: Card | None = await self._engine.ask(q.GetCard(self._agent, agent.pubkey))
        return card

    async def list_agents(self, limit: int = _PAGE, *, cursor: str | None = None) -> CardPage:
        """Those that the A2A protocol reaches, in the order in which they were published."""
        page: CardPage = await self._engine.ask(q.ListCards(self._agent, limit, cursor))
        return page

    # --- the operator's -----------------------------------------------------------------------------------

    async def repair_task(self, request: RepairRequest) -> RepairOutcome:
        """Requeue a leased task, or end it with an error."""
        outcome: RepairOutcome = await self._engine.run(c.RepairTask(self._agent, request))
        return outcome

    async def retry_stale(
        self, policy: RetryPolicy | None = None, *, cursor: str | None = None, scheduled: bool = False
    ) -> RetryReport:
        """One pass of the retry gate; it only reports unless the policy is enabled."""
        command = c.RetryStale(self._agent, policy or RetryPolicy(), cursor, scheduled)
        report: RetryReport = await self._engine.run(command)
        return report

    async def cached_results(self, limit: int = _PAGE, *, cursor: str | None = None) -> CachePage:
        page: CachePage = await self._engine.ask(q.ListCached(self._agent, limit, cursor))
        return page

    async def forget_cached(self, entry_id: str, *, reason: str) -> None:
        """Drop a cached result: the next send under its key does the work again."""
        await self._engine.run(c.ForgetCached(self._agent, entry_id, reason))

    async def compact(self, *, older_than_ms: int | None = None) -> Compaction:
        """Let go of resolved tasks past retention, or older than this."""
        self._operator("compacts")
        return await self._engine.compact(c.CompactHistory(self._agent, older_than_ms))

    async def recent_audit(self, limit: int = _PAGE) -> list[AuditRow]:
        """The newest rows, oldest first: what was checked and decided, and what changed."""
        self._operator("reads the audit")
        return await self._engine.audit(check_count(limit, "limit", self.limits.page_max))

    # --- inside -------------------------------------------------------------------------------------------

    async def _take(self, command: c.LeaseTasks | c.DrainResults, limit: int, wait_ms: int | None) -> list[Any]:
        check_batch(limit, self.limits)
        return await self._engine.take(command, _wait(wait_ms))

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
        self._turn = asyncio.Lock()  # one at a time opens it, or closes it
        self._is_open = False

    def __await__(self) -> Any:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> OpenMailbox:
        """What is open already stays as it is: `async with await Mailbox.open(url)` opens it once."""
        async with self._turn:
            if not self._is_open:
                await self._engine.open()
                self._agent = getattr(self._engine, "agent", None)  # a peer's token opens that peer's box
                self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        async with self._turn:
            await self._engine.close()
            self._is_open = False


def _lease_id(lease: Delivery | str) -> str:
    return lease.lease_id if isinstance(lease, Delivery) else lease


def said(what: Message | str, role: Role = "ROLE_AGENT") -> Message:
    """A text is a message of one part."""
    if isinstance(what, str):
        return Message(message_id=str(uuid.uuid4()), role=role, parts=(Part(text=what),))
    return what


def _raw(value: Any, limits: Limits) -> Raw:
    if value is None:
        return NOTHING
    check_json(value, limits)  # an encoder would quietly make null of what JSON does not have
    try:
        return Raw(encode(value))
    except (TypeError, ValueError) as wrong:
        raise Malformed(f"value: {wrong}", field="value") from None


def _asks(asks: Asks | str) -> Asks:
    try:
        return Asks(asks)
    except ValueError:
        raise Malformed("asks is `input` or `auth`", field="asks") from None


def _one_of(kind: type[K], name: K | str | None, field: str) -> K | None:
    try:
        return None if name is None else kind(name)
    except ValueError:
        there_are = ", ".join(f"`{one}`" for one in kind)
        raise Malformed(f"no such {field}: {name}; there are {there_are}", field=field) from None


def _kinds(kinds: Collection[str]) -> frozenset[str]:
    if isinstance(kinds, str) or not all(isinstance(kind, str) for kind in kinds):
        raise Malformed("kinds are names", field="kinds")
    return frozenset(kinds)


def _wait(wait_ms: int | None) -> int | None:
    return None if wait_ms is None else check_count(wait_ms, "wait_ms", _WAIT_MS_MAX)
