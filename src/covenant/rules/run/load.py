"""What the holder of a run asks, to go on with it. (Contract 18-24.)"""

from __future__ import annotations

from typing import Final

from covenant.model.query import FindEntry, LoadRun, LookAround
from covenant.model.record import TaskRecord
from covenant.model.run import (
    Entry,
    EntryFound,
    Mark,
    Memo,
    Run,
    RunLoaded,
    Standing,
    Step,
    StepSeen,
    entry_key,
    step_key,
)
from covenant.rules.context import Context, Lacks, View, each
from covenant.rules.envelope import check_count, check_key
from covenant.rules.page import Room
from covenant.rules.run.entry import marked
from covenant.rules.run.hold import held_run
from covenant.rules.run.signal import every_signal
from covenant.rules.run.wait import checked_wait, look
from covenant.rules.sight import lent

_NUMBER_MAX: Final = 2**53


def load_run(query: LoadRun, view: View, ctx: Context) -> RunLoaded:
    """The steps since the last checkpoint, as many as an answer carries, with what they name."""
    record, run = held_run(query.lease_id, query.by, view, ctx)
    after = check_count(query.after, "after", _NUMBER_MAX)
    if run is None:
        return RunLoaded(
            record.task.id,
            record.generation,
            ctx.now,
            cancel_requested=record.cancel_reason is not None,
            cancel_reason=record.cancel_reason,
        )
    steps: list[StepSeen] = []
    following: int | None = None
    room = Room(ctx.limits)
    first = max(after, run.floor) + 1
    last = min(run.step, first + ctx.limits.page_max - 1)
    lacks = Lacks()
    for number, step in view.pieces(step_key(run.task_id, ""), first, last):
        if lacks.is_enough:
            break
        if isinstance(step, Step):
            with lacks:
                loaded = _step_seen(number, step, run, view)
                if not room.takes(loaded):
                    following = number - 1
                    break
                steps.append(loaded)
    else:
        following = last if last < run.step else None
    lacks.settle()
    return RunLoaded(
        run.task_id,
        record.generation,
        ctx.now,
        run.step,
        run.entries,
        run.floor_leaf,
        run.checkpoints,
        run.state,
        run.resumes,
        steps,
        following,
        record.cancel_reason is not None,
        record.cancel_reason,
    )


def _step_seen(number: int, step: Step, run: Run, view: View) -> StepSeen:
    entries: dict[int, str] = {}
    outcomes = []

    def see(memo: Memo) -> None:
        if memo.entry is not None:
            entry = view.get(entry_key(run.task_id, memo.entry))
            if isinstance(entry, Entry):
                entries[memo.entry] = entry.id
        if memo.task is not None:
            child = view.get(memo.task)
            if isinstance(child, TaskRecord) and child.run == run.task_id and child.result is not None:
                outcomes.append(lent(child.result))

    each(see, step.memos)
    return StepSeen(number, step.memos, entries, outcomes)


def look_around(query: LookAround, view: View, ctx: Context) -> Standing:
    record, run = held_run(query.lease_id, query.by, view, ctx)
    wait = checked_wait(query.wait, ctx.limits)
    found = look(wait, record.task.id, view, ctx)
    signals = every_signal(wait.signals, record.task.id, view, ctx) if query.every else found.signals
    return Standing(
        record.task.id,
        0 if run is None else run.step,
        record.generation,
        ctx.now,
        outcomes=found.outcomes,
        signals=signals,
        cancel_requested=record.cancel_reason is not None,
        cancel_reason=record.cancel_reason,
    )


def find_entry(query: FindEntry, view: View, ctx: Context) -> EntryFound | None:
    record, _ = held_run(query.lease_id, query.by, view, ctx)
    check_key(query.key, "key", ctx.limits.key_bytes_max)
    mark = view.get(marked(record.task.id, query.key))
    if not isinstance(mark, Mark):
        return None
    entry = view.get(entry_key(record.task.id, mark.entry))
    assert isinstance(entry, Entry)
    return EntryFound(mark.entry, entry.id, mark.digest)
