"""What has happened: the story of a task, and the audit."""

from __future__ import annotations

from functools import partial
from typing import Final

from covenant.exchange.exchange import Exchange
from covenant.exchange.history import recent_rows
from covenant.exchange.history import story as story_of
from covenant.model import query as q
from covenant.model.audit import AuditRow
from covenant.model.error import NotARun
from covenant.model.peer import Caller
from covenant.model.run import RunSeen
from covenant.model.view import QueueEntry
from covenant.rules.audit import check_row_filters
from covenant.rules.envelope import check_count
from covenant.serve import wire as w
from covenant.serve.why import reason_of

_SEQ_MAX: Final = 2**53  # of an event, in JSON


async def story(x: Exchange, caller: Caller, r: w.Story) -> w.StoryReply:
    entry, rows, complete = await story_of(x, caller, r.task_id)
    run = await _open_run(x, caller, entry)
    revoked = x.revoked_in([entry])
    why = reason_of(entry, run=run, revoked=revoked)
    return w.StoryReply(
        entry=entry,
        rows=rows,
        reason=why.reason,
        explanation=why.explanation,
        command=why.command,
        complete=complete,
        run=run,
        revoked=revoked,
    )


async def _open_run(x: Exchange, caller: Caller, entry: QueueEntry) -> RunSeen | None:
    if entry.outcome is not None or not entry.attempt:
        return None
    try:
        run: RunSeen = await x.ask(caller, q.GetRun(x.by(caller), entry.task.id))
    except NotARun:
        return None
    return run


async def recent_audit(x: Exchange, caller: Caller, r: w.RecentAudit) -> w.AuditReply:
    """The operator, and who may read the audit, sees all rows; anybody else its own, and may ask for no other's."""
    own = caller.agent.display
    actor, task_id = check_row_filters(r.row, r.actor, r.task_id)
    limit = check_count(r.limit, "limit", x.store.limits.page_max)
    before = None if r.before is None else check_count(r.before, "before", _SEQ_MAX)
    is_reader = actor != own and (actor is not None or await x.may(caller, "audit.read"))
    if not is_reader:
        actor = own

    def wanted(row: AuditRow) -> bool:
        return (
            (actor is None or row.actor == actor)
            and (task_id is None or row.task_id == task_id)
            and (r.row is None or row.kind == r.row)
        )

    read = partial(recent_rows, x.store, limit, before, wanted)
    rows, cursor = await (x.under(caller, "audit.read", read) if is_reader else read())
    return w.AuditReply(rows=rows, cursor=cursor)
