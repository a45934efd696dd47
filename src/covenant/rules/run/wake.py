"""What wakes a run: its agent, a signal, and the end of a task that it waits for. (Contract 22, 23.)

Whether a run wakes is decided in the commit that brings what it waits for, as whether it parks is in the commit that
asks for it: so no wake-up can fall in between. Tasks end in many ways, and every one of them is followed here, in the
same commit: the run of a task that has ended is closed, and a run that waits for the task hears of it and is woken, if
that was what it waited for.
"""

from __future__ import annotations

from typing import Final

from msgspec import structs

from covenant.model import event as e
from covenant.model.command import CancelChildren, Command, SweepRun, WakeRun
from covenant.model.record import Key, TaskRecord, TaskState
from covenant.model.run import Run, Step, run_key, step_key
from covenant.model.view import Moved
from covenant.rules.context import Commit, Context, Lacks, View
from covenant.rules.envelope import check_id
from covenant.rules.run.hold import check_own
from covenant.rules.run.pattern import matches
from covenant.rules.sight import visible_task

ENDING: Final = frozenset((e.Answered, e.Ended, e.Replied))
_STEPS_MAX: Final = 100  # that are looked through for what a run remembers


def wake(command: WakeRun, view: View, ctx: Context) -> Commit:
    """By the agent itself, which has more to do than wait."""
    record = visible_task(check_id(command.task_id, "task_id"), command.by, view, ctx)
    check_own(command.by, record, ctx)
    parked = record.state is TaskState.PARKED and record.ready_for is None
    return Commit((e.Woken(record.task.id),) if parked else (), Moved(record.task.id, record.generation))


def wakes(record: TaskRecord, view: View, name: str) -> e.Woken | None:
    """What a signal of this name does to a run that waits for it."""
    if record.state is not TaskState.PARKED or record.ready_for is not None:
        return None
    run = view.get(run_key(record.task.id))
    if not isinstance(run, Run) or run.wait is None:
        return None
    if not any(matches(pattern, name) for pattern in run.wait.signals):
        return None
    return e.Woken(record.task.id, restates=record.asks is not None)


def follow(commit: Commit, view: View) -> None:
    """Add to a commit what follows for runs."""
    followed: _Followed | None = None
    for event in commit.events:
        if type(event) not in ENDING:
            continue
        record = view.get(event.key)
        if type(record) is TaskRecord:
            is_run = record.is_run or (len(commit.events) > 1 and _is_begun(event.key, commit))
            if is_run or record.run is not None:
                followed = followed or _Followed(view, commit)
                followed.end(record, event, is_run)
    if followed is not None:
        followed.add_to(commit)


def _is_begun(key: Key, commit: Commit) -> bool:
    """Whether the commit itself makes the task a run."""
    return any(type(event) is e.Begun and event.key == key for event in commit.events)


class _Followed:
    """Several tasks may end in one commit: each finds what those before it have left."""

    def __init__(self, view: View, commit: Commit) -> None:
        self._view = view
        self._ending = {event.key for event in commit.events if type(event) in ENDING}
        self._events: list[e.Event] = []
        self._then: list[Command] = []
        self._cascades: set[str] = set()
        self._left: dict[str, int] = {}
        self._woken: set[str] = set()
        self._lacks = Lacks()  # each may be of another run

    def end(self, record: TaskRecord, event: e.Event, is_run: bool) -> None:
        if is_run:
            self._close(record, event)
        if record.run is not None:
            with self._lacks:
                self._tell(record.run, record, event)

    def _close(self, record: TaskRecord, event: e.Event) -> None:
        """A run that was ended from outside takes its tasks with it; one that ends by itself leaves them to their
        fate."""
        task_id = record.task.id
        self._events.append(e.RunClosed(run_key(task_id)))
        self._then.append(SweepRun(None, task_id))
        if type(event) is e.Ended and not event.cascade:
            self._cascades.add(task_id)
            self._then.append(CancelChildren(None, task_id))

    def _tell(self, run_id: str, child: TaskRecord, event: e.Event) -> None:
        run, owner = self._view.get(run_key(run_id)), self._view.get(run_id)
        if not isinstance(run, Run) or run.closed or not isinstance(owner, TaskRecord) or run_id in self._ending:
            self._events.append(e.Drained(child.task.id))
            return
        wait = run.wait
        if wait is None or owner.state is not TaskState.PARKED or child.task.id not in wait.tasks:
            if self._is_forgotten(child, run):
                self._events.append(e.Drained(child.task.id))
            return
        left = self._left[run_id] = self._left.get(run_id, run.left) - 1
        self._events.append(e.TaskAwaited(run_key(run_id)))
        failed = event.result.status == "error"  # type: ignore[union-attr]  # every ending has one
        is_there = wait.first or left <= 0 or (wait.fail_fast and failed)
        if is_there and owner.ready_for is None and run_id not in self._woken:
            self._woken.add(run_id)
            self._events.append(e.Woken(run_id, restates=owner.asks is not None))

    def _is_forgotten(self, child: TaskRecord, run: Run) -> bool:
        """It was asked for before the last checkpoint, or in its commit, and no step names it any more: a sweep would
        not find it. Where many steps would have to be asked, it is left to the end of the run."""
        if not run.checkpoints or child.run_step > run.floor + 1 or run.step - run.floor > _STEPS_MAX:
            return False
        steps = self._view.pieces(step_key(run.task_id, ""), run.floor + 1, run.step)
        memos = (memo for _, step in steps if isinstance(step, Step) for memo in step.memos)
        return all(memo.task != child.task.id for memo in memos)

    def add_to(self, commit: Commit) -> None:
        self._lacks.settle()
        if not self._events:
            return
        events = [
            structs.replace(event, cascade=True) if type(event) is e.Ended and event.key in self._cascades else event
            for event in commit.events
        ]
        commit.events = (*events, *self._events)
        commit.then = (*commit.then, *self._then)
