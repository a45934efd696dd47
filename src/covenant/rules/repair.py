"""Repair and the retry gate: explicit, bounded, audited. (Contract 12, 13.)"""

from __future__ import annotations

from collections import Counter

from covenant.model import event as e
from covenant.model.audit import AuditRow
from covenant.model.command import RepairTask, RetryStale
from covenant.model.error import BadCursor, LeaseMismatch, Malformed, NotLeased, NotPermitted
from covenant.model.limits import SPAN_MS_MAX
from covenant.model.record import Outcome, TaskRecord, TaskState
from covenant.model.repair import (
    ForceError,
    RepairOutcome,
    RepairRequest,
    Requeue,
    RetryCandidate,
    RetryPolicy,
    RetryReport,
    RetrySkip,
    SkipReason,
)
from covenant.model.task import Result
from covenant.rules.context import Commit, Context, View
from covenant.rules.end import end, end_asked
from covenant.rules.envelope import check_count, check_id, check_risk, check_text
from covenant.rules.sight import lease_age_ms, visible_task

_COUNT_MAX = 2**31


def repair(command: RepairTask, view: View, ctx: Context) -> Commit:
    request = command.request
    if type(request) is not RepairRequest or type(request.command) not in (Requeue, ForceError):
        raise Malformed("a repair request with `requeue` or `force_error` is needed", field="request")
    order = request.command
    check_text(request.reason, "reason", ctx.limits.text_bytes_max)
    record = visible_task(check_id(request.task_id, "task_id"), command.by, view, ctx)
    if command.by is not None and ctx.granted is None:
        raise NotPermitted("only the operator repairs a lease", task_id=record.task.id)
    if record.lease is None:
        raise NotLeased(f"task {record.task.id} is not in flight", task_id=record.task.id, state=record.state)
    if order.lease_id is not None and check_id(order.lease_id, "lease_id") != record.lease.lease_id:
        raise LeaseMismatch(
            "the task is held by another lease",
            task_id=record.task.id,
            expected=order.lease_id,
            actual=record.lease.lease_id,
        )
    if isinstance(order, Requeue):
        return _requeue(order, request.reason, record, command, view, ctx)
    return _force_error(order, request.reason, record, command, view, ctx)


def _requeue(order: Requeue, reason: str, record: TaskRecord, command: RepairTask, view: View, ctx: Context) -> Commit:
    check_risk(order.duplicate_risk)
    assert record.lease is not None
    row = _row("requeue", record, reason, order.duplicate_risk)
    if record.cancel_reason is not None:
        return _cancel_instead(record, row, view)
    event = e.Requeued(record.task.id, record.lease.lease_id, "repaired", reason)
    outcome = RepairOutcome(record.task.id, "requeued", TaskState.QUEUED, record.attempt, record.generation + 1)
    return Commit((event,), outcome, (row,))


def _cancel_instead(record: TaskRecord, row: AuditRow, view: View) -> Commit:
    """The sender has asked for a cancel, and now nobody holds the task: there is nothing left to requeue."""
    events, then = end_asked(record, view)
    outcome = RepairOutcome(record.task.id, "canceled", TaskState.RESULT_PENDING, record.attempt, record.generation + 1)
    return Commit(events, outcome, (row,), then)


def _force_error(
    order: ForceError, reason: str, record: TaskRecord, command: RepairTask, view: View, ctx: Context
) -> Commit:
    check_text(order.message, "message", ctx.limits.text_bytes_max)
    events = end(record, Outcome.FORCED, order.message, view)
    row = _row("force_error", record, reason, None)
    result = Result(record.task.id, "error", (), order.message)
    outcome = RepairOutcome(
        record.task.id, "forced_error", TaskState.RESULT_PENDING, record.attempt, record.generation + 1, result
    )
    return Commit(tuple(events), outcome, (row,))


def _row(action: str, record: TaskRecord, reason: str, risk: str | None) -> AuditRow:
    assert record.lease is not None
    return AuditRow(
        "repair",
        action,
        task_id=record.task.id,
        lease_id=record.lease.lease_id,
        attempt=record.attempt,
        reason=reason,
        duplicate_risk=risk,
        declared=declared_safety(record),
    )


def declared_safety(record: TaskRecord) -> str:
    """What the task says of itself; missing metadata is `unsafe`."""
    idempotency = record.task.idempotency
    return "unsafe" if idempotency is None else idempotency.duplicate_safety


