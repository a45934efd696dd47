"""Endings without an answer of the holder. (Contract 6, 7, 13.)"""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.command import CancelChildren
from covenant.model.record import Outcome, TaskRecord
from covenant.model.task import Result
from covenant.rules.cache import succession
from covenant.rules.context import View


def end(record: TaskRecord, outcome: Outcome, message: str, view: View, cascade: bool = False) -> list[e.Event]:
    """The events that end a task, and hand its work to the oldest follower if it was leading one."""
    task_id = record.task.id
    ended = e.Ended(task_id, outcome, Result(task_id, "error", (), message), cascade)
    return [ended, *succession(record, view)]


def end_asked(record: TaskRecord, view: View) -> tuple[tuple[e.Event, ...], tuple[CancelChildren, ...]]:
    """A task whose cancel was asked for has lost its holder: it is canceled."""
    events = end(record, Outcome.CANCELED, f"canceled: {record.cancel_reason}", view, record.cancel_cascade)
    return tuple(events), (CancelChildren(None, record.task.id),) if record.cancel_cascade else ()
