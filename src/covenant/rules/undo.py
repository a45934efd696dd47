"""Giving back: what was handed to a caller who had gone away before the hand-over was durable. (Contract 2, 8.)

Nobody ever heard of it, so it is as if it had not been: a task stands where it stood, at the attempt that it had, and a
result waits where it waited.
"""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.command import CancelChildren, Command, GiveBack
from covenant.model.record import Part, TaskRecord
from covenant.rules.context import Commit, Context, View
from covenant.rules.end import end_asked


def undo(commit: Commit) -> list[Command]:
    """What gives back the leases and results of a commit."""
    leases = tuple(event.lease_id for event in commit.events if type(event) is e.Leased)
    results = tuple(event.key for event in commit.events if type(event) is e.Drained)
    return [GiveBack(None, leases, results)] if leases or results else []


def give_back(command: GiveBack, view: View, ctx: Context) -> Commit:
    events: list[e.Event] = []
    then: list[CancelChildren] = []
    for lease_id in command.leases:
        record = view.get(view.task_of_lease(lease_id) or "")
        if not isinstance(record, TaskRecord) or record.lease is None or record.lease.lease_id != lease_id:
            continue  # somebody has dealt with it meanwhile
        if record.cancel_reason is None:
            events.append(e.Unleased(record.task.id))
        else:
            ended, children = end_asked(record, view)
            events += ended
            then += children
    for key in command.results:
        result = view.get(key)
        if isinstance(result, (TaskRecord, Part)) and result.answer_for is None:
            events.append(e.Undrained(key))
    return Commit(tuple(events), then=tuple(then))