def retry_stale(command: RetryStale, view: View, ctx: Context) -> Commit:
    """One pass of the gate over the oldest leases. Disabled, it decides the same and does nothing."""
    policy = _checked(command.policy, ctx)
    if command.by is not None:
        raise NotPermitted("only the operator runs the retry gate")
    records = view.leases(_after(command.cursor), policy.scan_limit)
    chosen: list[TaskRecord] = []
    skipped: list[RetrySkip] = []
    exhausted: list[str] = []
    for record in records:
        reason = skip_reason(record, policy, len(chosen), ctx)
        if reason is None:
            chosen.append(record)
            continue
        skipped.append(RetrySkip(record.task.id, reason, record.attempt, lease_age_ms(record, ctx.now)))
        if reason is SkipReason.MAX_ATTEMPTS_REACHED:
            exhausted.append(record.task.id)
    candidates = [_candidate(record, ctx.now) for record in chosen]
    last = records[-1].lease if len(records) == policy.scan_limit and records else None
    report = RetryReport(
        policy=policy,
        considered=len(records),
        requeued=candidates if policy.enabled else [],
        would_requeue=[] if policy.enabled else candidates,
        skipped=skipped,
        exhausted=exhausted,
        cursor=None if last is None else str(last.seen_order),
    )
    events, rows = _retry_events(chosen) if policy.enabled else ((), ())
    if command.scheduled:
        rows = (*rows, _scan_row(report))
    return Commit(events, report, rows)


def skip_reason(record: TaskRecord, policy: RetryPolicy, chosen: int, ctx: Context) -> SkipReason | None:
    """Why the gate leaves this lease alone; None means that it may be requeued."""
    if record.asks is not None:
        return SkipReason.WAITING_FOR_INPUT
    if lease_age_ms(record, ctx.now) < policy.min_lease_age_ms:
        return SkipReason.LEASE_TOO_YOUNG
    if record.task.idempotency is None:
        return SkipReason.MISSING_IDEMPOTENCY
    if not record.task.is_idempotent:
        return SkipReason.UNSAFE_DUPLICATE_SAFETY
    if record.cancel_reason is not None:
        return SkipReason.CANCEL_REQUESTED
    if record.attempt >= policy.max_attempts:
        return SkipReason.MAX_ATTEMPTS_REACHED
    if chosen >= policy.max_requeues:
        return SkipReason.LIMIT_REACHED
    if ctx.may_requeue is not None and not ctx.may_requeue(record):
        return SkipReason.CAPABILITY_SCOPE_MISMATCH
    return None


def _checked(policy: RetryPolicy, ctx: Context) -> RetryPolicy:
    if type(policy) is not RetryPolicy or type(policy.enabled) is not bool:
        raise Malformed("a retry policy is needed", field="policy")
    check_count(policy.min_lease_age_ms, "min_lease_age_ms", SPAN_MS_MAX)
    check_count(policy.max_attempts, "max_attempts", _COUNT_MAX)
    check_count(policy.max_requeues, "max_requeues", ctx.limits.step_records_max)
    check_count(policy.scan_limit, "scan_limit", ctx.limits.page_max)
    return policy


def _after(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not isinstance(cursor, str) or not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise BadCursor("not a cursor of retry_stale")
    return int(cursor)


def _candidate(record: TaskRecord, now: int) -> RetryCandidate:
    assert record.lease is not None and record.task.idempotency is not None
    key = record.task.idempotency.key
    return RetryCandidate(record.task.id, record.lease.lease_id, record.attempt, key, lease_age_ms(record, now))


def _retry_events(chosen: list[TaskRecord]) -> tuple[tuple[e.Event, ...], tuple[AuditRow, ...]]:
    reason = "retry gate: the lease is stale"
    events = []
    rows = []
    for record in chosen:
        assert record.lease is not None
        events.append(e.Requeued(record.task.id, record.lease.lease_id, "retried", reason))
        rows.append(_row("auto_requeue", record, reason, "idempotent"))
    return tuple(events), tuple(rows)


def _scan_row(report: RetryReport) -> AuditRow:
    by_reason = Counter(f"skipped.{skip.reason}" for skip in report.skipped)
    counts = {
        "considered": report.considered,
        "requeued": len(report.requeued),
        "would_requeue": len(report.would_requeue),
        "skipped": len(report.skipped),
        "exhausted": len(report.exhausted),
        **by_reason,
    }
    return AuditRow("a2a_auto_retry_scheduler_scan", counts=counts)
