"""When a wait is over."""

from __future__ import annotations

from typing import Any

from covenant.model.record import TaskRecord
from covenant.model.view import Inputs, QueueEntry


def has_moved(entry: QueueEntry, after: int, cancel_known: bool) -> bool:
    """For a change of a task: its generation is higher, it has ended, or a cancel is asked for meanwhile."""
    return entry.generation > after or entry.outcome is not None or entry.cancel_requested != cancel_known


def has_come(heard: Inputs, cancel_known: bool) -> bool:
    """For what the sender of a task says: it has said something, or a cancel is asked for meanwhile."""
    return bool(heard.inputs) or heard.cancel_requested != cancel_known


def is_under_way(record: Any) -> bool:
    """For a task to come to rest: it has neither ended nor is it the sender's turn."""
    return type(record) is TaskRecord and record.outcome is None and record.asks is None
