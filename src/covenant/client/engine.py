"""A store that lives in a daemon: the same verbs, each a request.

`Mailbox` works over it as over any other. Whose token a request carries is told by the agent that it acts for; a box
that is bound to nobody uses the token that it was opened with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from covenant.client import run
from covenant.client.remote import Tokens
from covenant.client.reply import refusal_of
from covenant.client.unheard import Unheard
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow
from covenant.model.card import Card, CardPage
from covenant.model.error import BadCursor, CovenantError, Malformed, NotPermitted, UnknownPeer, Unreachable
from covenant.model.limits import Limits
from covenant.model.task import Task
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
from covenant.rules.context import Context
from covenant.rules.dialog import MESSAGES_MAX
from covenant.rules.envelope import (
    check_count,
    check_flag,
    check_id,
    seal_artifact,
    seal_message,
    seal_result,
    seal_task,
)
from covenant.serve import wire as w
from covenant.store.clock import RandomIds

_POLL_MS: Final = 20_000  # of one request that waits; the daemon has a bound of its own


class Transport(Protocol):
    """One way to reach a daemon, for any number of peers."""

    async def call(self, token: str, request: w.Request, reply: type[Any]) -> Any:
        """The reply, or the refusal raised. A call that is cancelled takes nothing."""

    def again(self) -> Transport:
        """Another way to the same daemon, which shares nothing with this one: it may live on another event loop."""

    async def close(self) -> None: ...


class RemoteEngine:
    def __init__(self, transport: Transport, token: str, tokens: Tokens | None = None) -> None:
        self.limits = Limits()
        self.agent: AgentId | None = None  # whose token this is, unless it is the operator's
        self.me: AgentId | None = None  # whose token this is
        self.is_closed = False  # by us; a daemon that ends says the same, and comes back
        self._ids = RandomIds()
        self._ctx = Context(0, self._ids, self.limits)
        self._transport = transport
        self._token = token
        self._tokens: Tokens = tokens if tokens is not None else {}
        self._known: dict[str, str] = {}
        self._unheard = Unheard(self._give_back)
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- life ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        try:
            version: w.VersionReply = await self.call(w.Version(), w.VersionReply)
            me: w.WhoamiReply = await self.call(w.Whoami(), w.WhoamiReply)
        except BaseException:
            await self._transport.close()
            raise
        self.limits = self._ctx.limits = version.limits
        self.me = me.agent
        self.agent = None if me.role == "operator" else me.agent

    async def close(self) -> None:
        self._check_loop()
        self.is_closed = True
        try:
            await self._unheard.close()
        finally:
            await self._transport.close()

    async def again(self, agent: AgentId) -> RemoteEngine:
        """The same daemon for this agent, over a connection of its own."""
        engine = RemoteEngine(self._transport.again(), await self._token_of(agent))
        engine.limits = engine._ctx.limits = self.limits
        engine.agent = engine.me = agent
        return engine

    async def call(self, request: w.Request, reply: type[Any], by: AgentId | None = None) -> Any:
        """Any verb of the service, as this agent."""
        self._check_loop()
        return await self._transport.call(await self._token_of(by), request, reply)

    def _check_loop(self) -> None:
        """Connections live on the event loop that made them."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise Malformed("this mailbox was opened on another event loop: open one of its own here", field="loop")

    async def _token_of(self, by: AgentId | None) -> str:
        if by is None or (self.agent is not None and by == self.agent):
            return self._token
        token = self._known.get(by.pubkey)
        if token is None:
            if isinstance(self._tokens, Mapping):
                token = self._tokens.get(by.display)
                if token is None:
                    raise NotPermitted(f"there is no token for {by} here: open the box with tokens={{…}}")
            else:
                token = await self._tokens(by)
            self._known[by.pubkey] = token
        return token

    # --- doing --------------------------------------------------------------------------------------------

    async def run(self, command: c.Command) -> Any:
        handler = _RUN.get(type(command))
        if handler is None:
            raise Malformed(f"{type(command).__name__} is not a verb of a daemon")
        return await handler(self, command)

    async def run_all(self, commands: Sequence[c.Command]) -> list[Any]:
        """Tasks that are wrong in themselves do not go over the wire."""
        replies: list[Any] = []
        for command in commands:
            assert isinstance(command, c.SendTask)
            try:
                replies.append(self.sealed(command))
            except CovenantError as refusal:
                replies.append(refusal)
        tasks = [reply for reply in replies if isinstance(reply, Task)]
        if tasks:
            done: w.TasksQueued = await self.call(w.SendTasks(tasks=tasks), w.TasksQueued, commands[0].by)
            answers = iter(done.items)
            replies = [_sent_or_refused(next(answers)) if isinstance(r, Task) else r for r in replies]
        return replies

    def sealed(self, command: c.SendTask) -> Task:
        """Checked by the rules that the daemon checks by, and with its id: sent twice, it is the same send."""
        return seal_task(command.task, command.by or self.me, self._ctx)

    async def take(self, command: c.LeaseTasks | c.DrainResults, wait_ms: int | None = None) -> list[Any]:
        """One request after the other, each waiting as long as a daemon lets it."""
        check_count(command.limit, "limit", self.limits.batch_max)
        end = None if wait_ms is None else time.monotonic() + wait_ms / 1000
        while True:
            left_ms = _POLL_MS if end is None else max(0, round((end - time.monotonic()) * 1000))
            taken = await self._take_safely(command, min(left_ms, _POLL_MS))
            if taken or left_ms == 0:
                return taken

    async def _take_safely(self, command: c.LeaseTasks | c.DrainResults, wait_ms: int) -> list[Any]:
        """An answer that was lost on its way is made up for once; then the caller hears of it."""
        ask = partial(self._take_once, command, wait_ms)
        try:
            return await self._unheard.take(self._ids.lease(), command.by, ask)
        except Unreachable:
            return await self._unheard.take(self._ids.lease(), command.by, ask)

    async def _give_back(self, receipt: str, by: AgentId | None) -> None:
        await self.call(w.GiveBack(receipt=receipt), w.GivenBack, by)

    async def _take_once(self, command: c.LeaseTasks | c.DrainResults, wait_ms: int, receipt: str) -> list[Any]:
        if isinstance(command, c.LeaseTasks):
            lease = w.RecvTasks(
                limit=command.limit,
                wait_ms=wait_ms,
                incarnation=command.incarnation,
                recipient=_whom(command.by, command.recipient),
                receipt=receipt,
                kinds=command.kinds,
            )
            got: w.Deliveries = await self.call(lease, w.Deliveries, command.by)
            return [Delivery(d.task, d.lease_id, d.attempt, d.generation) for d in got.deliveries]
        drain = w.RecvResults(
            limit=command.limit, wait_ms=wait_ms, peer=_whom(command.by, command.peer), receipt=receipt
        )
        results: w.Results = await self.call(drain, w.Results, command.by)
        return _answers(results)

    async def compact(self, command: c.CompactHistory) -> Compaction:
        done: w.Compacted = await self.call(w.Compact(older_than_ms=command.older_than_ms), w.Compacted, command.by)
        return Compaction(done.dropped, done.tombstones_dropped, done.segments_dropped, done.bytes_freed)

    # --- asking -------------------------------------------------------------------------------------------

    async def ask(self, query: q.Query) -> Any:
        return await _ASK[type(query)](self, query)

    async def watch(self, query: q.GetTask, after: int, wait_ms: int | None = None) -> QueueEntry:
        """A wait is over when the generation is higher, the task has ended, or a cancel is asked for meanwhile."""
        entry: QueueEntry = await self.ask(query)
        asked = entry.cancel_requested
        end = None if wait_ms is None else time.monotonic() + wait_ms / 1000
        while entry.generation <= after and entry.outcome is None and entry.cancel_requested == asked:
            left_ms = _POLL_MS if end is None else max(0, round((end - time.monotonic()) * 1000))
            if left_ms == 0:
                break
            request = w.GetTask(
                task_id=query.task_id,
                current_generation=after,
                wait_ms=min(left_ms, _POLL_MS),
                cancel_known=asked,
            )
            reply: w.TaskReply = await self.call(request, w.TaskReply, query.by)
            entry = reply.entry
        return entry

    async def listen(self, query: q.ListInputs, wait_ms: int | None = None, cancel_known: bool = False) -> Inputs:
        end = None if wait_ms is None else time.monotonic() + wait_ms / 1000
        while True:
            left_ms = _POLL_MS if end is None else max(0, round((end - time.monotonic()) * 1000))
            request = w.ListInputs(
                lease_id=check_id(query.lease_id, "lease_id"),
                after=check_count(query.after, "after", MESSAGES_MAX),
                wait_ms=min(left_ms, _POLL_MS),
                cancel_known=cancel_known,
            )
            got: w.InputsReply = await self.call(request, w.InputsReply, query.by)
            if got.inputs or got.cancel_requested != cancel_known or left_ms == 0:
                return Inputs(got.task_id, got.generation, got.inputs, got.cancel_requested, got.cancel_reason)

    def page(self, limit: int) -> int:
        return check_count(limit, "limit", self.limits.page_max)

    def cursor(self, cursor: str | None) -> str | None:
        if cursor is not None and type(cursor) is not str:
            raise BadCursor("a cursor is text")
        return cursor

    async def audit(self, limit: int) -> list[AuditRow]:
        reply: w.AuditReply = await self.call(w.RecentAudit(limit=limit), w.AuditReply)
        return list(reversed(reply.rows[:limit]))


