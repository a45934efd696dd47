"""Cancel: at once, by asking the holder first, and down a tree. (Contract 7.)"""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.command import CancelChildren, CancelTask
from covenant.model.error import NotPermitted, TaskTerminal
from covenant.model.record import Cascade, Key, Outcome, TaskRecord, TaskState
from covenant.model.view import Canceled
from covenant.rules.context import Commit, Context, Lacks, View
from covenant.rules.end import end
from covenant.rules.envelope import check_flag, check_id, check_text
from covenant.rules.sight import visible_task


def cancel(command: CancelTask, view: View, ctx: Context) -> Commit:
    check_text(command.reason, "reason", ctx.limits.text_bytes_max)
    check_flag(command.graceful, "graceful")
    check_flag(command.cascade, "cascade")
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
    if command.graceful and record.state in (TaskState.IN_FLIGHT, TaskState.PARKED):
        return _ask(command, record)
    events = end(record, Outcome.CANCELED, f"canceled: {command.reason}", view, command.cascade)
    return Commit(tuple(events), Canceled(task_id, TaskState.RESULT_PENDING, record.generation + 1), then=then)


def _ask(command: CancelTask, record: TaskRecord) -> Commit:
    """The holder learns of it by its next heartbeat, and a run that waits is woken for it. The first reason stays."""
    task_id = record.task.id
    if record.cancel_reason is not None and record.cancel_cascade >= command.cascade:
        return Commit((), Canceled(task_id, record.state, record.generation))
    asked = e.CancelAsked(task_id, record.cancel_reason or command.reason, command.cascade)
    if record.state is not TaskState.PARKED or record.ready_for is not None:
        return Commit((asked,), Canceled(task_id, record.state, record.generation))
    restates = record.asks is not None
    return Commit((asked, e.Woken(task_id, restates)), Canceled(task_id, record.state, record.generation + restates))


def cancel_children(command: CancelChildren, view: View, ctx: Context) -> Commit:
    """One step of a cascade. It may be repeated from the start at any time: what it has passed is passed over."""
    children = view.children(command.task_id, command.after, ctx.limits.step_records_max)
    if not children:
        parent = view.get(command.task_id)
        pending = isinstance(parent, TaskRecord) and parent.cascade is Cascade.PENDING
        return Commit((e.CascadeDone(command.task_id),) if pending else ())
    parent = view.get(command.task_id)
    events: list[e.Event] = []
    below: list[CancelChildren] = []
    touched: set[Key] = set()
    after = command.after
    lacks = Lacks()
    for child in children:
        if child.slot is not None and child.slot in touched:
            break  # its leader ended in this commit: the next step sees who leads now
        after = child.sent_order
        if not isinstance(parent, TaskRecord) or not _is_offspring(child, parent):
            continue
        with lacks:
            ended = _cancel_child(child, view)
            if ended:
                events += ended
                below.append(CancelChildren(None, child.task.id))
                if child.slot is not None:
                    touched.add(child.slot)
    lacks.settle()
    return Commit(tuple(events), then=(*below, CancelChildren(None, command.task_id, after)))


def _is_offspring(child: TaskRecord, parent: TaskRecord) -> bool:
    """Anybody may hang a task on any id, and send a task under an id on which others have hung theirs. A cancel reaches
    what the parent's sender sent, and what its recipient sent once it had leased the parent and so knew of it."""
    knew = parent.recipient if 0 < parent.leased_order < child.sent_order else None
    return child.sender in (parent.sender, knew)


def _cancel_child(child: TaskRecord, view: View) -> list[e.Event]:
    """A child that has ended is only passed through, once: links between tasks may run in a circle."""
    if child.outcome is None:
        return end(child, Outcome.CANCELED, "canceled: its parent was canceled", view, cascade=True)
    if child.cascade is Cascade.NONE and view.children(child.task.id, 0, 1):
        return [e.CascadeAsked(child.task.id)]
    return []
