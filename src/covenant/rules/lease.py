"""Leases: one holder at a time, never redelivered by itself. (Contract 2.)"""

from __future__ import annotations

from typing import Final

from covenant.model import event as e
from covenant.model.command import BeatLease, LeaseTasks, ReleaseLease
from covenant.model.error import LeaseSuperseded, Malformed, TaskTerminal, TooLarge
from covenant.model.record import TaskRecord, TaskState
from covenant.model.task import Task
from covenant.model.view import Delivery, LeaseStatus, Released
from covenant.rules.context import Commit, Context, View
from covenant.rules.end import end_asked
from covenant.rules.envelope import check_count, check_id, check_text, check_time
from covenant.rules.page import Room
from covenant.rules.sight import lent, task_of_lease

_PARKED: Final = TaskState.PARKED  # at hand: an enum takes its time to look a member up


def lease(command: LeaseTasks, view: View, ctx: Context) -> Commit:
    """Hand over the oldest ready tasks, as many as an answer carries. Whoever receives for all acts for each task's
    recipient."""
    limit = command.limit
    if limit != 1:
        check_count(limit, "limit", ctx.limits.batch_max)
    recipient = None if command.recipient is None else command.recipient.pubkey
    if command.kinds is None:
        records = view.ready(recipient, limit)
    else:
        records = view.ready_of(recipient, _checked_kinds(command.kinds, ctx), limit)
    if not records:
        return Commit((), [])
    events: list[e.Event] = []
    deliveries = []
    room = Room(ctx.limits) if len(records) > 1 else None
    for record in records:
        if room is not None and not room.takes(record.task):
            break
        if record.due_ms is not None and record.due_ms <= ctx.now:
            return Commit((), [])  # first the clock has to end what is past its deadline
        task = record.task
        lease_id = ctx.ids.lease()
        if record.state is _PARKED:  # a run that was woken: it goes on where it was
            events.append(e.TakenUp(task.id, lease_id, command.incarnation))
            deliveries.append(Delivery(lent(task), lease_id, record.attempt, record.generation))
            continue
        events.append(e.Leased(task.id, lease_id, command.incarnation))
        deliveries.append(Delivery(lent(task), lease_id, record.attempt + 1, record.generation + 1))
    return Commit(tuple(events), deliveries)


def _checked_kinds(kinds: frozenset[str], ctx: Context) -> frozenset[str]:
    if not isinstance(kinds, frozenset) or not kinds:
        raise Malformed("kinds are the names of what the receiver can do", field="kinds")
    if len(kinds) > ctx.limits.batch_max:
        raise TooLarge("too many kinds", field="kinds", size=len(kinds), limit=ctx.limits.batch_max)
    for kind in kinds:
        if kind != "":
            check_text(kind, "kinds", ctx.limits.task_kind_bytes_max)
    return kinds


def kind_in(task: Task) -> str:
    """As receivers name it."""
    return task.task_kind or ""


def held(lease_id: str, record: TaskRecord) -> None:
    """Raise unless this lease is the one that holds the task."""
    if record.lease is not None and record.lease.lease_id == lease_id:
        return
    if record.outcome is not None:
        raise TaskTerminal(
            f"task {record.task.id} has ended: {record.outcome}", task_id=record.task.id, outcome=record.outcome
        )
    raise LeaseSuperseded(f"lease {lease_id} ended before", task_id=record.task.id, lease_id=lease_id)


def heartbeat(command: BeatLease, view: View, ctx: Context) -> Commit:
    lease_id = check_id(command.lease_id, "lease_id")
    record = task_of_lease(lease_id, command.by, view, ctx)
    held(lease_id, record)
    status = LeaseStatus(
        record.task.id, lease_id, record.attempt, record.cancel_reason is not None, record.cancel_reason
    )
    return Commit((e.Heartbeat(record.task.id),), status)


def release(command: ReleaseLease, view: View, ctx: Context) -> Commit:
    """The holder gives the task back: same id, next attempt; or the end, if a cancel was asked for."""
    lease_id = check_id(command.lease_id, "lease_id")
    check_text(command.reason, "reason", ctx.limits.text_bytes_max)
    if command.not_before_ms is not None:
        check_time(command.not_before_ms, "not_before_ms")
    record = task_of_lease(lease_id, command.by, view, ctx)
    held(lease_id, record)
    if record.cancel_reason is not None:
        events, then = end_asked(record, view)
        return Commit(events, Released(record.task.id, record.attempt, record.generation + 1), then=then)
    if record.is_run and command.not_before_ms is None:  # it goes on where it was: no new attempt
        return Commit((e.Woken(record.task.id),), Released(record.task.id, record.attempt, record.generation))
    released = e.Requeued(record.task.id, lease_id, "released", command.reason, command.not_before_ms)
    return Commit((released,), Released(record.task.id, record.attempt, record.generation + 1))
