"""How long finished things stay. (Contract 8, 9.)

Nothing open is ever dropped: every question here is first answered by "has it finished?".
"""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.command import CompactHistory
from covenant.model.record import HORIZON_KEY, Horizon, Late, Part, Record, Slot, TaskRecord, TaskState, Tombstone
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import check_time, digest_of


def at_rest(record: Record) -> bool:
    """Nothing will change it by itself: it may leave the memory of an engine for its archive."""
    if type(record) is TaskRecord:
        return record.state == TaskState.RESOLVED and not record.cascade
    if type(record) is Part:
        return record.answer_for is None
    if type(record) is Slot:
        return record.leader is None and record.due_ms is None
    return type(record) is Late


def rest_ms(record: Record | Tombstone) -> int:
    """Since when."""
    if isinstance(record, (TaskRecord, Tombstone)):
        return record.finished_ms
    if isinstance(record, Late):
        return record.posted_ms
    return 0


def horizon_ms(ctx: Context) -> int:
    """Resolved tasks that finished before this moment are past retention."""
    return max(ctx.compacted_before_ms, ctx.now - ctx.limits.retention_ms)


def is_retained(record: TaskRecord, horizon: int) -> bool:
    return record.state != TaskState.RESOLVED or record.finished_ms >= horizon


def is_forgotten(known: Record | Tombstone, ctx: Context) -> bool:
    """Past the time in which its id is remembered: the id may be used anew."""
    if isinstance(known, TaskRecord) and known.state != TaskState.RESOLVED:
        return False
    return rest_ms(known) < ctx.now - ctx.limits.dedup_ms


def tombstone_of(record: TaskRecord) -> Tombstone:
    return Tombstone(digest_of(record.task), record.sender, record.recipient, record.finished_ms, record.sent_order)


def compact(command: CompactHistory, view: View, ctx: Context) -> Commit:
    """Move the horizon; engines let go of what lies behind it."""
    before = horizon_ms(ctx)
    if command.older_than_ms is not None:
        before = max(before, ctx.now - check_time(command.older_than_ms, "older_than_ms"))
    horizon = view.get(HORIZON_KEY)
    if isinstance(horizon, Horizon) and before <= horizon.finished_before_ms:
        return Commit((), horizon.finished_before_ms)
    return Commit((e.Compacted(HORIZON_KEY, before),), before)
