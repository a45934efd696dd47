"""Reading the log: its newest rows, and all that happened to one task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from covenant.exchange.exchange import Exchange
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow, Logged
from covenant.model.peer import Caller
from covenant.model.query import GetTask
from covenant.model.view import QueueEntry
from covenant.rules.audit import rows_of, task_of
from covenant.rules.page import Room
from covenant.store.engine import Store

_STORY_MAX: Final = 1000
_SCAN_MAX: Final = 2000


async def recent_rows(
    store: Store, limit: int, before: int | None, wanted: Callable[[AuditRow], bool]
) -> tuple[list[AuditRow], int | None]:
    """Rows that pass, the newest first, and where to go on; looks at a bounded stretch of the log."""
    rows: list[AuditRow] = []  # of whole commits: the last may bring a few more than were asked for
    room = Room(store.limits)
    scanned = 0
    while len(rows) < limit and scanned < _SCAN_MAX and not room.is_full:
        stretch = await store.log_back(before, min(_SCAN_MAX - scanned, 200))
        if not stretch:
            return rows, None
        for logged in stretch:
            scanned += 1
            before = logged.seq
            passed = [row for row in reversed(list(rows_of(logged))) if wanted(row)]
            rows += passed
            if len(rows) >= limit or not all(map(room.takes, passed)):
                break
    return rows, before


async def story(x: Exchange, caller: Caller, task_id: str) -> tuple[QueueEntry, list[AuditRow], bool]:
    """What happened to a task, in order, and whether the log still reaches back to its beginning."""
    entry: QueueEntry = await x.ask(caller, GetTask(x.by(caller), task_id))
    task_id = entry.task.id
    rows: list[AuditRow] = []
    seq, scanned = await x.store.order_of(task_id), 0
    while seq > 0 and scanned < _STORY_MAX:
        trail = await x.store.log_trail(seq, task_id, _STORY_MAX - scanned)
        if not trail:
            break
        told = (row for logged in reversed(trail) for row in rows_of(logged) if _is_about(row, logged, task_id))
        rows = [*told, *rows]
        scanned += len(trail)
        seq = trail[-1].previous(task_id)
    if not caller.is_operator:
        rows = [row for row in rows if _is_for(row, caller.agent)]
    return entry, rows, seq == 0


def _is_about(row: AuditRow, logged: Logged, task_id: str) -> bool:
    """A row of this task, or one without a task in a commit that is about this one alone."""
    if row.task_id is not None:
        return row.task_id == task_id
    return {task_of(event) for event in logged.events} <= {task_id, None}


def _is_for(row: AuditRow, party: AgentId) -> bool:
    """By which grant somebody else was let in, and what else it did in the same commit, is not this party's to know."""
    if row.kind == "capability_check":
        return row.actor == party.display
    return row.task_id is not None
