"""A run whose worker is dead is taken up again. (Contract 23.)"""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.audit import AuditRow
from covenant.model.command import ResumeRun
from covenant.model.error import LeaseMismatch, Malformed, NotARun, NotLeased, NotProvenDead, ResumesExhausted
from covenant.model.record import TaskRecord, TaskState
from covenant.model.run import Resumed, Run, run_key
from covenant.rules.context import Commit, Context, View
from covenant.rules.end import end_asked
from covenant.rules.envelope import check_id, check_text
from covenant.rules.repair import declared_safety
from covenant.rules.run.begin import beginning
from covenant.rules.run.hold import check_own
from covenant.rules.sight import lent, visible_task


def resume(command: ResumeRun, view: View, ctx: Context) -> Commit:
    """A dead worker's run goes on under a new lease; a task of a run that may be done twice is done again, by who asks,
    and one that may not is for repair. A run that its worker has not begun with begins here: that it is one at all,
    only its agent knows. The operator asks for nobody in particular, and so leaves it to whoever comes."""
    task_id = check_id(command.task_id, "task_id")
    check_text(command.reason, "reason", ctx.limits.text_bytes_max)
    check_text(command.dead, "dead", ctx.limits.text_bytes_max)
    if command.incarnation is not None:
        check_text(command.incarnation, "incarnation", ctx.limits.key_bytes_max)  # it will commit under this name
    record = visible_task(task_id, command.by, view, ctx)
    check_own(command.by, record, ctx)
    lease, run = record.lease, view.get(run_key(task_id))
    is_redone = run is None and record.run is not None and declared_safety(record) == "idempotent"
    may_be_repeated = run.dead == command.dead if isinstance(run, Run) else is_redone
    if may_be_repeated and command.dead != command.incarnation and _is_taken_over(command, record):
        lease_id = "" if lease is None else lease.lease_id
        return Commit((), Resumed(lent(record.task), lease_id, record.attempt, record.generation))
    if run is None and not is_redone and (command.by is None or record.run is not None):
        raise NotARun(f"task {task_id} is no run, or has not begun", task_id=task_id)
    if lease is None:
        raise NotLeased(f"task {task_id} is not in flight", task_id=task_id, state=record.state)
    if lease.incarnation != command.dead:
        raise LeaseMismatch("it is held by another worker", task_id=task_id, expected=command.dead)
    if lease.incarnation == command.incarnation:
        raise Malformed("a worker cannot vouch for its own death", field="dead")
    _check_dead(command, record, ctx)
    row = AuditRow(
        "resume",
        command.evidence,
        subject=command.dead,
        task_id=task_id,
        lease_id=lease.lease_id,
        attempt=record.attempt,
        reason=command.reason,
        declared=declared_safety(record),
    )
    if record.cancel_reason is not None:
        events, then = end_asked(record, view)
        reply = Resumed(lent(record.task), "", record.attempt, record.generation + 1)
        return Commit(events, reply, (row,), then)
    if is_redone:
        return _redo(command, record, row, ctx)
    return _take_over(command, record, run if isinstance(run, Run) else None, row, view, ctx)


def _redo(command: ResumeRun, record: TaskRecord, row: AuditRow, ctx: Context) -> Commit:
    """The next attempt at a task of a run. Who asks gets it in the same commit: the dead may still stand in the queue,
    and be handed it again."""
    task_id, lease = record.task.id, record.lease
    assert lease is not None
    requeued = e.Requeued(task_id, lease.lease_id, "resumed", command.reason)
    if command.incarnation is None:
        return Commit((requeued,), Resumed(lent(record.task), "", record.attempt, record.generation + 1), (row,))
    lease_id = ctx.ids.lease()
    leased = e.Leased(task_id, lease_id, command.incarnation)
    reply = Resumed(lent(record.task), lease_id, record.attempt + 1, record.generation + 2)
    return Commit((requeued, leased), reply, (row,))


def _take_over(
    command: ResumeRun, record: TaskRecord, run: Run | None, row: AuditRow, view: View, ctx: Context
) -> Commit:
    task_id = record.task.id
    if run is not None and run.resumes >= ctx.limits.resumes_max and command.by is not None:
        raise ResumesExhausted(
            f"it was taken up {run.resumes} times and got no further: the operator decides", task_id=task_id
        )
    begun = beginning(record, view, ctx) if run is None else ()
    counted = e.RunResumed(run_key(task_id), command.dead)
    lease_id = ctx.ids.lease()
    if command.incarnation is not None:
        taken_up = e.TakenUp(task_id, lease_id, command.incarnation)
        reply = Resumed(lent(record.task), lease_id, record.attempt, record.generation)
        return Commit((*begun, taken_up, counted), reply, (row,))
    restates = record.asks is not None
    woken = (e.TakenUp(task_id, lease_id, ""), e.Woken(task_id, restates))
    requeued = _requeue_of_the_dead(command, record, view, ctx)
    given = [event.key for event in requeued]
    reply = Resumed(lent(record.task), "", record.attempt, record.generation + restates, given)
    return Commit((*begun, *woken, counted, *requeued), reply, (row,))


def _requeue_of_the_dead(command: ResumeRun, record: TaskRecord, view: View, ctx: Context) -> list[e.Requeued]:
    """The tasks of a run that its dead worker held, too, as far as they may be done twice."""
    held_by_it = [
        child
        for child in view.leases(0, ctx.limits.scan_max, record.recipient)
        if child.run == record.task.id and _held_by(child, record.recipient, command.dead)
    ]
    safe = [child for child in held_by_it if declared_safety(child) == "idempotent" and child.cancel_reason is None]
    return [
        e.Requeued(child.task.id, child.lease.lease_id, "resumed", command.reason)
        for child in safe[: ctx.limits.step_records_max]
        if child.lease is not None
    ]


def _held_by(child: TaskRecord, agent: str, incarnation: str) -> bool:
    """An agent knows of its own workers only: others may give theirs the same names."""
    return child.recipient == agent and child.lease is not None and child.lease.incarnation == incarnation


def _is_taken_over(command: ResumeRun, record: TaskRecord) -> bool:
    """It was done before, and the answer was lost."""
    if command.incarnation is None:
        return record.state is TaskState.PARKED and record.ready_for is not None
    return record.lease is not None and record.lease.incarnation == command.incarnation


def _check_dead(command: ResumeRun, record: TaskRecord, ctx: Context) -> None:
    """A worker that was silent for long enough is dead to us; or the agent itself vouches for it, which knows."""
    if command.evidence == "attested":
        return
    if command.evidence != "lapsed":
        raise Malformed("evidence is `lapsed` or `attested`", field="evidence")
    assert record.lease is not None
    silent_ms = ctx.now - record.lease.seen_ms
    lapse_ms = ctx.limits.run_lapse_ms
    if silent_ms < lapse_ms:
        raise NotProvenDead(
            f"its worker gave a sign of life {max(0, silent_ms)} ms ago: it counts as dead after {lapse_ms} ms of "
            "silence, or when somebody who knows attests it",
            task_id=record.task.id,
            silent_ms=max(0, silent_ms),
            lapse_ms=lapse_ms,
        )
