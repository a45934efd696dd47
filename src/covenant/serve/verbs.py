"""What each request does: one function for each, the same for every surface."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias, TypeVar

from covenant.exchange.exchange import Exchange
from covenant.exchange.history import recent_rows
from covenant.exchange.history import story as story_of
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.audit import AuditRow
from covenant.model.card import Card, CardPage
from covenant.model.error import CovenantError, Malformed, NotARun, UnknownPeer
from covenant.model.message import Message, Part, Role
from covenant.model.peer import Caller
from covenant.model.repair import RetryReport
from covenant.model.run import EntryPage, Resumed, RunPage, RunSeen, Signaled
from covenant.model.view import (
    Answer,
    CachePage,
    Canceled,
    Delivery,
    LeaseStatus,
    Moved,
    Posted,
    QueueEntry,
    QueuePage,
    Released,
    Sent,
)
from covenant.rules.card import plain_card
from covenant.rules.envelope import check_count
from covenant.rules.grant import check_action, demand_for
from covenant.serve import wire as w
from covenant.serve.why import reason_of
from covenant.version import VERSION

_SIGNED_MAX: Final = 2**53 - 1  # a grant is signed as canonical JSON, which has no larger number

T = TypeVar("T")
Handler: TypeAlias = Callable[[Exchange, Caller, Any], Coroutine[Any, Any, w.Reply]]


# --- tasks -------------------------------------------------------------------------------------------------


async def send_task(x: Exchange, caller: Caller, r: w.SendTask) -> w.TaskQueued:
    return _queued(await x.run(caller, x.send(caller, r.task)))


def _queued(sent: Sent) -> w.TaskQueued:
    return w.TaskQueued(
        task_id=sent.task_id,
        generation=sent.generation,
        duplicate=sent.duplicate,
        replayed=sent.replayed,
        follows=sent.follows,
    )


async def send_tasks(x: Exchange, caller: Caller, r: w.SendTasks) -> w.TasksQueued:
    check_count(len(r.tasks), "tasks", x.store.limits.batch_max)
    replies = await x.run_all(caller, [x.send(caller, task) for task in r.tasks])
    return w.TasksQueued(items=[_item(reply) for reply in replies])


def _item(reply: Sent | CovenantError) -> w.BatchItem:
    if isinstance(reply, CovenantError):
        return w.BatchItem(error=w.Failure(reply.code, reply.message, reply.details))
    return w.BatchItem(sent=_queued(reply))


async def recv_task(x: Exchange, caller: Caller, r: w.RecvTask) -> w.TaskOpt:
    lease = x.lease(caller, r.recipient, r.incarnation)
    taken = _of_kind(Delivery, await x.take(caller, lease, _wait(r.wait_ms), r.receipt))
    if not taken:
        return w.TaskOpt()
    d = taken[0]
    return w.TaskOpt(task=d.task, lease_id=d.lease_id, attempt=d.attempt, generation=d.generation)


def _of_kind(kind: type[T], taken: list[Any]) -> list[T]:
    """Under a receipt there may be what another sort of receive has taken."""
    if taken and not isinstance(taken[0], kind):
        raise Malformed("this receipt is of another receive", field="receipt")
    return taken


def _wait(wait_ms: int) -> int:
    return check_count(wait_ms, "wait_ms", 2**31)


async def recv_tasks(x: Exchange, caller: Caller, r: w.RecvTasks) -> w.Deliveries:
    limit = _batch(x, r.limit)
    lease = x.lease(caller, r.recipient, r.incarnation, limit, r.kinds)
    taken = _of_kind(Delivery, await x.take(caller, lease, _wait(r.wait_ms), r.receipt))
    return w.Deliveries(deliveries=[w.Delivered(d.task, d.lease_id, d.attempt, d.generation) for d in taken])


def _batch(x: Exchange, limit: int) -> int:
    if check_count(limit, "limit", x.store.limits.batch_max) < 1:
        raise Malformed("limit is a number from 1", field="limit")
    return limit


async def recent_tasks(x: Exchange, caller: Caller, r: w.RecentTasks) -> w.Tasks:
    return w.Tasks(tasks=await x.ask(caller, q.RecentTasks(x.by(caller), r.limit)))


async def get_task(x: Exchange, caller: Caller, r: w.GetTask) -> w.TaskReply:
    if r.current_generation is None:
        return w.TaskReply(entry=await x.ask(caller, q.GetTask(x.by(caller), r.task_id)))
    wait_ms = _wait(r.wait_ms)
    return w.TaskReply(entry=await x.watch(caller, r.task_id, r.current_generation, wait_ms, r.cancel_known))


async def get_tree(x: Exchange, caller: Caller, r: w.GetTree) -> w.TreeReply:
    tree = await x.ask(caller, q.GetTree(x.by(caller), r.task_id))
    return w.TreeReply(root=tree.root, size=tree.size, truncated=tree.truncated)


async def queue(x: Exchange, caller: Caller, r: w.Queue) -> w.QueueReply:
    page: QueuePage = await x.ask(
        caller,
        q.ListQueue(x.by(caller), r.limit, r.state, r.min_lease_age_ms, r.deadline_within_ms, r.cursor),
    )
    results = [answer.result for answer in page.results]
    return w.QueueReply(
        tasks=page.tasks, results=results, beside=[w.beside(answer) for answer in page.results], cursor=page.cursor
    )


async def cancel(x: Exchange, caller: Caller, r: w.Cancel) -> w.CanceledReply:
    canceled: Canceled = await x.run(caller, c.CancelTask(x.by(caller), r.task_id, r.reason, r.graceful, r.cascade))
    return w.CanceledReply(task_id=canceled.task_id, state=canceled.state, generation=canceled.generation)


async def heartbeat(x: Exchange, caller: Caller, r: w.Heartbeat) -> w.LeaseBeat:
    status: LeaseStatus = await x.run(caller, c.BeatLease(x.by(caller), r.lease_id))
    return w.LeaseBeat(
        task_id=status.task_id,
        lease_id=status.lease_id,
        attempt=status.attempt,
        cancel_requested=status.cancel_requested,
        cancel_reason=status.cancel_reason,
    )


async def release(x: Exchange, caller: Caller, r: w.Release) -> w.ReleasedReply:
    released: Released = await x.run(caller, c.ReleaseLease(x.by(caller), r.lease_id, r.reason, r.not_before_ms))
    return w.ReleasedReply(task_id=released.task_id, attempt=released.attempt, generation=released.generation)


# --- the dialog --------------------------------------------------------------------------------------------


async def add_message(x: Exchange, caller: Caller, r: w.AddMessage) -> w.MovedReply:
    message = _message(x, r.message, r.text, "ROLE_USER")
    return _moved(await x.run(caller, c.AddMessage(x.by(caller), r.task_id, message, r.if_generation)))


async def update(x: Exchange, caller: Caller, r: w.Update) -> w.MovedReply:
    message = _message(x, r.message, r.text)
    return _moved(await x.run(caller, c.UpdateTask(x.by(caller), r.lease_id, message, receipt=r.receipt)))


async def ask(x: Exchange, caller: Caller, r: w.Ask) -> w.MovedReply:
    message = None if r.message is None and r.text is None else _message(x, r.message, r.text)
    return _moved(await x.run(caller, c.UpdateTask(x.by(caller), r.lease_id, message, r.asks, r.after, r.receipt)))


async def add_artifact(x: Exchange, caller: Caller, r: w.AddArtifact) -> w.MovedReply:
    command = c.AddArtifact(x.by(caller), r.lease_id, r.artifact, r.append, r.last, r.receipt)
    return _moved(await x.run(caller, command))


async def reject(x: Exchange, caller: Caller, r: w.Reject) -> w.MovedReply:
    return _moved(await x.run(caller, c.RejectTask(x.by(caller), r.lease_id, _message(x, r.message, r.text))))


async def reply_directly(x: Exchange, caller: Caller, r: w.ReplyDirectly) -> w.MovedReply:
    return _moved(await x.run(caller, c.ReplyDirectly(x.by(caller), r.lease_id, _message(x, r.message, r.text))))


def _message(x: Exchange, message: Message | None, text: str | None, role: Role = "ROLE_AGENT") -> Message:
    if (message is None) == (text is None):
        raise Malformed("one of message and text is needed", field="message")
    if message is not None:
        return message
    return Message(message_id=x.store.context.ids.lease(), role=role, parts=(Part(text=text),))


def _moved(moved: Moved) -> w.MovedReply:
    return w.MovedReply(task_id=moved.task_id, generation=moved.generation)


async def list_inputs(x: Exchange, caller: Caller, r: w.ListInputs) -> w.InputsReply:
    heard = await x.listen(caller, r.lease_id, r.after, _wait(r.wait_ms), r.cancel_known)
    return w.InputsReply(
        task_id=heard.task_id,
        generation=heard.generation,
        inputs=heard.inputs,
        cancel_requested=heard.cancel_requested,
        cancel_reason=heard.cancel_reason,
    )


# --- runs --------------------------------------------------------------------------------------------------


async def commit_run(x: Exchange, caller: Caller, r: w.CommitRun) -> w.StandingReply:
    return w.StandingReply(standing=await x.run(caller, x.commit_run(caller, r.lease_id, r.commit, r.incarnation)))


async def load_run(x: Exchange, caller: Caller, r: w.LoadRun) -> w.RunLoadedReply:
    return w.RunLoadedReply(loaded=await x.ask(caller, q.LoadRun(x.by(caller), r.lease_id, r.after)))


async def look_around(x: Exchange, caller: Caller, r: w.LookAround) -> w.StandingReply:
    return w.StandingReply(standing=await x.ask(caller, q.LookAround(x.by(caller), r.lease_id, r.wait, r.every)))


async def find_entry(x: Exchange, caller: Caller, r: w.FindEntry) -> w.EntryReply:
    return w.EntryReply(entry=await x.ask(caller, q.FindEntry(x.by(caller), r.lease_id, r.key)))


async def list_runs(x: Exchange, caller: Caller, r: w.ListRuns) -> w.Runs:
    page: RunPage = await x.ask(caller, q.ListRuns(x.by(caller), r.limit, r.status, r.cursor))
    return w.Runs(runs=list(page.runs), cursor=page.cursor)


async def get_run(x: Exchange, caller: Caller, r: w.GetRun) -> w.RunReply:
    return w.RunReply(run=await x.ask(caller, q.GetRun(x.by(caller), r.task_id)))


async def run_entries(x: Exchange, caller: Caller, r: w.RunEntries) -> w.Entries:
    query = q.ListEntries(x.by(caller), r.task_id, r.limit, r.leaf, r.before, r.every)
    page: EntryPage = await x.ask(caller, query)
    return w.Entries(entries=list(page.entries), before=page.before)


async def signal_run(x: Exchange, caller: Caller, r: w.SignalRun) -> w.SignaledReply:
    command = c.SignalRun(x.by(caller), r.task_id, r.name, r.value, r.key, r.start)
    done: Signaled = await x.run(caller, command)
    return w.SignaledReply(
        task_id=done.task_id,
        signal_id=done.signal_id,
        generation=done.generation,
        duplicate=done.duplicate,
        started=done.started,
    )


async def wake_run(x: Exchange, caller: Caller, r: w.WakeRun) -> w.MovedReply:
    return _moved(await x.run(caller, c.WakeRun(x.by(caller), r.task_id)))


async def resume_run(x: Exchange, caller: Caller, r: w.ResumeRun) -> w.ResumedReply:
    command = c.ResumeRun(x.by(caller), r.task_id, r.incarnation, r.dead, r.evidence, r.reason)
    done: Resumed = await x.run(caller, command)
    return w.ResumedReply(
        task=done.task,
        attempt=done.attempt,
        generation=done.generation,
        lease_id=done.lease_id or None,
        requeued=list(done.requeued),
    )


async def judge_effect(x: Exchange, caller: Caller, r: w.JudgeEffect) -> w.MovedReply:
    command = c.JudgeEffect(x.by(caller), r.task_id, r.effect, r.verdict, r.reason, r.value)
    return _moved(await x.run(caller, command))


# --- results -----------------------------------------------------------------------------------------------


async def post_result(x: Exchange, caller: Caller, r: w.PostResult) -> w.ResultPosted:
    posted: Posted = await x.run(caller, x.post(caller, r.result, r.incarnation))
    return w.ResultPosted(
        task_id=posted.task_id, generation=posted.generation, duplicate=posted.duplicate, sequence=posted.sequence
    )


async def recv_result(x: Exchange, caller: Caller, r: w.RecvResult) -> w.ResultOpt:
    found = await x.take(caller, x.drain_results(caller, r.peer), _wait(r.wait_ms), r.receipt)
    taken = _of_kind(Answer, found)
    return _result(taken[0] if taken else None)


def _result(answer: Answer | None) -> w.ResultOpt:
    if answer is None:
        return w.ResultOpt()
    return w.ResultOpt(
        result=answer.result, generation=answer.generation, attempt=answer.attempt, replayed=answer.replayed
    )


async def recv_results(x: Exchange, caller: Caller, r: w.RecvResults) -> w.Results:
    limit = _batch(x, r.limit)
    found = await x.take(caller, x.drain_results(caller, r.peer, limit), _wait(r.wait_ms), r.receipt)
    return _results(_of_kind(Answer, found))


async def give_back(x: Exchange, caller: Caller, r: w.GiveBack) -> w.GivenBack:
    return w.GivenBack(receipt=r.receipt, count=await x.give_back(caller, r.receipt))


def _results(answers: list[Answer]) -> w.Results:
    return w.Results(results=[answer.result for answer in answers], beside=[w.beside(answer) for answer in answers])


async def recent_results(x: Exchange, caller: Caller, r: w.RecentResults) -> w.Results:
    return _results(await x.ask(caller, q.RecentResults(x.by(caller), r.limit)))


async def get_result(x: Exchange, caller: Caller, r: w.GetResult) -> w.ResultOpt:
    return _result(await x.ask(caller, q.GetResult(x.by(caller), r.task_id)))


# --- the operator's ----------------------------------------------------------------------------------------


async def repair(x: Exchange, caller: Caller, r: w.Repair) -> w.Repaired:
    return w.Repaired(outcome=await x.run(caller, c.RepairTask(x.by(caller), r.request)))


async def retry_stale(x: Exchange, caller: Caller, r: w.RetryStale) -> w.AutoRetried:
    report: RetryReport = await x.run(caller, c.RetryStale(x.by(caller), r.policy, r.cursor, r.scheduled))
    return w.AutoRetried(report=report)


async def list_cache(x: Exchange, caller: Caller, r: w.ListCache) -> w.CacheReply:
    page: CachePage = await x.ask(caller, q.ListCached(x.by(caller), r.limit, r.cursor))
    return w.CacheReply(entries=page.entries, cursor=page.cursor)


async def forget_cached(x: Exchange, caller: Caller, r: w.ForgetCached) -> w.Forgotten:
    await x.run(caller, c.ForgetCached(x.by(caller), r.entry_id, r.reason))
    return w.Forgotten(entry_id=r.entry_id)


async def compact(x: Exchange, caller: Caller, r: w.Compact) -> w.Compacted:
    done = await x.compact(caller, r.older_than_ms)
    return w.Compacted(
        dropped=done.tasks_dropped,
        tombstones_dropped=done.tombstones_dropped,
        segments_dropped=done.segments_dropped,
        bytes_freed=done.bytes_freed,
    )


async def story(x: Exchange, caller: Caller, r: w.Story) -> w.StoryReply:
    entry, rows, complete = await story_of(x, caller, r.task_id)
    run = await _open_run(x, caller, entry)
    why = reason_of(entry, run=run)
    return w.StoryReply(
        entry=entry,
        rows=rows,
        reason=why.reason,
        explanation=why.explanation,
        command=why.command,
        complete=complete,
        run=run,
    )


async def _open_run(x: Exchange, caller: Caller, entry: QueueEntry) -> RunSeen | None:
    if entry.outcome is not None or not entry.attempt:
        return None
    try:
        run: RunSeen = await x.ask(caller, q.GetRun(x.by(caller), entry.task.id))
    except NotARun:
        return None
    return run


# --- peers, grants, audit ----------------------------------------------------------------------------------


async def enroll_peer(x: Exchange, caller: Caller, r: w.EnrollPeer) -> w.PeerEnrolled:
    peer, token = await x.enroll(caller, r.display, r.pubkey, r.grants)
    return w.PeerEnrolled(display=peer.display, pubkey=peer.pubkey, token=token, granted=r.grants)


async def list_peers(x: Exchange, caller: Caller, r: w.ListPeers) -> w.Peers:
    await x.require(caller, "peers.list")
    page = await x.ask(caller, q.ListPeers(x.by(caller), r.limit, r.cursor))
    return w.Peers(peers=page.peers, cursor=page.cursor)


async def revoke_peer(x: Exchange, caller: Caller, r: w.RevokePeer) -> w.PeerRevoked:
    peer = await x.trust.revoke_peer(caller, r.peer, r.reason)
    return w.PeerRevoked(display=peer.display, pubkey=peer.pubkey)


async def rotate_token(x: Exchange, caller: Caller, r: w.RotateToken) -> w.TokenRotated:
    peer, token = await x.trust.rotate(caller, r.peer)
    return w.TokenRotated(display=peer.display, pubkey=peer.pubkey, token=token)


async def grant(x: Exchange, caller: Caller, r: w.Grant) -> w.Granted:
    numbers = {"expires_ms": r.expires_ms, "max_uses": r.scope.max_uses, "version": r.scope.version}
    for name, number in numbers.items():
        check_count(number or 0, name, _SIGNED_MAX)
    granted = await x.trust.grant(caller, r.subject, r.action, r.scope, r.expires_ms, r.delegable, r.parent)
    return w.Granted(capability=granted)


async def revoke(x: Exchange, caller: Caller, r: w.Revoke) -> w.Revoked:
    return w.Revoked(capability=await x.run(caller, c.RevokeCapability(x.by(caller), r.grant_id, r.reason)))


async def list_grants(x: Exchange, caller: Caller, r: w.ListGrants) -> w.Grants:
    subject = None if r.subject is None else x.key_of(r.subject)
    if subject != caller.agent.pubkey and (subject is not None or await x.may(caller, "capabilities.list")):
        await x.require(caller, "capabilities.list")
    page = await x.ask(caller, q.ListGrants(x.by(caller), r.limit, subject, r.cursor))
    return w.Grants(capabilities=page.capabilities, cursor=page.cursor)


async def check(x: Exchange, caller: Caller, r: w.Check) -> w.Checked:
    check_action(r.action)
    if r.subject is not None and x.key_of(r.subject) != caller.agent.pubkey:
        await x.require(caller, "capabilities.list")
    subject = caller.agent if r.subject is None else x.agent(r.subject)
    other = None if r.counterparty is None else x.named(r.counterparty)
    demand = demand_for(
        r.action, "check", other, task_id=r.task_id, lease_id=r.lease_id, duplicate_risk=r.duplicate_risk
    )
    grant_id, held = await x.check(caller, subject, demand)
    if grant_id is not None and r.counterparty is not None:
        x.agent(r.counterparty)  # it reaches that name, and may know whether anybody has it
    reason = None if grant_id is not None else "scope_mismatch" if held else "missing_capability"
    return w.Checked(
        action=r.action, subject=subject.display, passed=grant_id is not None, grant=grant_id, reason=reason
    )


async def publish_agent(x: Exchange, caller: Caller, r: w.PublishAgent) -> w.AgentReply:
    agent = caller.agent if r.name is None else x.meant(caller, r.name)
    card = plain_card(agent) if r.card is None else r.card
    return w.AgentReply(published=_published(await x.run(caller, c.PublishCard(x.by(caller), agent, card))))


def _published(card: Card) -> w.Published:
    return w.Published(card.agent, card.card, card.published_ms)


async def list_agents(x: Exchange, caller: Caller, r: w.ListAgents) -> w.Agents:
    page: CardPage = await x.ask(caller, q.ListCards(x.by(caller), r.limit, cursor=r.cursor))
    return w.Agents(agents=[_published(card) for card in page.cards], cursor=page.cursor)


async def get_agent(x: Exchange, caller: Caller, r: w.GetAgent) -> w.AgentReply:
    card: Card | None = await x.ask(caller, q.GetCard(x.by(caller), x.key_of(r.name)))
    if card is None:
        raise UnknownPeer(f"no agent {r.name} is published", peer=r.name)
    return w.AgentReply(published=_published(card))


async def withdraw_agent(x: Exchange, caller: Caller, r: w.WithdrawAgent) -> w.AgentWithdrawn:
    agent = x.meant(caller, r.name)
    await x.run(caller, c.WithdrawCard(x.by(caller), agent))
    return w.AgentWithdrawn(display=agent.display, pubkey=agent.pubkey)


async def recent_audit(x: Exchange, caller: Caller, r: w.RecentAudit) -> w.AuditReply:
    """The operator, and who may read the audit, sees all rows; anybody else its own."""
    limit = check_count(r.limit, "limit", x.store.limits.page_max)
    actor = r.actor
    if actor != caller.agent.display:
        if await x.may(caller, "audit.read"):
            await x.require(caller, "audit.read")
        else:
            actor = caller.agent.display

    def wanted(row: AuditRow) -> bool:
        return (
            (actor is None or row.actor == actor)
            and (r.task_id is None or row.task_id == r.task_id)
            and (r.row is None or row.kind == r.row)
        )

    rows, cursor = await recent_rows(x.store, limit, r.before, wanted)
    return w.AuditReply(rows=rows, cursor=cursor)


async def list_daemons(x: Exchange, caller: Caller, r: w.ListDaemons) -> w.Daemons:
    await x.require(caller, "audit.read")
    return w.Daemons(daemons=list(await x.store.daemons()))


async def version(x: Exchange, caller: Caller, r: w.Version) -> w.VersionReply:
    return version_of(x)


def version_of(x: Exchange) -> w.VersionReply:
    return w.VersionReply(version=VERSION, realm=x.realm.pubkey, limits=x.store.limits)


async def whoami(x: Exchange, caller: Caller, r: w.Whoami) -> w.WhoamiReply:
    return w.WhoamiReply(agent=caller.agent, role=caller.role)


# --- the table ---------------------------------------------------------------------------------------------


HANDLERS: Final[dict[type, Handler]] = {
    w.SendTask: send_task,
    w.SendTasks: send_tasks,
    w.RecvTask: recv_task,
    w.RecvTasks: recv_tasks,
    w.RecentTasks: recent_tasks,
    w.GetTask: get_task,
    w.GetTree: get_tree,
    w.Story: story,
    w.AddMessage: add_message,
    w.Cancel: cancel,
    w.PostResult: post_result,
    w.RecvResult: recv_result,
    w.RecvResults: recv_results,
    w.GiveBack: give_back,
    w.RecentResults: recent_results,
    w.GetResult: get_result,
    w.Queue: queue,
    w.Heartbeat: heartbeat,
    w.Release: release,
    w.Update: update,
    w.AddArtifact: add_artifact,
    w.Ask: ask,
    w.Reject: reject,
    w.ReplyDirectly: reply_directly,
    w.ListInputs: list_inputs,
    w.CommitRun: commit_run,
    w.LoadRun: load_run,
    w.LookAround: look_around,
    w.FindEntry: find_entry,
    w.ListRuns: list_runs,
    w.GetRun: get_run,
    w.RunEntries: run_entries,
    w.SignalRun: signal_run,
    w.WakeRun: wake_run,
    w.ResumeRun: resume_run,
    w.JudgeEffect: judge_effect,
    w.Repair: repair,
    w.RetryStale: retry_stale,
    w.ListCache: list_cache,
    w.ForgetCached: forget_cached,
    w.Compact: compact,
    w.PublishAgent: publish_agent,
    w.ListAgents: list_agents,
    w.GetAgent: get_agent,
    w.WithdrawAgent: withdraw_agent,
    w.EnrollPeer: enroll_peer,
    w.ListPeers: list_peers,
    w.RevokePeer: revoke_peer,
    w.RotateToken: rotate_token,
    w.Grant: grant,
    w.ListGrants: list_grants,
    w.Check: check,
    w.Revoke: revoke,
    w.RecentAudit: recent_audit,
    w.ListDaemons: list_daemons,
    w.Whoami: whoami,
    w.Version: version,
}


async def handled(x: Exchange, caller: Caller, request: Any) -> Any:
    """The reply to a request. A name that nobody has here may belong to somebody whom another daemon has just enrolled:
    where that turns out, it is looked up again."""
    handler = HANDLERS[type(request)]
    if not x.store.is_shared:
        return await handler(x, caller, request)
    mark = x.store.directory_mark()
    try:
        return await handler(x, caller, request)
    except UnknownPeer:
        await x.store.refresh()
        if x.store.directory_mark() is mark:
            raise
        return await handler(x, caller, request)
