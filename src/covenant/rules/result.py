"""Results: bound to their lease, first writer wins, delivered once and readable again. (Contract 3, 4, 8.)"""

from __future__ import annotations

from itertools import takewhile

from covenant.model import event as e
from covenant.model.command import DrainResults, PostResult
from covenant.model.error import (
    CovenantError,
    LeaseMismatch,
    LeaseRequired,
    LeaseSuperseded,
    NotLeased,
    NotPermitted,
    PartialGap,
    ResultConflict,
    TaskTerminal,
)
from covenant.model.record import Key, Outcome, Part, Record, TaskRecord, Tombstone, late_key, part_key
from covenant.model.task import Result
from covenant.model.view import Posted
from covenant.rules.cache import keep_answer
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import check_count, same_answer, seal_result
from covenant.rules.page import Room
from covenant.rules.sight import answer_of, visible_task


def post(command: PostResult, view: View, ctx: Context) -> Commit:
    result = seal_result(command.result, ctx.limits)
    record = visible_task(result.task_id, command.by, view, ctx)
    if command.by is not None and command.by.pubkey != record.recipient:
        raise NotPermitted(f"only {record.task.recipient} answers this task", task_id=result.task_id)
    if record.outcome is not None:
        return _post_after_the_end(command, result, record, view, ctx)
    lease = record.lease
    if lease is None:
        if result.lease_id in record.lease_history:
            return _keep_late(command, result, view)
        raise NotLeased(f"task {result.task_id} is not leased", task_id=result.task_id)
    if result.lease_id is None:
        if record.attempt != 1 or lease.incarnation != command.incarnation:
            raise _lease_required(record)
    elif result.lease_id != lease.lease_id:
        if result.lease_id in record.lease_history:
            return _keep_late(command, result, view)
        raise _mismatch(result)
    if result.status == "partial":
        return _accept_partial(result, lease.lease_id, record, view)
    return _accept_final(result, lease.lease_id, record, view, ctx)


def _accept_final(result: Result, lease_id: str, record: TaskRecord, view: View, ctx: Context) -> Commit:
    task_id = result.task_id
    final = result
    if result.lease_id is None or result.sequence is not None:
        final = Result(task_id, result.status, result.content, result.error_message, lease_id, None, result.message)
    answered = e.Answered(task_id, final)
    reply = Posted(task_id, record.generation + (2 if final.content else 1))
    cached, then = keep_answer(record, final, view, ctx)
    return Commit((answered, *cached), reply, then=tuple(then))


def _accept_partial(result: Result, lease_id: str, record: TaskRecord, view: View) -> Commit:
    """Progress: numbered per lease. A poster that numbers them itself may repeat one safely."""
    task_id = result.task_id
    number = record.partials + 1
    if result.sequence is not None and result.sequence != number:
        if result.sequence > number:
            raise PartialGap(f"the next partial is {number}", task_id=task_id, expected=number)
        first = record.partials_total - record.partials
        known = view.get(part_key(task_id, first + result.sequence))
        if isinstance(known, Part) and same_answer(known.result, result):
            return Commit((), Posted(task_id, known.generation, duplicate=True, sequence=result.sequence))
        raise ResultConflict(f"partial {result.sequence} has other content", task_id=task_id)
    part = Result(task_id, "partial", result.content, result.error_message, lease_id, number, result.message)
    generation = record.generation + 1
    key = part_key(task_id, record.partials_total + 1)
    is_kept = record.protocol or record.run is not None
    parted = e.Parted(key, part, record.sender, record.attempt, number, generation, is_kept)
    return Commit((e.Progressed(task_id), parted), Posted(task_id, generation, sequence=number))


def _post_after_the_end(command: PostResult, result: Result, record: TaskRecord, view: View, ctx: Context) -> Commit:
    answer = record.result
    assert answer is not None
    lease_id = result.lease_id
    if record.outcome == Outcome.ANSWERED and not record.replayed:
        if lease_id is None and (record.attempt != 1 or record.incarnation != command.incarnation):
            raise _lease_required(record)
        if lease_id is None or lease_id == answer.lease_id:
            if result.status == "partial":
                raise _terminal(record)
            if same_answer(answer, result):
                return Commit((), Posted(result.task_id, record.generation, duplicate=True))
            raise ResultConflict(f"task {result.task_id} has another result", task_id=result.task_id)
        if lease_id in record.lease_history:
            return _keep_late(command, result, view)
        raise _mismatch(result)
    raise _terminal(record)


def _keep_late(command: PostResult, result: Result, view: View) -> Commit:
    """Refused, and kept once for the operator to see."""
    assert result.lease_id is not None
    refusal: CovenantError = LeaseSuperseded(
        f"lease {result.lease_id} was superseded; the result is kept, not delivered",
        task_id=result.task_id,
        lease_id=result.lease_id,
    )
    key = late_key(result.task_id, result.lease_id, result.status)
    if view.get(key) is not None:
        return Commit((), refusal)
    poster = "operator" if command.by is None else command.by.pubkey
    return Commit((e.LateKept(key, result, poster),), refusal)


def _lease_required(record: TaskRecord) -> LeaseRequired:
    return LeaseRequired(
        "a result without lease_id is accepted from the holder of the first attempt only",
        task_id=record.task.id,
        attempt=record.attempt,
    )


def _mismatch(result: Result) -> LeaseMismatch:
    return LeaseMismatch(f"task {result.task_id} has no lease {result.lease_id}", task_id=result.task_id)


def _terminal(record: TaskRecord) -> TaskTerminal:
    return TaskTerminal(
        f"task {record.task.id} has ended: {record.outcome}", task_id=record.task.id, outcome=record.outcome
    )


def drain(command: DrainResults, view: View, ctx: Context) -> Commit:
    """Hand the oldest results to their sender, as many as an answer carries."""
    if command.limit != 1:
        check_count(command.limit, "limit", ctx.limits.batch_max)
    keys = view.answers(None if command.peer is None else command.peer.pubkey, command.limit)
    if not keys:
        return Commit((), [])
    found = [view.get(key) for key in keys]
    if len(found) == 1:
        return Commit((_drained(keys[0], found[0]),), [answer_of(found[0])])
    room = Room(ctx.limits)
    answers = list(takewhile(lambda answer: room.takes(answer.result), map(answer_of, found)))
    return Commit(tuple(map(_drained, keys, found[: len(answers)])), answers)


def _drained(key: Key, record: Record | Tombstone | None) -> e.Drained:
    assert isinstance(record, (TaskRecord, Part))
    return e.Drained(key, record.given_back)
