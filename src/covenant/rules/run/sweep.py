"""What a run lets go: all that lies before its last checkpoint, and the rest when it is over. (Contract 20.)"""

from __future__ import annotations

from itertools import takewhile

from covenant.model import event as e
from covenant.model.command import SweepRun
from covenant.model.record import TaskRecord, TaskState
from covenant.model.run import Run, Step, run_key, signal_key, step_key
from covenant.rules.context import Commit, Context, Lacks, View


def sweep(command: SweepRun, view: View, ctx: Context) -> Commit:
    """One step: what lies before the last checkpoint is forgotten, and the tasks that it told of are let go."""
    run = view.get(run_key(command.task_id))
    if not isinstance(run, Run) or run.is_swept:
        return Commit(())
    if run.swept < run.floor:
        return _sweep_steps(run, view, ctx)
    if not run.closed:
        return Commit(())
    return _sweep_rest(run, command.after, view, ctx)


def _sweep_steps(run: Run, view: View, ctx: Context) -> Commit:
    events: list[e.Event] = []
    let_go: set[str] = set()
    swept = run.swept
    limit = ctx.limits.step_records_max
    lacks = Lacks()
    for number, step in view.pieces(step_key(run.task_id, ""), run.swept + 1, min(run.floor, run.swept + limit)):
        if len(events) >= limit or lacks.is_enough:
            break
        swept = number
        events.append(e.StepDropped(step_key(run.task_id, number)))
        for memo in step.memos if isinstance(step, Step) else ():
            with lacks:
                if memo.task is not None and memo.task not in let_go and _is_let_go(view.get(memo.task), run):
                    let_go.add(memo.task)
                    events.append(e.Drained(memo.task))
    lacks.settle()
    if len(events) < limit:
        swept = min(run.floor, run.swept + limit)
    events += _forgotten_keys(run.task_id, view, ctx)
    events.append(e.RunSwept(run_key(run.task_id), swept))
    return Commit(tuple(events), then=(SweepRun(None, run.task_id),))


def _forgotten_keys(task_id: str, view: View, ctx: Context) -> list[e.Event]:
    """The keys of signals that were heard stay as long as those of tasks: a run may live for ever."""
    oldest = view.heard(task_id, ctx.limits.step_records_max)
    old = takewhile(lambda signal: signal.at_ms + ctx.limits.dedup_ms <= ctx.now, oldest)
    return [e.SignalTaken(signal_key(task_id, signal.id)) for signal in old]


def _is_let_go(child: object, run: Run) -> bool:
    """Only of its own tasks: a step may name any."""
    return isinstance(child, TaskRecord) and child.run == run.task_id and child.state is TaskState.RESULT_PENDING


def _sweep_rest(run: Run, after: int, view: View, ctx: Context) -> Commit:
    """The run is over: what nobody waits for any more."""
    limit = ctx.limits.step_records_max
    children = view.children(run.task_id, after, limit)
    events: list[e.Event] = [e.Drained(child.task.id) for child in children if _is_let_go(child, run)]
    if len(children) == limit:
        return Commit(tuple(events), then=(SweepRun(None, run.task_id, children[-1].sent_order),))
    signals = view.signals(run.task_id, limit, taken=True)
    events += [e.SignalTaken(signal_key(run.task_id, kept.id)) for kept in signals]
    if len(signals) == limit:
        return Commit(tuple(events), then=(SweepRun(None, run.task_id, after),))
    events.append(e.RunSwept(run_key(run.task_id), run.swept, is_done=True))
    return Commit(tuple(events))
