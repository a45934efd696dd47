"""How long finished things stay. (Contract 8, 9.)

Nothing open is ever dropped: every question here is first answered by "has it finished?".
"""

from __future__ import annotations

from typing import Final

from covenant.model import event as e
from covenant.model.command import CompactHistory
from covenant.model.peer import Grant
from covenant.model.record import (
    HORIZON_KEY,
    Cascade,
    Chunk,
    Late,
    Part,
    Record,
    Said,
    SendKey,
    Slot,
    TaskRecord,
    TaskState,
    Tombstone,
)
from covenant.model.run import Entry, Mark, Run
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import check_count, digest_of

# Members that every task meets, at hand: an enum takes its time to look one up.
_RESOLVED: Final = TaskState.RESOLVED
_PENDING: Final = Cascade.PENDING

_AGE_MS_MAX: Final = 2**53


def at_rest(record: Record) -> bool:
    """Nothing will change it by itself: it may leave the memory of an engine for its archive."""
    if type(record) is TaskRecord:
        return record.state is _RESOLVED and record.cascade is not _PENDING
    if type(record) is Part:
        return record.answer_for is None
    if type(record) is Slot:
        return record.leader is None and record.due_ms is None
    if type(record) is Grant:
        return record.revoked_ms is not None
    if type(record) is Run:
        return record.is_swept
    return type(record) in (Late, Said, Chunk, SendKey, Entry, Mark)


def is_retained(record: TaskRecord, ctx: Context) -> bool:
    """Open, or resolved within the retention time and after the last explicit compaction. A result that waited long
    to be drained has its whole time after that."""
    if record.state is not _RESOLVED:
        return True
    if record.resolved_ms < ctx.now - ctx.limits.retention_ms:
        return False
    compaction = ctx.compaction
    return compaction is None or record.order > compaction.order or record.resolved_ms >= compaction.resolved_before_ms


def is_forgotten(known: Record | Tombstone, ctx: Context) -> bool:
    """Past the time in which its id is remembered: the id may be used anew."""
    if isinstance(known, TaskRecord) and known.state is not _RESOLVED:
        return False
    resolved_ms = known.resolved_ms if isinstance(known, (TaskRecord, Tombstone)) else 0
    return resolved_ms < ctx.now - ctx.limits.dedup_ms


def is_free(known: Record | Tombstone | None, ctx: Context) -> bool:
    """Whether a task may be sent under an id: nobody has it, or it is forgotten. Sending ends what was there, with all
    that belonged to it, whether or not an engine has buried it: that takes time, and nobody is to see when."""
    return known is None or is_forgotten(known, ctx)


def tombstone_of(record: TaskRecord) -> Tombstone:
    return Tombstone(digest_of(record.task), record.sender, record.recipient, record.resolved_ms, record.sent_order)


def compact(command: CompactHistory, view: View, ctx: Context) -> Commit:
    """Move the horizon; engines let go of what lies behind it."""
    age_ms = ctx.limits.retention_ms
    if command.older_than_ms is not None:
        age_ms = min(age_ms, check_count(command.older_than_ms, "older_than_ms", _AGE_MS_MAX))
    return Commit((e.Compacted(HORIZON_KEY, max(0, ctx.now - age_ms)),))
