"""`covenant a2a status`: what is queued, in flight and pending, and what is stuck."""

from __future__ import annotations

from collections import Counter
from typing import Final

import click
from msgspec import Struct, structs

from covenant.cli.bounds import AGE_MS
from covenant.cli.entry import STALE_MS, between, is_stale, result_brief, state_cell, status_cell
from covenant.cli.option import Spelled, answers, cursor_option, limit_option
from covenant.cli.session import Session
from covenant.cli.table import Cell, Column, print_table
from covenant.cli.words import ago, brief, counted
from covenant.model.record import TaskState
from covenant.model.span import span
from covenant.model.task import Result
from covenant.model.view import QueueEntry
from covenant.serve import wire as w
from covenant.serve.why import is_stranded, reason_of

_ADVISED_MAX: Final = 3
_STALE_MAX: Final = 100  # that are looked for beside a page
_LOOKS_MAX: Final = 100
_STATES: Final = ("queued", "in-flight", "parked", "result-pending")


class Status(Struct, tag="a2a_status", tag_field="kind"):
    """What was asked, and what was found: every member is always there."""

    limit: int
    min_lease_age_ms: int | None
    deadline_within_ms: int | None
    state_filter: TaskState | None
    tasks: list[QueueEntry]
    results: list[Result]
    cursor: str | None
    revoked: list[str]


@click.command()
@limit_option(w.PAGE)
@click.option("--min-lease-age-ms", type=AGE_MS, help="Of leases, only those silent for so many ms.")
@click.option("--deadline-within-ms", type=AGE_MS, help="Only what is due within so many ms.")
@click.option("--state", type=Spelled(_STATES), help="Only what is in this state.")
@cursor_option
@answers
def status(
    session: Session,
    limit: int,
    min_lease_age_ms: int | None,
    deadline_within_ms: int | None,
    state: str | None,
    cursor: str | None,
) -> None:
    """What is queued, in flight and pending, and what is stuck."""
    wanted = None if state is None else TaskState(state.replace("-", "_"))
    page = session.ask(
        w.Queue(
            limit=limit,
            min_lease_age_ms=min_lease_age_ms,
            deadline_within_ms=deadline_within_ms,
            state=wanted,
            cursor=cursor,
        ),
        w.QueueReply,
    )
    bounds = (limit, min_lease_age_ms, deadline_within_ms, wanted)
    found = Status(*bounds, page.tasks, page.results, page.cursor, page.revoked)
    session.answer(found, lambda: _tell(session, found, is_whole=cursor is None and page.cursor is None))


def _tell(session: Session, found: Status, is_whole: bool) -> None:
    """Print the counts, the tasks, the results, and what moves those that are stuck.

    The head line counts everything, or says that it counts one page or what passes the filters. Stale leases are looked
    for beyond the page, since the tasks that are stuck may stand behind any number of others.
    """
    stale = [entry for entry in found.tasks if is_stale(entry)]
    is_filtered = (found.state_filter, found.min_lease_age_ms, found.deadline_within_ms) != (None, None, None)
    if is_whole and not is_filtered:
        queued, in_flight, *parked, results = _counts(found)
        click.echo(", ".join((queued, in_flight, *parked, _counted_stale(len(stale)), results)))
    else:
        which = ", ".join(("on this page",) * (not is_whole) + ("with these filters",) * is_filtered)
        lost = ""
        if found.state_filter in (None, TaskState.IN_FLIGHT):
            stale, is_all = _find_stale(session, found.revoked)
            lost = f"; in all {'' if is_all else 'at least '}{_counted_stale(len(stale))}"
        click.echo(f"{which}: {', '.join(_counts(found))}{lost}")
    if found.tasks:
        click.echo()
        _print_tasks(found)
    if found.results:
        click.echo()
        columns = (Column("result of"), Column("status"), Column("what", fits=True))
        print_table(columns, ((one.task_id, status_cell(one), result_brief(one)) for one in found.results))
    listed = {entry.task.id: entry for entry in (*found.tasks, *stale)}.values()
    stranded = [entry for entry in listed if is_stranded(entry, found.revoked)]
    if stale := [entry for entry in stale if not is_stranded(entry, found.revoked)]:
        _advise(session, stale)
    if stranded:
        _advise_stranded(session, stranded, found.revoked)
    session.tell_more("a2a status", found.cursor, filtered=True)