def _whom(by: AgentId | None, agent: AgentId | None) -> str | None:
    """Only the operator says for whom; and not even that when it receives for all."""
    if by is not None:
        return None
    return "*" if agent is None else agent.pubkey


def _sent_or_refused(item: w.BatchItem) -> Sent | CovenantError:
    if item.error is not None:
        return refusal_of(item.error.code, item.error.message, item.error.details)
    assert item.sent is not None
    return _sent(item.sent)


def _sent(reply: w.TaskQueued) -> Sent:
    return Sent(reply.task_id, reply.generation, reply.duplicate, reply.replayed, reply.follows)


def _answers(results: w.Results) -> list[Answer]:
    return [
        Answer(result, beside.generation, beside.attempt, beside.replayed)
        for result, beside in zip(results.results, results.beside, strict=True)
    ]


# --- one function for each command and query -----------------------------------------------------------------


async def _send(x: RemoteEngine, command: c.SendTask) -> Sent:
    return _sent(await x.call(w.SendTask(task=x.sealed(command)), w.TaskQueued, command.by))


async def _post(x: RemoteEngine, command: c.PostResult) -> Posted:
    request = w.PostResult(result=seal_result(command.result, x.limits), incarnation=command.incarnation)
    done: w.ResultPosted = await x.call(request, w.ResultPosted, command.by)
    return Posted(done.task_id, done.generation, done.duplicate, done.sequence)


