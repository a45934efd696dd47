"""Endings without an answer: canceled, forced, past the deadline; and who takes over the work. (Contract 6, 7, 11.)"""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.command import CancelChildren, CancelTask, Expire
from covenant.model.error import NotPermitted, TaskTerminal
from covenant.model.record import Cascade, Key, Outcome, Slot, TaskRecord, TaskState
from covenant.model.task import Result
from covenant.model.view import Canceled
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import check_id, check_text
from covenant.rules.send import answer_from
from covenant.rules.sight import visible_task


def end(record: TaskRecord, outcome: Outcome, message: str, view: View, cascade: bool = False) -> list[e.Event]:
    """The events that end a task, and hand its work to the oldest follower if it was leading one."""
    task_id = record.task.id
    ended = e.Ended(task_id, outcome, Result(task_id, "error", (), message), cascade)
    return [ended, *_succession(record, view)]


def _succession(record: TaskRecord, view: View) -> list[e.Event]:
    slot = None if record.slot is None else view.get(record.slot)
    if not isinstance(slot, Slot) or slot.leader != record.task.id:
        return []  # it led nothing: a follower is only detached
    assert record.slot is not None
    followers = view.followers(record.slot, 1)
    if not followers:
        return [e.SlotClosed(record.slot)]
    heir = followers[0].task.id
    return [e.SlotLed(record.slot, heir), e.Promoted(heir)]


def cancel(command: CancelTask, view: View, ctx: Context) -> Commit:
    check_text(command.reason, "reason", ctx.limits.text_bytes_max)
    task_id = check_id(command.task_id, "task_id")
    record = visible_task(task_id, command.by, view, ctx)
    if command.by is not None and command.by.pubkey != record.sender:
        raise NotPermitted("only the sender cancels a task", task_id=task_id)
    then = (CancelChildren(None, task_id),) if command.cascade else ()
    if record.outcome == Outcome.CANCELED:
        asked = (e.CascadeAsked(task_id),) if command.cascade and record.cascade is not Cascade.PENDING else ()
        return Commit(asked, Canceled(task_id, record.state, record.generation), then=then if asked else ())
    if record.outcome is not None:
        raise TaskTerminal(f"task {task_id} has ended: {record.outcome}", task_id=task_id, outcome=record.outcome)
    if command.graceful and record.state == TaskState.IN_FLIGHT:
        return _ask(command, record)
    events = end(record, Outcome.CANCELED, f"canceled: {command.reason}", view, command.cascade)
    return Commit(tuple(events), Canceled(task_id, TaskState.RESULT_PENDING, record.generation + 1), then=then)


def _ask(command: CancelTask, record: TaskRecord) -> Commit:
    """The holder learns of it by its next heartbeat; the first reason stays."""
    task_id = record.task.id
    reply = Canceled(task_id, record.state, record.generation)
    if record.cancel_reason is not None and record.cancel_cascade >= command.cascade:
        return Commit((), reply)
    return Commit((e.CancelAsked(task_id, record.cancel_reason or command.reason, command.cascade),), reply)


def end_asked(record: TaskRecord, view: View) -> tuple[tuple[e.Event, ...], tuple[CancelChildren, ...]]:
    """A task whose cancel was asked for has lost its holder: it is canceled."""
    events = end(record, Outcome.CANCELED, f"canceled: {record.cancel_reason}", view, record.cancel_cascade)
    return tuple(events), (CancelChildren(None, record.task.id),) if record.cancel_cascade else ()


def cancel_children(command: CancelChildren, view: View, ctx: Context) -> Commit:
    """One step of a cascade. It may be repeated from the start at any time: what it has passed is passed over."""
    children = view.children(command.task_id, command.after, ctx.limits.step_records_max)
    if not children:
        parent = view.get(command.task_id)
        pending = isinstance(parent, TaskRecord) and parent.cascade is Cascade.PENDING
        return Commit((e.CascadeDone(command.task_id),) if pending else ())
    events: list[e.Event] = []
    below: list[CancelChildren] = []
    touched: set[Key] = set()
    after = command.after
    for child in children:
        if child.slot is not None and child.slot in touched:
            break  # its leader ended in this commit: the next step sees who leads now
        after = child.sent_order
        ended = _cancel_child(child, view)
        if ended:
            events += ended
            below.append(CancelChildren(None, child.task.id))
            if child.slot is not None:
                touched.add(child.slot)
    return Commit(tuple(events), then=(*below, CancelChildren(None, command.task_id, after)))


def _cancel_child(child: TaskRecord, view: View) -> list[e.Event]:
    """A child that has ended is only passed through, once: links between tasks may run in a circle."""
    if child.outcome is None:
        return end(child, Outcome.CANCELED, "canceled: its parent was canceled", view, cascade=True)
    if child.cascade is Cascade.NONE and view.children(child.task.id, 0, 1):
        return [e.CascadeAsked(child.task.id)]
    return []


def expire(command: Expire, view: View, ctx: Context) -> Commit:
    """What is due now: deadlines, delayed tasks whose time has come, cached errors whose time is over."""
    limit = ctx.limits.step_records_max
    due = view.due(ctx.now, limit)
    events: list[e.Event] = []
    touched: set[Key] = set()
    for key in due:
        if len(events) >= limit:
            break
        record = view.get(key)
        slot_key = key if isinstance(record, Slot) else getattr(record, "slot", None)
        if slot_key is not None:
            if slot_key in touched:
                continue  # the next step sees what this commit made of the slot
            touched.add(slot_key)
        if isinstance(record, TaskRecord):
            events += _expire_task(record, view, ctx)
        elif isinstance(record, Slot):
            events += _expire_slot(key, record, view, ctx)
    return Commit(tuple(events), then=(Expire(None),) if due else ())


def _expire_task(record: TaskRecord, view: View, ctx: Context) -> list[e.Event]:
    deadline = record.task.deadline_ms
    if deadline is not None and deadline <= ctx.now:
        return end(record, Outcome.DEADLINE_EXCEEDED, f"deadline_exceeded: {deadline}", view)
    return [e.Due(record.task.id)]


def _expire_slot(key: Key, slot: Slot, view: View, ctx: Context) -> list[e.Event]:
    followers = view.followers(key, ctx.limits.step_records_max)
    if followers:
        return [answer_from(slot, follower.task.id) for follower in followers]
    return [e.SlotClosed(key)]
