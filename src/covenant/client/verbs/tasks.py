"""Sending tasks and taking them, and what is seen of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covenant.client.reply import refusal_of
from covenant.client.verbs.results import answers
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.error import CovenantError
from covenant.model.view import (
    Canceled,
    Delivery,
    LeaseStatus,
    QueueEntry,
    QueuePage,
    Released,
    Sent,
    Tree,
)
from covenant.rules.envelope import check_id
from covenant.serve import wire as w

if TYPE_CHECKING:
    from covenant.client.engine import RemoteEngine


def sent(reply: w.TaskQueued) -> Sent:
    return Sent(reply.task_id, reply.generation, reply.duplicate, reply.replayed, reply.follows)


def sent_or_refused(item: w.BatchItem) -> Sent | CovenantError:
    if item.error is not None:
        return refusal_of(item.error.code, item.error.message, item.error.details)
    assert item.sent is not None
    return sent(item.sent)


async def send_task(x: RemoteEngine, command: c.SendTask) -> Sent:
    return sent(await x.call(w.SendTask(task=x.sealed(command)), w.TaskQueued, command.by))


async def lease(x: RemoteEngine, command: c.LeaseTasks) -> list[Delivery]:
    return await x.take(command, 0)


async def heartbeat(x: RemoteEngine, command: c.BeatLease) -> LeaseStatus:
    r: w.LeaseBeat = await x.call(w.Heartbeat(lease_id=check_id(command.lease_id, "lease_id")), w.LeaseBeat, command.by)
    return LeaseStatus(r.task_id, r.lease_id, r.attempt, r.cancel_requested, r.cancel_reason)


async def release(x: RemoteEngine, command: c.ReleaseLease) -> Released:
    request = w.Release(
        lease_id=check_id(command.lease_id, "lease_id"), reason=command.reason, not_before_ms=command.not_before_ms
    )
    done: w.ReleasedReply = await x.call(request, w.ReleasedReply, command.by)
    return Released(done.task_id, done.attempt, done.generation)


async def cancel(x: RemoteEngine, command: c.CancelTask) -> Canceled:
    request = w.Cancel(
        task_id=check_id(command.task_id, "task_id"),
        reason=command.reason,
        graceful=command.graceful,
        cascade=command.cascade,
    )
    done: w.CanceledReply = await x.call(request, w.CanceledReply, command.by)
    return Canceled(done.task_id, done.state, done.generation)


async def get_task(x: RemoteEngine, query: q.GetTask) -> QueueEntry:
    reply: w.TaskReply = await x.call(w.GetTask(task_id=check_id(query.task_id, "task_id")), w.TaskReply, query.by)
    return reply.entry


async def get_tree(x: RemoteEngine, query: q.GetTree) -> Tree:
    reply: w.TreeReply = await x.call(w.GetTree(task_id=check_id(query.root, "root")), w.TreeReply, query.by)
    return Tree(reply.root, reply.size, reply.truncated)


async def recent_tasks(x: RemoteEngine, query: q.RecentTasks) -> Any:
    reply: w.Tasks = await x.call(w.RecentTasks(limit=x.page(query.limit)), w.Tasks, query.by)
    return reply.tasks


async def queue(x: RemoteEngine, query: q.ListQueue) -> QueuePage:
    request = w.Queue(
        limit=x.page(query.limit),
        min_lease_age_ms=query.min_lease_age_ms,
        deadline_within_ms=query.deadline_within_ms,
        state=query.state,
        cursor=x.cursor(query.cursor),
    )
    page: w.QueueReply = await x.call(request, w.QueueReply, query.by)
    posted = answers(w.Results(results=page.results, beside=page.beside))
    return QueuePage(page.tasks, posted, page.cursor)