async def _lease(x: RemoteEngine, command: c.LeaseTasks) -> list[Delivery]:
    return await x.take(command, 0)


async def _drain(x: RemoteEngine, command: c.DrainResults) -> list[Answer]:
    return await x.take(command, 0)


async def _beat(x: RemoteEngine, command: c.BeatLease) -> LeaseStatus:
    r: w.LeaseBeat = await x.call(w.Heartbeat(lease_id=check_id(command.lease_id, "lease_id")), w.LeaseBeat, command.by)
    return LeaseStatus(r.task_id, r.lease_id, r.attempt, r.cancel_requested, r.cancel_reason)


async def _release(x: RemoteEngine, command: c.ReleaseLease) -> Released:
    request = w.Release(
        lease_id=check_id(command.lease_id, "lease_id"), reason=command.reason, not_before_ms=command.not_before_ms
    )
    done: w.ReleasedReply = await x.call(request, w.ReleasedReply, command.by)
    return Released(done.task_id, done.attempt, done.generation)


async def _add_message(x: RemoteEngine, command: c.AddMessage) -> Moved:
    request = w.AddMessage(
        task_id=check_id(command.task_id, "task_id"),
        message=seal_message(command.message, x.limits),
        if_generation=command.if_generation,
    )
    return _moved(await x.call(request, w.MovedReply, command.by))


