"""Giving back: what was handed to a caller who has gone away, or whom the answer never reached. (Contract 2, 4, 8.)

Nobody heard of it, so it is as if it had not been: a task stands where it stood, at the attempt that it had, and a
result waits where it waited. Giving the same back again changes nothing, so it may be said as often as its outcome is
not known: a lease has its id, and a drain the number of those before it. A lease under which something was done was
heard of, whatever the caller says now: it is released, and the next holder is at its next attempt.
"""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.command import Call, CancelChildren, Command, GiveBack
from covenant.model.record import Key, Part, TaskRecord
from covenant.rules.context import Commit, Context, View, acting, each
from covenant.rules.end import end_asked


def undo(commit: Commit, command: Command | Call) -> list[Command]:
    """What gives back the leases and results of a commit, in the name of who took them. It comes through no door: who
    has lost its token meanwhile cannot keep them either."""
    leases = tuple(event.lease_id for event in commit.events if type(event) is e.Leased or type(event) is e.TakenUp)
    results = tuple((event.key, event.again) for event in commit.events if type(event) is e.Drained)
    return [GiveBack(acting(command), leases, results)] if leases or results else []


def give_back(command: GiveBack, view: View, ctx: Context) -> Commit:
    events: list[e.Event] = []
    then: list[CancelChildren] = []

    def give_back_lease(lease_id: str) -> None:
        record = view.get(view.task_of_lease(lease_id) or "")
        if not isinstance(record, TaskRecord) or record.lease is None or record.lease.lease_id != lease_id:
            return  # somebody has dealt with it meanwhile
        if record.cancel_reason is not None:
            ended, children = end_asked(record, view)
            events.extend(ended)
            then.extend(children)
        elif record.is_run:
            events.append(e.Woken(record.task.id))
        elif record.lease.is_used:
            events.append(e.Requeued(record.task.id, lease_id, "released", "given back"))
        else:
            events.append(e.Unleased(record.task.id))

    def give_back_result(drained: tuple[Key, int]) -> None:
        key, again = drained
        result = view.get(key)
        if isinstance(result, (TaskRecord, Part)) and result.answer_for is None and result.given_back == again:
            events.append(e.Undrained(key))

    each(give_back_lease, command.leases)
    each(give_back_result, command.results)
    return Commit(tuple(events), then=tuple(then))
