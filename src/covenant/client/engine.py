"""A store that lives in a daemon: the same verbs, each a request.

`Mailbox` works over it as over any other. Whose token a request carries is told by the agent that it acts for; a box
that is bound to nobody uses the token that it was opened with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from covenant.client.polls import polls
from covenant.client.remote import Tokens, without_ends
from covenant.client.transport import Transport
from covenant.client.unheard import Unheard
from covenant.client.verbs.results import answers
from covenant.client.verbs.table import ASK, RUN
from covenant.client.verbs.tasks import sent_or_refused
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow
from covenant.model.error import BadCursor, CovenantError, Malformed, NotPermitted, Unreachable
from covenant.model.limits import Limits
from covenant.model.task import Task
from covenant.model.view import (
    Compaction,
    Delivery,
    Inputs,
    QueueEntry,
)
from covenant.rules.context import Context
from covenant.rules.dialog import MESSAGES_MAX
from covenant.rules.envelope import (
    check_count,
    check_id,
    seal_task,
)
from covenant.rules.wait import has_come, has_moved
from covenant.serve import wire as w
from covenant.store.clock import RandomIds
from covenant.store.loop import check_home


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
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        check_home(self._loop)

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
            token = self._known[by.pubkey] = without_ends(token)
        return token

    # --- doing --------------------------------------------------------------------------------------------

    async def run(self, command: c.Command) -> Any:
        handler = RUN.get(type(command))
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
            replies = [sent_or_refused(next(answers)) if isinstance(r, Task) else r for r in replies]
        return replies

    def sealed(self, command: c.SendTask) -> Task:
        """Checked by the rules that the daemon checks by, and with its id: sent twice, it is the same send."""
        return seal_task(command.task, command.by or self.me, self._ctx)

    async def take(self, command: c.LeaseTasks | c.DrainResults, wait_ms: int | None = None) -> list[Any]:
        """One request after the other, each waiting as long as a daemon lets it."""
        check_count(command.limit, "limit", self.limits.batch_max)
        for poll_ms in polls(wait_ms):
            taken = await self._take_safely(command, poll_ms)
            if taken:
                return taken
        return []

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
        return answers(results)

    async def compact(self, command: c.CompactHistory) -> Compaction:
        done: w.Compacted = await self.call(w.Compact(older_than_ms=command.older_than_ms), w.Compacted, command.by)
        return Compaction(done.dropped, done.tombstones_dropped, done.segments_dropped, done.bytes_freed)

    # --- asking -------------------------------------------------------------------------------------------

    async def ask(self, query: q.Query) -> Any:
        return await ASK[type(query)](self, query)

    async def watch(self, query: q.GetTask, after: int, wait_ms: int | None = None) -> QueueEntry:
        entry: QueueEntry = await self.ask(query)
        asked = entry.cancel_requested
        for poll_ms in polls(wait_ms):
            if poll_ms == 0 or has_moved(entry, after, asked):
                break
            request = w.GetTask(
                task_id=query.task_id,
                current_generation=after,
                wait_ms=poll_ms,
                cancel_known=asked,
            )
            reply: w.TaskReply = await self.call(request, w.TaskReply, query.by)
            entry = reply.entry
        return entry

    async def listen(self, query: q.ListInputs, wait_ms: int | None = None, cancel_known: bool = False) -> Inputs:
        for poll_ms in polls(wait_ms):
            request = w.ListInputs(
                lease_id=check_id(query.lease_id, "lease_id"),
                after=check_count(query.after, "after", MESSAGES_MAX),
                wait_ms=poll_ms,
                cancel_known=cancel_known,
            )
            got: w.InputsReply = await self.call(request, w.InputsReply, query.by)
            heard = Inputs(got.task_id, got.generation, got.inputs, got.cancel_requested, got.cancel_reason)
            if has_come(heard, cancel_known):
                break
        return heard

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
