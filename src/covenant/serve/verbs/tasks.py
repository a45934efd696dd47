"""Tasks, from the send to the lease and back: every verb of senders and holders but the dialog."""

from __future__ import annotations

from covenant.exchange.exchange import Exchange
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.error import CovenantError
from covenant.model.peer import Caller
from covenant.model.view import Canceled, Delivery, LeaseStatus, QueuePage, Released, Sent
from covenant.rules.envelope import check_batch, check_count
from covenant.serve import wire as w
from covenant.serve.verbs.received import of_kind, wait_of


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
    taken = of_kind(Delivery, await x.take(caller, lease, wait_of(r.wait_ms), r.receipt))
    if not taken:
        return w.TaskOpt()
    d = taken[0]
    return w.TaskOpt(task=d.task, lease_id=d.lease_id, attempt=d.attempt, generation=d.generation)


async def recv_tasks(x: Exchange, caller: Caller, r: w.RecvTasks) -> w.Deliveries:
    limit = check_batch(r.limit, x.store.limits)
    lease = x.lease(caller, r.recipient, r.incarnation, limit, r.kinds)
    taken = of_kind(Delivery, await x.take(caller, lease, wait_of(r.wait_ms), r.receipt))
    return w.Deliveries(deliveries=[w.Delivered(d.task, d.lease_id, d.attempt, d.generation) for d in taken])


async def recent_tasks(x: Exchange, caller: Caller, r: w.RecentTasks) -> w.Tasks:
    return w.Tasks(tasks=await x.ask(caller, q.RecentTasks(x.by(caller), r.limit)))


async def get_task(x: Exchange, caller: Caller, r: w.GetTask) -> w.TaskReply:
    if r.current_generation is None:
        return w.TaskReply(entry=await x.ask(caller, q.GetTask(x.by(caller), r.task_id)))
    wait_ms = wait_of(r.wait_ms)
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
        tasks=page.tasks,
        results=results,
        beside=[w.beside(answer) for answer in page.results],
        cursor=page.cursor,
        revoked=x.revoked_in(page.tasks),
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
