"""What can be asked of a run: by its holder, to go on with it, and by people, to see how it is. (Contract 18-24.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import structs

from covenant.model.agent import AgentId
from covenant.model.error import NotARun
from covenant.model.query import FindEntry, GetRun, ListEntries, ListRuns, LoadRun, LookAround
from covenant.model.record import Said, TaskRecord, TaskState, said_key
from covenant.model.run import (
    NOTHING,
    Entry,
    EntryFound,
    EntryPage,
    EntrySeen,
    EntryType,
    Mark,
    Run,
    RunLoaded,
    RunPage,
    RunSeen,
    RunStatus,
    Signal,
    Standing,
    Step,
    StepSeen,
    entry_key,
    run_key,
    step_key,
)
from covenant.rules.context import Context, View
from covenant.rules.envelope import check_count, check_cursor, check_id, check_key
from covenant.rules.page import Room
from covenant.rules.protocol import first_message
from covenant.rules.repair import declared_safety
from covenant.rules.retention import is_retained
from covenant.rules.run.entry import marked
from covenant.rules.run.hold import held_run
from covenant.rules.run.signal import every_signal
from covenant.rules.run.wait import checked_wait, look
from covenant.rules.sight import lease_age_ms, lent, visible_task

_NUMBER_MAX: Final = 2**53
_CHUNK: Final = 256
_SHOWN_MAX: Final = 20
_ERROR_CHARS: Final = 400


# --- for the holder ----------------------------------------------------------------------------------------


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
    for number, step in view.pieces(step_key(run.task_id, ""), first, last):
        if isinstance(step, Step):
            loaded = _step_seen(number, step, run, view)
            if not room.takes(loaded):
                following = number - 1
                break
            steps.append(loaded)
    else:
        following = last if last < run.step else None
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
    for memo in step.memos:
        if memo.entry is not None:
            entry = view.get(entry_key(run.task_id, memo.entry))
            if isinstance(entry, Entry):
                entries[memo.entry] = entry.id
        if memo.task is not None:
            child = view.get(memo.task)
            if isinstance(child, TaskRecord) and child.run == run.task_id and child.result is not None:
                outcomes.append(lent(child.result))
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


# --- for people --------------------------------------------------------------------------------------------


def list_entries(query: ListEntries, view: View, ctx: Context) -> EntryPage:
    """The way to a leaf, its newest part first to be told: it begins at the root, or at the last compaction on it. The
    sender of the task sees what was said on it. It looks only so far for that: then the page ends early."""
    limit = check_count(query.limit, "limit", ctx.limits.page_max)
    record = visible_task(check_id(query.task_id, "task_id"), query.by, view, ctx)
    run = view.get(run_key(record.task.id))
    if not isinstance(run, Run):
        if record.is_run:
            return EntryPage([])
        raise NotARun(f"task {record.task.id} is no run, or has not begun", task_id=record.task.id)
    if query.before is not None:
        start = check_count(query.before, "before", _NUMBER_MAX)
    elif query.leaf is not None:
        start = min(check_count(query.leaf, "leaf", _NUMBER_MAX), run.entries)
    else:
        start = run.entries if query.every else run.leaf
    found: list[EntrySeen] = []
    room = Room(ctx.limits)
    at = min(start, run.entries)
    sees_all = _sees_inside(query.by, record)
    for looked, (number, entry) in enumerate(_backwards(run, at, query.every, view)):
        if looked >= ctx.limits.scan_max:
            return EntryPage(found[::-1], number)
        if entry.said is None and not sees_all:
            continue
        shown = _entry_seen(number, entry, record, view)
        if len(found) == limit or not room.takes(shown):
            return EntryPage(found[::-1], number)
        found.append(shown)
    return EntryPage(found[::-1])


def _backwards(run: Run, at: int, every: bool, view: View) -> Iterator[tuple[int, Entry]]:
    prefix = entry_key(run.task_id, "")
    while at > 0:
        chunk = dict(view.pieces(prefix, max(1, at - _CHUNK + 1), at))
        least = max(1, at - _CHUNK + 1)
        while at >= least:
            entry = chunk.get(at)
            if not isinstance(entry, Entry):
                return
            yield at, entry
            if entry.type is EntryType.COMPACTION and not every:
                return
            at = at - 1 if every else parent_of(at, entry)
            if at == 0:
                return


def parent_of(number: int, entry: Entry) -> int:
    return number - 1 if entry.parent is None else entry.parent


def _entry_seen(number: int, entry: Entry, record: TaskRecord, view: View) -> EntrySeen:
    message = None
    if entry.said == 0:
        message = first_message(record.task)
    elif entry.said is not None:
        said = view.get(said_key(record.task.id, entry.said))
        message = said.message if isinstance(said, Said) else None
    return EntrySeen(
        number,
        entry.id,
        entry.role,
        entry.at_ms,
        parent_of(number, entry),
        entry.content,
        entry.type,
        entry.turn,
        message,
    )


def get_run(query: GetRun, view: View, ctx: Context) -> RunSeen:
    record = visible_task(check_id(query.task_id, "task_id"), query.by, view, ctx)
    if not record.is_run:
        raise NotARun(f"task {record.task.id} is no run, or has not begun", task_id=record.task.id)
    shown = run_seen(record, view, ctx)
    return shown if _sees_inside(query.by, record) else structs.replace(shown, state=NOTHING)


def _sees_inside(by: AgentId | None, record: TaskRecord) -> bool:
    """What an agent thinks and keeps is its own: who sent it the task sees what was said."""
    return by is None or by.pubkey == record.recipient


def run_seen(record: TaskRecord, view: View, ctx: Context) -> RunSeen:
    run = view.get(run_key(record.task.id))
    assert isinstance(run, Run)
    wait, lease = run.wait, record.lease
    doubted = [] if wait is None else list(_doubted(wait.tasks, view, ctx))
    doubts = [*([] if wait is None or wait.doubt is None else [wait.doubt]), *doubted]
    awaits: list[str] = []
    if wait is not None and record.state is TaskState.PARKED:
        awaits = [f"signal {name}" for name in wait.signals if wait.doubt is None]
        awaits += [f"task {task_id}" for task_id in sorted(wait.tasks)[:_SHOWN_MAX]]
    return RunSeen(
        task_id=run.task_id,
        status=status_of(record, run, bool(doubted)),
        generation=record.generation,
        attempt=record.attempt,
        agent=record.task.recipient.display,
        begun_ms=run.begun_ms,
        kind=record.task.task_kind,
        outcome=record.outcome,
        error=_error_of(record),
        step=run.step,
        entries=run.entries,
        leaf=run.leaf,
        checkpoints=run.checkpoints,
        resumes=run.resumes,
        state=run.state,
        lease_id=None if lease is None else lease.lease_id,
        incarnation=None if lease is None else lease.incarnation,
        heartbeat_ms=None if lease is None else lease.seen_ms,
        since_ms=None if lease is None else max(lease.leased_ms, run.step_ms),
        awaits=awaits,
        until_ms=None if wait is None or record.state is not TaskState.PARKED else wait.until_ms,
        doubts=doubts,
        signals=[signal.name for signal in view.signals(run.task_id, _SHOWN_MAX) if isinstance(signal, Signal)],
    )


def _error_of(record: TaskRecord) -> str | None:
    result = record.result
    return None if result is None or result.error_message is None else result.error_message[:_ERROR_CHARS]


def status_of(record: TaskRecord, run: Run, is_child_in_doubt: bool) -> RunStatus:
    if record.outcome is not None:
        return RunStatus.ENDED
    if record.state is TaskState.IN_FLIGHT:
        return RunStatus.RUNNING
    if record.state is TaskState.QUEUED:
        return RunStatus.QUEUED
    if record.ready_for is not None:
        return RunStatus.WOKEN
    if run.wait is not None and run.wait.doubt is not None:
        return RunStatus.EFFECT_IN_DOUBT
    if is_child_in_doubt:
        return RunStatus.CHILD_IN_DOUBT
    return RunStatus.AWAITING_WORK if record.asks is None else RunStatus.AWAITING_INPUT


def _doubted(tasks: frozenset[str], view: View, ctx: Context) -> Iterator[str]:
    """Tasks whose worker is silent, and that nobody may simply do again."""
    for task_id in sorted(tasks)[:_CHUNK]:
        child = view.get(task_id)
        if not isinstance(child, TaskRecord) or child.lease is None or declared_safety(child) == "idempotent":
            continue
        if lease_age_ms(child, ctx.now) >= ctx.limits.run_lapse_ms:
            yield task_id


def list_runs(query: ListRuns, view: View, ctx: Context) -> RunPage:
    """Newest first. It looks only so far for them: then the page ends early."""
    limit = check_count(query.limit, "limit", ctx.limits.page_max)
    agent = None if query.by is None else query.by.pubkey
    before = check_cursor(query.cursor, "run") if query.cursor is not None else None
    found: list[RunSeen] = []
    room = Room(ctx.limits)
    for _ in range(0, ctx.limits.scan_max, _CHUNK):
        chunk = view.recent(agent, before, _CHUNK)
        for record in chunk:
            if record.is_run and is_retained(record, ctx):
                shown = run_seen(record, view, ctx)
                if query.status is None or shown.status is query.status:
                    brief = structs.replace(shown, state=NOTHING)
                    if len(found) == limit or not room.takes(brief):
                        return RunPage(found, f"run:{before}")
                    found.append(brief)
            before = record.sent_order
        if len(chunk) < _CHUNK:
            return RunPage(found)
    return RunPage(found, f"run:{before}")
