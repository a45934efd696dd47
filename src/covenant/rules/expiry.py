"""What happens by the clock alone: deadlines, delayed tasks, cached errors. (Contract 6, 11.)

A task in flight has nothing due: its deadline is only shown, and counts again when it is queued again. Engines run this
before any other command once something is due, so no command sees a task that should have ended.
"""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.command import Expire
from covenant.model.peer import Grant
from covenant.model.record import Key, Outcome, Slot, TaskRecord, TaskState
from covenant.rules.cache import expire_slot
from covenant.rules.context import Commit, Context, View
from covenant.rules.end import end


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
        elif isinstance(record, Grant):
            events.append(e.GrantExpired(key))
        elif isinstance(record, Slot):
            events += expire_slot(key, record, view, ctx)
    return Commit(tuple(events), then=(Expire(None),) if due else ())


def _expire_task(record: TaskRecord, view: View, ctx: Context) -> list[e.Event]:
    deadline = record.task.deadline_ms
    if deadline is not None and deadline <= ctx.now:
        return end(record, Outcome.DEADLINE_EXCEEDED, f"deadline_exceeded: {deadline}", view)
    if record.state is TaskState.PARKED:
        return [e.Woken(record.task.id, restates=record.asks is not None)]
    return [e.Due(record.task.id)]
