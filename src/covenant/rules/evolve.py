"""How an event changes its record. Replaying a journal is a fold of `evolve`.

What the generation does is decided here, and nowhere else. The record that is passed in is never touched: an engine may
hold on to it. `order` is the number of the event in the store, `at` the time of its commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from msgspec import Struct

from covenant.model import event as e
from covenant.model.card import Card
from covenant.model.limits import ACTIONS_HELD_MAX, LEASES_REMEMBERED_MAX, RECEIPTS_REMEMBERED_MAX
from covenant.model.peer import Grant, Peer
from covenant.model.push import Push
from covenant.model.record import (
    Cascade,
    Chunk,
    Horizon,
    Late,
    Lease,
    Outcome,
    Part,
    Record,
    Said,
    SendKey,
    SignedHead,
    Slot,
    TaskRecord,
    TaskState,
    Tombstone,
)
from covenant.model.run import Entry, Mark, Memo, Run, Signal, Step
from covenant.model.task import Result

# Members that every task meets, at hand: an enum takes its time to look one up.
_QUEUED: Final = TaskState.QUEUED
_IN_FLIGHT: Final = TaskState.IN_FLIGHT
_PARKED: Final = TaskState.PARKED
_RESULT_PENDING: Final = TaskState.RESULT_PENDING
_RESOLVED: Final = TaskState.RESOLVED
_ANSWERED: Final = Outcome.ANSWERED

_ONE_STEP = frozenset(
    (
        e.Sent,
        e.Leased,
        e.Unleased,
        e.Requeued,
        e.Progressed,
        e.Ended,
        e.Messaged,
        e.Updated,
        e.Asked,
        e.Chunked,
        e.Replied,
    )
)


def steps_of(event: e.Event) -> int:
    """By how much an event moves the generation of its task."""
    if type(event) is e.Answered:
        return 2 if event.result.content else 1
    if type(event) is e.Parked or type(event) is e.Woken:
        return int(event.restates)
    return int(type(event) in _ONE_STEP)


def evolve(record: Record | Tombstone | None, event: e.Event, order: int, at: int) -> Record | None:
    return EVOLVE[type(event)](record, event, order, at)


R = TypeVar("R", bound="TaskRecord | Part | Slot | Peer | Grant | Run")


_copied: Callable[[R], R] = Struct.__copy__  # type: ignore[attr-defined]  # what copy.copy calls, without its detour


def _sent(_: Any, event: e.Sent, order: int, at: int) -> TaskRecord:
    task = event.task
    assert task.sender is not None
    recipient = task.recipient.pubkey
    record = TaskRecord(task, task.sender.pubkey, recipient, at, order, slot=event.slot, order=order)
    record.status_order = order
    record.status_ms = at
    if event.protocol:
        record.protocol = True
    if event.shown:
        record.shown = True
    if event.run is not None:
        record.run = event.run
        record.run_step = event.run_step
    if event.replayed:
        record.replayed = True
    elif event.follows:
        record.waits_on = event.slot
        record.ready_order = order
        record.not_before_ms = task.not_before_ms
        record.due_ms = task.deadline_ms
    else:
        _enqueue(record, task.not_before_ms, order, at)
    return record


def _enqueue(record: TaskRecord, not_before_ms: int | None, order: int, at: int) -> None:
    """Put the record at the end of its recipient's queue, now or when its time comes."""
    record.ready_order = order
    deadline_ms = record.task.deadline_ms
    if not_before_ms is None or not_before_ms <= at:
        record.ready_for = record.recipient
        if record.not_before_ms is not None:
            record.not_before_ms = None
        if record.due_ms != deadline_ms:
            record.due_ms = deadline_ms
    else:
        record.not_before_ms = not_before_ms
        record.ready_for = None
        record.due_ms = not_before_ms if deadline_ms is None else min(not_before_ms, deadline_ms)


