"""How a task becomes a run: with its first commit, or when the run is taken up from a worker that made none."""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.record import Said, TaskRecord, said_key
from covenant.model.run import run_key, signal_key
from covenant.rules.context import Context, View
from covenant.rules.run.signal import name_of


def beginning(record: TaskRecord, view: View, ctx: Context) -> list[e.Event]:
    """What its sender said while nobody had begun waits for the run as signals."""
    task_id = record.task.id
    events: list[e.Event] = [e.Begun(task_id), e.RunBegun(run_key(task_id), task_id, record.recipient)]
    for number, said in view.pieces(said_key(task_id, ""), 1, record.said):
        if isinstance(said, Said) and said.message.role == "ROLE_USER":
            name = name_of(said.message, ctx.limits)
            events.append(e.Signaled(signal_key(task_id, ctx.ids.lease()), name, said=number))
    return events
