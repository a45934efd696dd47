"""Who sees what, and how a record looks from outside. (Contract 2, 6, 13, 27.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard, TypeVar

from msgspec import UNSET
from msgspec.json import decode, encode

from covenant.model.agent import AgentId
from covenant.model.content import is_plain_text
from covenant.model.error import UnknownLease, UnknownTask
from covenant.model.record import Part, Record, Slot, TaskRecord, TaskState, Tombstone
from covenant.model.task import Result, Task
from covenant.model.view import Answer, QueueEntry
from covenant.rules.context import Context, View
from covenant.rules.retention import is_retained


def is_visible(record: Record | Tombstone | None, by: AgentId | None, ctx: Context) -> TypeGuard[TaskRecord]:
    """Return whether the record is a task that the caller sees: its sender, its recipient or the operator.

    A hidden task takes as few steps as an absent one, so that time does not tell them apart.
    """
    if type(record) is not TaskRecord or not (by is None or by.pubkey in (record.sender, record.recipient)):
        return False
    return record.outcome is None or is_retained(record, ctx)


def visible_task(task_id: str, by: AgentId | None, view: View, ctx: Context) -> TaskRecord:
    """The task, or the one refusal that does not tell absent from hidden."""
    record = view.get(task_id)
    if is_visible(record, by, ctx):
        return record
    raise UnknownTask(f"no task {task_id}", task_id=task_id)


def is_hidden(record: TaskRecord) -> bool:
    """Whether it may still be answered by a message, and there be no task."""
    return record.protocol and not record.shown and record.outcome is None


def is_listed(record: TaskRecord) -> bool:
    """Whether a client of the protocol finds it among its tasks: what may yet turn out to be none is not shown."""
    return record.protocol and not record.direct and not is_hidden(record)


def task_of_lease(lease_id: str, by: AgentId | None, view: View, ctx: Context) -> TaskRecord:
    task_id = view.task_of_lease(lease_id)
    record = view.get(task_id or lease_id)  # looked up even without a lease, so that both take as long
    if task_id is not None and isinstance(record, TaskRecord) and (by is None or by.pubkey == record.recipient):
        return record
    raise UnknownLease(f"no lease {lease_id}", lease_id=lease_id)


def entry_of(record: TaskRecord, view: View, ctx: Context, late: Sequence[Result] = ()) -> QueueEntry:
    lease = record.lease
    deadline = record.task.deadline_ms
    return QueueEntry(
        state=record.state,
        task=lent(record.task),
        attempt=record.attempt,
        generation=record.generation,
        sent_ms=record.sent_ms,
        lease_id=lease.lease_id if lease else None,
        leased_to=lease.holder if lease else None,
        leased_at_ms=lease.leased_ms if lease else None,
        heartbeat_ms=lease.seen_ms if lease else None,
        incarnation=lease.incarnation if lease else None,
        not_before_ms=record.not_before_ms,
        follows=leader_of(record, view),
        replayed=record.replayed,
        overdue=record.outcome is None and deadline is not None and deadline <= ctx.now,
        cancel_requested=record.cancel_reason is not None and record.outcome is None,
        asks=record.asks,
        outcome=record.outcome,
        finished_ms=record.finished_ms if record.outcome else None,
        late_results=tuple(lent(result) for result in late),
        of_run=record.run is not None,
    )


def leader_of(record: TaskRecord, view: View) -> str | None:
    """The task whose result this one waits for."""
    slot = None if record.waits_on is None else view.get(record.waits_on)
    return slot.leader or slot.source if isinstance(slot, Slot) else None


E = TypeVar("E", Task, Result)


def lent(envelope: E) -> E:
    """The envelope for a caller to keep. Values that a caller could change are copied: the record must not change."""
    for block in envelope.content:
        if not is_plain_text(block):
            return _copied(envelope)
    message = envelope.message
    if message is None:
        return envelope
    for part in message.parts:
        if part.data is not UNSET or part.metadata is not None:
            return _copied(envelope)
    return envelope if message.metadata is None else _copied(envelope)


def _copied(envelope: E) -> E:
    return decode(encode(envelope), type=type(envelope))


def answer_of(record: Record | Tombstone | None) -> Answer:
    """A part or a final result as its sender gets it."""
    if isinstance(record, Part):
        return Answer(lent(record.result), record.generation, record.attempt)
    assert isinstance(record, TaskRecord) and record.result is not None
    return Answer(lent(record.result), record.generation, record.attempt, record.replayed)


def passes(
    record: TaskRecord, now: int, state: TaskState | None, min_lease_age_ms: int | None, deadline_within_ms: int | None
) -> bool:
    """The filters of the queue listing. Lease age concerns only what is in flight; a deadline filter leaves out
    tasks without a deadline; what has ended is no longer in the queue."""
    if record.outcome is not None or (state is not None and record.state != state):
        return False
    if min_lease_age_ms is not None and record.lease is not None and lease_age_ms(record, now) < min_lease_age_ms:
        return False
    if deadline_within_ms is not None:
        deadline = record.task.deadline_ms
        return deadline is not None and deadline <= now + deadline_within_ms
    return True


def lease_age_ms(record: TaskRecord, now: int) -> int:
    """Time since the holder's last sign of life; never negative, even when the clock is set back."""
    if record.lease is None or record.asks is not None:  # whoever waits for input is not stale
        return 0
    return max(0, now - record.lease.seen_ms)
