"""What people see of a run: how it is, and what was said and done on it. (Contract 18-24.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import structs

from covenant.model.agent import AgentId
from covenant.model.error import NotARun
from covenant.model.query import GetRun, ListEntries, ListRuns
from covenant.model.record import Said, TaskRecord, TaskState, said_key
from covenant.model.run import (
    NOTHING,
    Entry,
    EntryPage,
    EntrySeen,
    EntryType,
    Run,
    RunPage,
    RunSeen,
    RunStatus,
    Signal,
    entry_key,
    run_key,
)
from covenant.rules.context import Context, Lacks, Spent, View, each
from covenant.rules.envelope import check_count, check_cursor, check_id
from covenant.rules.page import Look, Room
from covenant.rules.protocol import first_message
from covenant.rules.repair import declared_safety
from covenant.rules.retention import is_retained
from covenant.rules.sight import lease_age_ms, visible_task

_NUMBER_MAX: Final = 2**53
_CHUNK: Final = 256
_SHOWN_MAX: Final = 20
_ERROR_CHARS: Final = 400


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
    room, look = Room(ctx.limits), Look(ctx.limits)
    at = min(start, run.entries)
    sees_all = _sees_inside(query.by, record)
    following: int | None = None
    lacks = Lacks()
    try:
        with lacks:
            for looked, (number, entry) in enumerate(_backwards(run, at, query.every, view, look)):
                if looked >= ctx.limits.scan_max or lacks.is_enough:
                    following = number
                    break
                at = _before(number, entry, query.every)
                if entry.said is None and not sees_all:
                    continue
                with lacks:
                    shown = _entry_seen(number, entry, record, view)
                    if len(found) == limit or not room.takes(shown):
                        following = number
                        break
                    found.append(shown)
    except Spent:
        following = at
    lacks.settle()
    return EntryPage(found[::-1], following)


def _backwards(run: Run, at: int, every: bool, view: View, look: Look) -> Iterator[tuple[int, Entry]]:
    prefix = entry_key(run.task_id, "")
    while at > 0:
        look.goes_on()
        least = max(1, at - look.at_once + 1)
        chunk = dict(view.pieces(prefix, least, at))
        look.saw(chunk.values())
        while at >= least:
            entry = chunk.get(at)
            if not isinstance(entry, Entry):
                return
            yield at, entry
            if entry.type is EntryType.COMPACTION and not every:
                return
            at = _before(at, entry, every)
            if at == 0:
                return


def _before(number: int, entry: Entry, every: bool) -> int:
    return number - 1 if every else parent_of(number, entry)


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
    doubted = [] if wait is None else _doubted(wait.tasks, view, ctx)
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


def _doubted(tasks: frozenset[str], view: View, ctx: Context) -> list[str]:
    """Tasks whose worker is silent, and that nobody may simply do again."""
    looked_at = sorted(tasks)[:_CHUNK]
    each(view.get, looked_at)
    return [task_id for task_id in looked_at if _is_in_doubt(view.get(task_id), ctx)]


def _is_in_doubt(child: object, ctx: Context) -> bool:
    if not isinstance(child, TaskRecord) or child.lease is None or declared_safety(child) == "idempotent":
        return False
    return lease_age_ms(child, ctx.now) >= ctx.limits.run_lapse_ms


def list_runs(query: ListRuns, view: View, ctx: Context) -> RunPage:
    """Newest first. It looks only so far for them: then the page ends early."""
    limit = check_count(query.limit, "limit", ctx.limits.page_max)
    agent = None if query.by is None else query.by.pubkey
    before = check_cursor(query.cursor, "run") if query.cursor is not None else None
    found: list[RunSeen] = []
    room, look, lacks = Room(ctx.limits), Look(ctx.limits), Lacks()
    come_to, is_last = 0, False

    def take(record: TaskRecord) -> None:
        look.goes_on()
        shown = run_seen(record, view, ctx)
        look.saw(view.signals(record.task.id, _SHOWN_MAX))
        if query.status is None or shown.status is query.status:
            brief = structs.replace(shown, state=NOTHING)
            if len(found) == limit or not room.takes(brief):
                raise Spent
            found.append(brief)

    try:
        with lacks:
            for _ in range(0, ctx.limits.scan_max, _CHUNK):
                chunk = view.recent(agent, before, _CHUNK)
                for record in chunk:
                    if record.is_run and is_retained(record, ctx):
                        come_to += 1
                        if query.status is None and come_to > limit:
                            raise Spent  # nobody asks for more runs than are shown
                        with lacks:
                            take(record)
                    before = record.sent_order
                is_last = len(chunk) < _CHUNK
                if is_last or lacks.is_enough:
                    break
    except Spent:
        pass
    lacks.settle()
    return RunPage(found, None if is_last else f"run:{before}")
