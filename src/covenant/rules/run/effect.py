"""An effect of a run that is in doubt, and what somebody says became of it. (Contract 21.)"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from covenant.model import event as e
from covenant.model.audit import AuditRow
from covenant.model.command import JudgeEffect
from covenant.model.error import Malformed, NotInDoubt
from covenant.model.record import TaskState
from covenant.model.run import Run, run_key, signal_key
from covenant.model.view import Moved
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import check_id, check_text
from covenant.rules.run.hold import check_own
from covenant.rules.run.value import check_value
from covenant.rules.sight import visible_task

_VERDICTS: Final = ("done", "failed", "retry")


def judge(command: JudgeEffect, view: View, ctx: Context) -> Commit:
    """Somebody says what became of an effect: the run hears it, and goes on."""
    task_id = check_id(command.task_id, "task_id")
    check_text(command.reason, "reason", ctx.limits.text_bytes_max)
    if command.verdict not in _VERDICTS:
        raise Malformed("a verdict is `done`, `failed` or `retry`", field="verdict")
    value = check_value(command.value, "value", ctx.limits)
    record = visible_task(task_id, command.by, view, ctx)
    check_own(command.by, record, ctx)
    run = view.get(run_key(task_id))
    wait = run.wait if isinstance(run, Run) and record.state is TaskState.PARKED else None
    if wait is None or wait.doubt is None or wait.doubt != command.effect or record.ready_for is not None:
        raise NotInDoubt(f"no effect {command.effect} of this run is in doubt", task_id=task_id)
    said = msgspec.json.encode({"verdict": command.verdict, "value": value})
    signaled = e.Signaled(signal_key(task_id, ctx.ids.lease()), wait.signals[0], Raw(said))
    row = AuditRow("effect", command.verdict, subject=command.effect, task_id=task_id, reason=command.reason)
    return Commit((signaled, e.Woken(task_id)), Moved(task_id, record.generation), (row,))