def _leased(old: TaskRecord, event: e.Leased, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    record.state = _IN_FLIGHT
    record.attempt = old.attempt + 1
    record.leased_order = old.leased_order or order
    record.generation = old.generation + 1
    record.lease = Lease(event.lease_id, old.task.recipient, event.incarnation, at, at, order)
    record.incarnation = event.incarnation
    if old.partials:
        record.partials = 0
    if old.receipts:
        record.receipts = ()
    record.order = order
    _restate(record, order, at)
    record.ready_for = None
    if old.due_ms is not None:
        record.due_ms = None  # in flight, a deadline is only shown
    return record


def _unleased(old: TaskRecord, event: e.Unleased, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    record.state = _QUEUED
    record.attempt = old.attempt - 1
    record.leased_order = old.leased_order if record.attempt else 0
    record.generation = old.generation + 1
    record.lease = None
    record.order = order
    _restate(record, order, at)
    _enqueue(record, None, old.ready_order, at)
    return record


def _heartbeat(old: TaskRecord, event: e.Heartbeat | None, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    lease = old.lease
    assert lease is not None
    record.lease = Lease(lease.lease_id, lease.holder, lease.incarnation, lease.leased_ms, at, order, is_used=True)
    record.order = order
    return record


def _end_lease(record: TaskRecord) -> None:
    if record.lease is not None:
        before = record.lease_history[-LEASES_REMEMBERED_MAX + 1 :] if record.lease_history else ()
        record.lease_history = (*before, record.lease.lease_id)
        record.lease = None


def _requeued(old: TaskRecord, event: e.Requeued, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    _end_lease(record)
    record.state = _QUEUED
    record.generation = old.generation + 1
    record.order = order
    _restate(record, order, at)
    _enqueue(record, event.not_before_ms, order, at)
    return record


def _progressed(old: TaskRecord, event: e.Progressed, order: int, at: int) -> TaskRecord:
    record = _acted(old, order, at)
    record.generation = old.generation + 1
    record.partials = old.partials + 1
    record.partials_total = old.partials_total + 1
    return record


def _acted(old: TaskRecord, order: int, at: int) -> TaskRecord:
    """The holder did something that shows: a sign of life, too."""
    record = _heartbeat(old, None, order, at)
    record.generation = old.generation + 1
    record.shown = True
    return record


def _finish(old: TaskRecord, outcome: Outcome, result: Result, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    _end_lease(record)
    record.state = _RESULT_PENDING
    record.outcome = outcome
    record.result = result
    record.finished_ms = at
    record.order = order
    _restate(record, order, at)
    if old.lease is None:  # what is held stands nowhere else
        record.ready_for = None
        record.waits_on = None
        record.due_ms = None
        record.not_before_ms = None
    if old.protocol:
        record.state = _RESOLVED
        record.resolved_ms = at
    elif old.run is None:
        record.answer_for = old.sender
        record.answer_order = order
    return record


def _restate(record: TaskRecord, order: int, at: int) -> None:
    """The status is a new one, with no message beside it yet."""
    record.status_ms = at
    record.status_order = order
    if record.asks is not None:
        record.asks = None
    if record.note:
        record.note = 0


def _answered(old: TaskRecord, event: e.Answered, order: int, at: int) -> TaskRecord:
    record = _finish(old, _ANSWERED, event.result, order, at)
    record.generation = old.generation + (2 if event.result.content else 1)
    if event.result.lease_id is None:
        record.replayed = True
    return record


def _ended(old: TaskRecord, event: e.Ended, order: int, at: int) -> TaskRecord:
    record = _finish(old, event.outcome, event.result, order, at)
    record.generation = old.generation + 1
    record.cascade = Cascade.PENDING if event.cascade else Cascade.NONE
    return record


def _cancel_asked(old: TaskRecord, event: e.CancelAsked, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    record.cancel_reason = event.reason
    record.cancel_cascade = event.cascade
    record.order = order
    return record


def _cascade_asked(old: TaskRecord, event: e.CascadeAsked, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    record.cascade = Cascade.PENDING
    record.order = order
    return record


def _cascade_done(old: TaskRecord, event: e.CascadeDone, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    record.cascade = Cascade.DONE
    record.order = order
    return record


def _promoted(old: TaskRecord, event: e.Promoted, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    record.waits_on = None
    record.order = order
    _enqueue(record, old.not_before_ms, order, at)
    return record


def _due(old: TaskRecord, event: e.Due, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    record.order = order
    _enqueue(record, None, order, at)
    return record


def _drained(old: TaskRecord | Part, event: e.Drained, order: int, at: int) -> TaskRecord | Part:
    record = _copied(old)
    record.order = order
    record.answer_for = None
    if isinstance(record, TaskRecord):
        record.state = _RESOLVED
        record.resolved_ms = at
    return record


def _undrained(old: TaskRecord | Part, event: e.Undrained, order: int, at: int) -> TaskRecord | Part:
    record = _copied(old)
    record.order = order
    record.given_back += 1
    if isinstance(record, TaskRecord):
        record.state = _RESULT_PENDING
        record.answer_for = record.sender
    else:
        record.answer_for = record.sender
    return record


def _parted(_: Any, event: e.Parted, order: int, at: int) -> Part:
    answer_for = None if event.kept else event.sender
    return Part(event.result, event.sender, event.attempt, event.number, event.generation, order, answer_for, order)


def _said(_: Any, event: e.Said, order: int, at: int) -> Said:
    return Said(event.message, at, order)


def _shown(old: TaskRecord, event: e.Shown, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    record.shown = True
    record.order = order
    return record


def _messaged(old: TaskRecord, event: e.Messaged, order: int, at: int) -> TaskRecord:
    """Who waited for it has its time to work from now on."""
    record = _copied(old) if old.asks is None or old.lease is None else _heartbeat(old, None, order, at)
    record.generation = old.generation + 1
    record.said = old.said + 1
    record.heard = old.heard + 1
    record.shown = True
    record.order = order
    _restate(record, order, at)
    record.asks = event.asks
    return record


def _receipts(old: TaskRecord, receipt: str | None) -> tuple[str, ...]:
    return old.receipts if receipt is None else (*old.receipts[-RECEIPTS_REMEMBERED_MAX + 1 :], receipt)


def _updated(old: TaskRecord, event: e.Updated, order: int, at: int) -> TaskRecord:
    record = _acted(old, order, at)
    _restate(record, order, at)
    record.said = record.note = old.said + 1
    record.asks = event.asks
    record.receipts = _receipts(old, event.receipt)
    return record


def _asked(old: TaskRecord, event: e.Asked, order: int, at: int) -> TaskRecord:
    record = _acted(old, order, at)
    _restate(record, order, at)
    if event.speaks:
        record.said = record.note = old.said + 1
    record.asks = event.asks
    record.receipts = _receipts(old, event.receipt)
    return record


def _chunked(old: TaskRecord, event: e.Chunked, order: int, at: int) -> TaskRecord:
    record = _acted(old, order, at)
    record.chunks = old.chunks + 1
    if event.begins is not None:
        record.artifacts = (*old.artifacts, event.begins)
    record.receipts = _receipts(old, event.receipt)
    return record


def _chunk_kept(_: Any, event: e.ChunkKept, order: int, at: int) -> Chunk:
    return Chunk(event.artifact, order, event.append, event.last)


def _push_set(_: Any, event: e.PushSet, order: int, at: int) -> Push:
    return Push(event.config, event.after, order, order)


def _push_delivered(old: Push, event: e.PushDelivered, order: int, at: int) -> Push:
    return Push(old.config, event.generation, order, old.since)


def _card_published(known: Any, event: e.CardPublished, order: int, at: int) -> Card:
    """Published again it keeps its place: which agent was the first does not change by that."""
    return Card(event.agent, event.card, at, known.order if type(known) is Card else order)


def _dropped(_: Any, event: e.Event, order: int, at: int) -> None:
    return None


def _replied(old: TaskRecord, event: e.Replied, order: int, at: int) -> TaskRecord:
    record = _finish(old, _ANSWERED, event.result, order, at)
    record.generation = old.generation + 1
    record.direct = True
    return record


def _begun(old: TaskRecord, event: e.Begun, order: int, at: int) -> TaskRecord:
    record = _heartbeat(old, None, order, at)
    record.is_run = record.shown = True
    return record


def _parked(old: TaskRecord, event: e.Parked, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    _end_lease(record)
    record.state = _PARKED
    record.order = order
    if event.restates:
        record.generation = old.generation + 1
        _restate(record, order, at)
        record.note = event.note
    record.asks = event.asks
    deadline_ms = record.task.deadline_ms
    times = [ms for ms in (event.until_ms, deadline_ms) if ms is not None]
    record.not_before_ms = event.until_ms
    record.due_ms = min(times) if times else None
    return record


def _woken(old: TaskRecord, event: e.Woken, order: int, at: int) -> TaskRecord:
    """It stands at the end of the queue. A lease that nobody ever heard of leaves no trace."""
    record = _copied(old)
    if old.lease is not None and old.lease.is_used:
        _end_lease(record)
    record.lease = None
    record.state = _PARKED
    record.order = order
    if event.restates:
        record.generation = old.generation + 1
        _restate(record, order, at)
    _enqueue(record, None, order, at)
    return record


def _taken_up(old: TaskRecord, event: e.TakenUp, order: int, at: int) -> TaskRecord:
    record = _copied(old)
    _end_lease(record)
    record.state = _IN_FLIGHT
    record.lease = Lease(event.lease_id, old.task.recipient, event.incarnation, at, at, order)
    record.incarnation = event.incarnation
    record.receipts = ()
    record.order = order
    record.ready_for = None
    record.due_ms = None
    record.not_before_ms = None
    return record


def _run_begun(_: Any, event: e.RunBegun, order: int, at: int) -> Run:
    return Run(event.task_id, event.agent, at, order, order)


def _stepped(old: Run, event: e.Stepped, order: int, at: int) -> Run:
    run = _copied(old)
    run.order = order
    run.step = event.number
    run.step_lease = event.lease_id
    run.step_ms = at
    run.entries += event.entries
    run.leaf = event.leaf
    run.wait = None
    run.left = 0
    run.resumes = 0
    run.dead = None
    if event.is_checkpoint:
        run.checkpoints += 1
        run.state = event.state.copy()
        run.floor = event.number - 1  # what is noted in the step of the checkpoint lies behind it
        run.floor_entries = run.entries
        run.floor_leaf = event.leaf
    return run


def _step_kept(_: Any, event: e.StepKept, order: int, at: int) -> Step:
    """A value read from disk is a window on the line that it stood in: what is kept is a copy."""
    return Step(order, tuple(Memo(m.key, m.value.copy(), m.entry, m.task, m.begun) for m in event.memos))


def _entry_kept(_: Any, event: e.EntryKept, order: int, at: int) -> Entry:
    content = event.content.copy()
    return Entry(event.id, event.role, at, order, event.parent, content, event.kind, event.said, event.turn)


def _marked(_: Any, event: e.Marked, order: int, at: int) -> Mark:
    return Mark(event.entry, event.digest, order)


def _run_waits(old: Run, event: e.RunWaits, order: int, at: int) -> Run:
    run = _copied(old)
    run.order = order
    run.wait = event.wait
    run.left = event.left
    return run


def _task_awaited(old: Run, event: e.TaskAwaited, order: int, at: int) -> Run:
    run = _copied(old)
    run.order = order
    run.left = old.left - 1
    return run


def _run_resumed(old: Run, event: e.RunResumed, order: int, at: int) -> Run:
    run = _copied(old)
    run.order = order
    run.resumes = old.resumes + 1
    run.dead = event.dead
    return run


def _run_closed(old: Run, event: e.RunClosed, order: int, at: int) -> Run:
    run = _copied(old)
    run.order = order
    run.closed = True
    run.wait = None
    run.left = 0
    run.floor = run.step
    return run


def _run_swept(old: Run, event: e.RunSwept, order: int, at: int) -> Run:
    run = _copied(old)
    run.order = order
    run.swept = event.swept
    run.is_swept = event.is_done
    return run


def _signaled(_: Any, event: e.Signaled, order: int, at: int) -> Signal:
    return Signal(event.key.rpartition(":")[2], event.name, at, order, event.value.copy(), event.said)


def _signal_taken(old: Signal, event: e.SignalTaken, order: int, at: int) -> Signal | None:
    return Signal(old.id, old.name, old.at_ms, order, taken=True) if event.keeps else None


def _late_kept(_: Any, event: e.LateKept, order: int, at: int) -> Late:
    return Late(event.result, event.posted_by, at, order)


def _slot_opened(_: Any, event: e.SlotOpened, order: int, at: int) -> Slot:
    return Slot(event.cache_key, event.digest, event.leader, order=order)


def _slot_led(old: Slot, event: e.SlotLed, order: int, at: int) -> Slot:
    slot = _copied(old)
    slot.leader = event.leader
    slot.order = order
    return slot


def _slot_cached(old: Slot, event: e.SlotCached, order: int, at: int) -> Slot:
    slot = _copied(old)
    slot.leader = None
    slot.result = event.result
    slot.source = event.source
    slot.cached_ms = at
    slot.due_ms = event.expires_ms
    slot.order = order
    return slot


def _slot_closed(_: Slot, event: e.SlotClosed, order: int, at: int) -> None:
    return None


def _compacted(old: Horizon | None, event: e.Compacted, order: int, at: int) -> Horizon:
    """What one compaction let go of, a milder one does not bring back."""
    before = 0 if old is None else old.resolved_before_ms
    return Horizon(max(before, event.resolved_before_ms), order)


def _enrolled(old: Peer | None, event: e.Enrolled, order: int, at: int) -> Peer:
    return Peer(event.agent, event.role, event.token, at, None, order, event.held)


def _action_held(old: Peer, event: e.ActionHeld, order: int, at: int) -> Peer:
    peer = _copied(old)
    others = tuple(action for action in old.held if action != event.action)
    peer.held = (*others, event.action)[-ACTIONS_HELD_MAX:] if event.is_held else others
    peer.order = order
    return peer


def _token_rotated(old: Peer, event: e.TokenRotated, order: int, at: int) -> Peer:
    peer = _copied(old)
    peer.token = event.token
    peer.order = order
    return peer


def _peer_revoked(old: Peer, event: e.PeerRevoked, order: int, at: int) -> Peer:
    peer = _copied(old)
    peer.revoked_ms = at
    peer.order = order
    return peer


def _granted(_: Any, event: e.Granted, order: int, at: int) -> Grant:
    grant = _copied(event.grant)
    grant.order = order
    grant.due_ms = grant.capability.expires_ms
    return grant


def _grant_used(old: Grant, event: e.GrantUsed, order: int, at: int) -> Grant:
    grant = _copied(old)
    grant.uses = old.uses + 1
    grant.order = order
    if grant.uses == grant.capability.scope.max_uses:
        grant.revoked_ms = at
        grant.due_ms = None
    return grant


def _grant_ended(old: Grant, event: e.GrantRevoked | e.GrantExpired, order: int, at: int) -> Grant:
    grant = _copied(old)
    grant.revoked_ms = at
    grant.due_ms = None
    grant.order = order
    return grant


def _head_signed(_: SignedHead | None, event: e.HeadSigned, order: int, at: int) -> SignedHead:
    return SignedHead(event.seq, event.hash, event.signature, event.pubkey, order)


def _key_taken(_: Any, event: e.KeyTaken, order: int, at: int) -> SendKey:
    return SendKey(event.task_id, event.digest, order)


EVOLVE: dict[type, Callable[[Any, Any, int, int], Record | None]] = {
    e.Sent: _sent,
    e.Leased: _leased,
    e.Unleased: _unleased,
    e.Heartbeat: _heartbeat,
    e.Requeued: _requeued,
    e.Progressed: _progressed,
    e.Answered: _answered,
    e.Ended: _ended,
    e.CancelAsked: _cancel_asked,
    e.CascadeAsked: _cascade_asked,
    e.CascadeDone: _cascade_done,
    e.Promoted: _promoted,
    e.Due: _due,
    e.Drained: _drained,
    e.Undrained: _undrained,
    e.Parted: _parted,
    e.Said: _said,
    e.Shown: _shown,
    e.Messaged: _messaged,
    e.Updated: _updated,
    e.Asked: _asked,
    e.Chunked: _chunked,
    e.ChunkKept: _chunk_kept,
    e.Replied: _replied,
    e.PushSet: _push_set,
    e.PushDropped: _dropped,
    e.PushDelivered: _push_delivered,
    e.CardPublished: _card_published,
    e.CardWithdrawn: _dropped,
    e.Begun: _begun,
    e.RunBegun: _run_begun,
    e.Parked: _parked,
    e.Woken: _woken,
    e.TakenUp: _taken_up,
    e.Stepped: _stepped,
    e.StepKept: _step_kept,
    e.StepDropped: _dropped,
    e.EntryKept: _entry_kept,
    e.Marked: _marked,
    e.RunWaits: _run_waits,
    e.TaskAwaited: _task_awaited,
    e.RunResumed: _run_resumed,
    e.RunClosed: _run_closed,
    e.RunSwept: _run_swept,
    e.Signaled: _signaled,
    e.SignalTaken: _signal_taken,
    e.LateKept: _late_kept,
    e.SlotOpened: _slot_opened,
    e.SlotLed: _slot_led,
    e.SlotCached: _slot_cached,
    e.SlotClosed: _slot_closed,
    e.Compacted: _compacted,
    e.Enrolled: _enrolled,
    e.ActionHeld: _action_held,
    e.TokenRotated: _token_rotated,
    e.PeerRevoked: _peer_revoked,
    e.Granted: _granted,
    e.GrantUsed: _grant_used,
    e.GrantRevoked: _grant_ended,
    e.GrantExpired: _grant_ended,
    e.HeadSigned: _head_signed,
    e.KeyTaken: _key_taken,
}

CREATING = frozenset(
    (
        e.Sent,
        e.Parted,
        e.Said,
        e.ChunkKept,
        e.PushSet,
        e.CardPublished,
        e.RunBegun,
        e.StepKept,
        e.EntryKept,
        e.Marked,
        e.Signaled,
        e.LateKept,
        e.SlotOpened,
        e.Compacted,
        e.Enrolled,
        e.Granted,
        e.HeadSigned,
        e.KeyTaken,
    )
)
