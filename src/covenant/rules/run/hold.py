"""Whose a run is: of the holder of its lease, and of its agent. (Contract 23.)"""

from __future__ import annotations

from covenant.model.agent import AgentId
from covenant.model.error import NotPermitted
from covenant.model.record import TaskRecord
from covenant.model.run import Run, run_key
from covenant.rules.context import Context, View
from covenant.rules.envelope import check_id
from covenant.rules.lease import held
from covenant.rules.sight import task_of_lease


def run_of(record: TaskRecord, view: View) -> Run | None:
    run = view.get(run_key(record.task.id)) if record.is_run else None
    return run if isinstance(run, Run) else None


def held_run(lease_id: str, by: AgentId | None, view: View, ctx: Context) -> tuple[TaskRecord, Run | None]:
    """For its holder alone."""
    record = task_of_lease(check_id(lease_id, "lease_id"), by, view, ctx)
    held(lease_id, record)
    return record, run_of(record, view)


def check_own(by: AgentId | None, record: TaskRecord, ctx: Context) -> None:
    """Or who holds a grant that lets it repair."""
    if by is not None and by.pubkey != record.recipient and ctx.granted is None:
        raise NotPermitted("only the agent of a run does this, or the operator", task_id=record.task.id)