def _moved(done: w.MovedReply) -> Moved:
    return Moved(done.task_id, done.generation)


async def _update(x: RemoteEngine, command: c.UpdateTask) -> Moved:
    lease_id = check_id(command.lease_id, "lease_id")
    message = None if command.message is None else seal_message(command.message, x.limits)
    request: w.Request
    if command.asks is None:
        request = w.Update(lease_id=lease_id, message=message, receipt=command.receipt)
    else:
        request = w.Ask(
            lease_id=lease_id, asks=command.asks, message=message, after=command.after, receipt=command.receipt
        )
    return _moved(await x.call(request, w.MovedReply, command.by))


async def _add_artifact(x: RemoteEngine, command: c.AddArtifact) -> Moved:
    check_flag(command.append, "append")
    check_flag(command.last, "last")
    request = w.AddArtifact(
        lease_id=check_id(command.lease_id, "lease_id"),
        artifact=seal_artifact(command.artifact, x.limits),
        append=command.append,
        last=command.last,
        receipt=command.receipt,
    )
    return _moved(await x.call(request, w.MovedReply, command.by))


async def _reject(x: RemoteEngine, command: c.RejectTask) -> Moved:
    lease_id, message = check_id(command.lease_id, "lease_id"), seal_message(command.message, x.limits)
    return _moved(await x.call(w.Reject(lease_id=lease_id, message=message), w.MovedReply, command.by))


async def _reply(x: RemoteEngine, command: c.ReplyDirectly) -> Moved:
    lease_id, message = check_id(command.lease_id, "lease_id"), seal_message(command.message, x.limits)
    return _moved(await x.call(w.ReplyDirectly(lease_id=lease_id, message=message), w.MovedReply, command.by))


async def _publish(x: RemoteEngine, command: c.PublishCard) -> Card:
    done: w.AgentReply = await x.call(
        w.PublishAgent(name=command.agent.pubkey, card=command.card), w.AgentReply, command.by
    )
    return _card(done.published)


def _card(published: w.Published) -> Card:
    return Card(published.agent, published.card, published.published_ms)


async def _withdraw(x: RemoteEngine, command: c.WithdrawCard) -> None:
    await x.call(w.WithdrawAgent(name=command.agent.pubkey), w.AgentWithdrawn, command.by)


async def _cancel(x: RemoteEngine, command: c.CancelTask) -> Canceled:
    request = w.Cancel(
        task_id=check_id(command.task_id, "task_id"),
        reason=command.reason,
        graceful=command.graceful,
        cascade=command.cascade,
    )
    done: w.CanceledReply = await x.call(request, w.CanceledReply, command.by)
    return Canceled(done.task_id, done.state, done.generation)


async def _repair(x: RemoteEngine, command: c.RepairTask) -> Any:
    done: w.Repaired = await x.call(w.Repair(request=command.request), w.Repaired, command.by)
    return done.outcome


async def _retry(x: RemoteEngine, command: c.RetryStale) -> Any:
    request = w.RetryStale(policy=command.policy, cursor=x.cursor(command.cursor), scheduled=command.scheduled)
    done: w.AutoRetried = await x.call(request, w.AutoRetried, command.by)
    return done.report


async def _forget(x: RemoteEngine, command: c.ForgetCached) -> bool:
    await x.call(w.ForgetCached(entry_id=command.slot, reason=command.reason), w.Forgotten, command.by)
    return True


