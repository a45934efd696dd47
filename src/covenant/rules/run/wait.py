"""What a run waits for, and what of it is there. (Contract 22, 23.)

Whether a run parks is decided in the commit that asks for it, against what is there in that moment.
"""

from __future__ import annotations

from itertools import takewhile

from covenant.model.error import Malformed, ResultGone, TooLarge
from covenant.model.limits import Limits
from covenant.model.record import TaskRecord
from covenant.model.run import EFFECT, SignalSeen, Wait
from covenant.model.task import Result, Task
from covenant.rules.context import Context, View, each
from covenant.rules.envelope import check_id, check_key, check_time
from covenant.rules.page import Room
from covenant.rules.run.signal import first_signals
from covenant.rules.sight import lent


def checked_wait(wait: Wait, limits: Limits) -> Wait:
    if type(wait) is not Wait:
        raise Malformed("a wait is needed", field="wait")
    if not wait.tasks and not wait.signals and wait.until_ms is None:
        raise Malformed("a wait is for something", field="wait")
    for name, listed in (("tasks", wait.tasks), ("signals", wait.signals)):
        if len(listed) > limits.batch_max:
            raise TooLarge(f"a wait has too many {name}", field="wait", size=len(listed), limit=limits.batch_max)
    for task_id in wait.tasks:
        if check_id(task_id, "wait.tasks") != task_id:
            raise Malformed("ids are in small letters", field="wait.tasks")
    for pattern in wait.signals:
        check_key(pattern, "wait.signals", limits.key_bytes_max)
    if wait.until_ms is not None:
        check_time(wait.until_ms, "wait.until_ms")
    if wait.doubt is not None:
        check_key(wait.doubt, "wait.doubt", limits.key_bytes_max)
        if len(wait.signals) != 1 or not wait.signals[0].startswith(EFFECT):
            raise Malformed("what is in doubt waits for its own decision", field="wait.doubt")
    return wait


class Found:
    """Of what a run waits for: what is there, and how many of the tasks are not."""

    def __init__(self) -> None:
        self.outcomes: list[Result] = []
        self.signals: list[SignalSeen] = []
        self.left = 0
        self.is_there = False


def look(
    wait: Wait,
    task_id: str,
    view: View,
    ctx: Context,
    outcomes: dict[str, Result] | None = None,
    takes: frozenset[str] = frozenset(),
    sent: dict[str, Task] | None = None,
) -> Found:
    found = Found()
    ended: list[Result] = []

    def see(child_id: str) -> None:
        result = (outcomes or {}).get(child_id)
        if result is None and child_id not in (sent or {}):
            result = _outcome(child_id, task_id, view)
        if result is not None:
            ended.append(result)

    each(see, sorted(wait.tasks))
    found.left = len(wait.tasks) - len(ended)
    room = Room(ctx.limits)
    found.outcomes = list(takewhile(room.takes, ended))
    found.signals = first_signals(wait.signals, task_id, view, ctx, takes)
    failed = wait.fail_fast and any(result.status == "error" for result in ended)
    tasks = bool(ended) and (wait.first or found.left == 0 or failed)
    found.is_there = tasks or bool(found.signals) or (wait.until_ms is not None and wait.until_ms <= ctx.now)
    return found


def _outcome(child_id: str, task_id: str, view: View) -> Result | None:
    child = view.get(child_id)
    if not isinstance(child, TaskRecord) or child.run != task_id:
        raise ResultGone(f"task {child_id} is none of this run, or past its retention", task_id=child_id)
    return None if child.result is None else lent(child.result)