def _find_stale(session: Session, revoked: list[str]) -> tuple[list[QueueEntry], bool]:
    """Return stale leases, `_STALE_MAX` or somewhat more, and whether those are all.

    A daemon looks at a bounded number of leases for each page, stale or not. Peers of these tasks that were revoked are
    added to `revoked`.
    """
    of_leases = w.Queue(limit=_STALE_MAX, state=TaskState.IN_FLIGHT, min_lease_age_ms=STALE_MS)
    stale: list[QueueEntry] = []
    for _ in range(_LOOKS_MAX):
        page = session.ask(of_leases, w.QueueReply)
        revoked += page.revoked
        stale += [entry for entry in page.tasks if is_stale(entry)]
        if page.cursor is None or len(stale) >= _STALE_MAX:
            return stale, page.cursor is None
        of_leases = structs.replace(of_leases, cursor=page.cursor)
    return stale, False


def _counted_stale(stale: int) -> str:
    lost = counted(stale, "stale lease")
    return click.style(lost, fg="red", bold=True) if stale else lost


def _counts(found: Status) -> list[str]:
    """Return the counts in words, of each state that was asked for."""
    count = Counter(entry.state for entry in found.tasks)
    parked = count[TaskState.PARKED]
    told = {
        TaskState.QUEUED: f"{count[TaskState.QUEUED]} queued",
        TaskState.IN_FLIGHT: f"{count[TaskState.IN_FLIGHT]} in flight",
        TaskState.PARKED: f"{parked} parked" if parked or found.state_filter else "",
        TaskState.RESULT_PENDING: f"{counted(len(found.results), 'result')} pending",
    }
    return [text for state, text in told.items() if text and found.state_filter in (None, state)]


def _print_tasks(found: Status) -> None:
    columns = (
        Column("task"),
        Column("state"),
        Column("from → to", fits=True),
        Column("since"),
        Column("what", fits=True),
    )
    print_table(columns, (_row(entry, found.revoked) for entry in found.tasks))


def _row(entry: QueueEntry, revoked: list[str]) -> tuple[str | Cell, ...]:
    since = entry.sent_ms if entry.heartbeat_ms is None else entry.heartbeat_ms
    return (
        entry.task.id,
        Cell("revoked", "red") if is_stranded(entry, revoked) else state_cell(entry),
        between(entry.task),
        ago(since),
        brief(entry.task.intent_text),
    )


def _advise_stranded(session: Session, stranded: list[QueueEntry], revoked: list[str]) -> None:
    click.echo("\nrevoked: these wait for peers that were thrown out, and nobody else can do them.")
    for entry in stranded[:_ADVISED_MAX]:
        why = reason_of(entry, revoked=revoked)
        click.echo(f"  {session.command((why.command or '').removeprefix('covenant '))}")
    click.echo(f"or let them in again; each of them: {session.command('why TASK_ID')}")


def _advise(session: Session, stale: list[QueueEntry]) -> None:
    """A lease is never taken away by itself: say what a person can do about it."""
    click.echo(f"\nstale: no sign of life for more than {span(STALE_MS)}. If a holder is gone, this moves its task:")
    for entry in stale[:_ADVISED_MAX]:
        command = reason_of(entry).command or ""
        click.echo(f"  {session.command(command.removeprefix('covenant '))}")
    if len(stale) > _ADVISED_MAX:
        every = f"a2a status --state in-flight --min-lease-age-ms {STALE_MS}"
        click.echo(f"  and so on; each of them: {session.command('why TASK_ID')}")
        click.echo(f"all that are stale: {session.command(every)}")
    if any(entry.task.is_idempotent for entry in stale):
        click.echo(f"What may be done twice, all at once: {session.command('a2a retry-stale')}")