_RUN: Final[dict[type, Callable[[RemoteEngine, Any], Awaitable[Any]]]] = {
    c.SendTask: _send,
    c.PostResult: _post,
    c.LeaseTasks: _lease,
    c.DrainResults: _drain,
    c.BeatLease: _beat,
    c.ReleaseLease: _release,
    c.AddMessage: _add_message,
    c.UpdateTask: _update,
    c.AddArtifact: _add_artifact,
    c.RejectTask: _reject,
    c.ReplyDirectly: _reply,
    c.PublishCard: _publish,
    c.WithdrawCard: _withdraw,
    c.CancelTask: _cancel,
    c.RepairTask: _repair,
    c.RetryStale: _retry,
    c.ForgetCached: _forget,
    **run.RUN,
}


async def _get_task(x: RemoteEngine, query: q.GetTask) -> QueueEntry:
    reply: w.TaskReply = await x.call(w.GetTask(task_id=check_id(query.task_id, "task_id")), w.TaskReply, query.by)
    return reply.entry


async def _get_result(x: RemoteEngine, query: q.GetResult) -> Answer | None:
    r: w.ResultOpt = await x.call(w.GetResult(task_id=check_id(query.task_id, "task_id")), w.ResultOpt, query.by)
    if r.result is None:
        return None
    return Answer(r.result, r.generation or 0, r.attempt or 0, r.replayed)


async def _get_tree(x: RemoteEngine, query: q.GetTree) -> Tree:
    reply: w.TreeReply = await x.call(w.GetTree(task_id=check_id(query.root, "root")), w.TreeReply, query.by)
    return Tree(reply.root, reply.size, reply.truncated)


async def _recent_tasks(x: RemoteEngine, query: q.RecentTasks) -> Any:
    reply: w.Tasks = await x.call(w.RecentTasks(limit=x.page(query.limit)), w.Tasks, query.by)
    return reply.tasks


async def _recent_results(x: RemoteEngine, query: q.RecentResults) -> list[Answer]:
    return _answers(await x.call(w.RecentResults(limit=x.page(query.limit)), w.Results, query.by))


async def _queue(x: RemoteEngine, query: q.ListQueue) -> QueuePage:
    request = w.Queue(
        limit=x.page(query.limit),
        min_lease_age_ms=query.min_lease_age_ms,
        deadline_within_ms=query.deadline_within_ms,
        state=query.state,
        cursor=x.cursor(query.cursor),
    )
    page: w.QueueReply = await x.call(request, w.QueueReply, query.by)
    answers = _answers(w.Results(results=page.results, beside=page.beside))
    return QueuePage(page.tasks, answers, page.cursor)


async def _cached(x: RemoteEngine, query: q.ListCached) -> CachePage:
    reply: w.CacheReply = await x.call(
        w.ListCache(limit=x.page(query.limit), cursor=x.cursor(query.cursor)), w.CacheReply, query.by
    )
    return CachePage(reply.entries, reply.cursor)


async def _get_card(x: RemoteEngine, query: q.GetCard) -> Card | None:
    try:
        found: w.AgentReply = await x.call(w.GetAgent(name=query.pubkey), w.AgentReply, query.by)
    except UnknownPeer:
        return None
    return _card(found.published)


async def _cards(x: RemoteEngine, query: q.ListCards) -> CardPage:
    request = w.ListAgents(limit=x.page(query.limit), cursor=x.cursor(query.cursor))
    page: w.Agents = await x.call(request, w.Agents, query.by)
    return CardPage([_card(one) for one in page.agents], page.cursor)


_ASK: Final[dict[type, Callable[[RemoteEngine, Any], Awaitable[Any]]]] = {
    q.GetTask: _get_task,
    q.GetResult: _get_result,
    q.GetTree: _get_tree,
    q.RecentTasks: _recent_tasks,
    q.RecentResults: _recent_results,
    q.ListQueue: _queue,
    q.ListCached: _cached,
    q.GetCard: _get_card,
    q.ListCards: _cards,
    **run.ASK,
}
