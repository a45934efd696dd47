"""`covenant audit`: who did what, and whether the record of it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from typing import Any, Final

import click
from msgspec import Struct

from covenant.cli.bounds import NUMBER, SEQ
from covenant.cli.database import connected, is_database, tell_lanes
from covenant.cli.folder import KeyType, journal_of, tell_integrity
from covenant.cli.option import answers, limit_option
from covenant.cli.output import written
from covenant.cli.session import Session
from covenant.cli.table import Cell, Column, print_table
from covenant.cli.words import ago, json_text, safe
from covenant.model.audit import AuditRow
from covenant.model.error import BadSetting, StoreDamaged
from covenant.serve import wire as w

_STRETCH: Final = 500


@click.group()
def audit() -> None:
    """Who did what, and whether the record of it is whole."""


@audit.command()
@limit_option(20)
@click.option("--task", "task_id", metavar="ID", help="Only rows of this task.")
@click.option("--actor", help="Only what this peer did; `system` for the clock.")
@click.option("--kind", help="Only rows of this kind.")
@click.option("--before", type=SEQ, metavar="SEQ", help="Go on where the page before ended.")
@answers
def recent(
    session: Session, limit: int, task_id: str | None, actor: str | None, kind: str | None, before: int | None
) -> None:
    """The newest rows; the last one stands at the bottom."""
    request = w.RecentAudit(limit=limit, before=before, task_id=task_id, actor=actor, row=kind)
    found = session.ask(request, w.AuditReply)
    session.answer(found, lambda: _tell(session, found))


def _tell(session: Session, found: w.AuditReply) -> None:
    if not found.rows:
        click.echo("no such rows" + ("" if found.cursor is None else " so far back"))
    else:
        columns = (Column("seq"), Column("when"), Column("who"), Column("what"), Column("more", wraps=True))
        rows = ((str(row.seq), ago(row.at_ms), *row_cells(row)) for row in reversed(found.rows))
        print_table(columns, rows)
    if found.cursor is not None:
        click.echo(f"\nolder: {session.command(f'audit recent --before {found.cursor}')} (and the same filters)")


def row_cells(row: AuditRow, *, with_task: bool = True) -> tuple[str, Cell, str]:
    """Who, what, and the rest that a row tells; in the story of one task, that is less."""
    if row.passed is None:
        what = Cell(row.kind, "")
    else:
        what = Cell(f"{row.kind}: {'yes' if row.passed else 'no'}", "green" if row.passed else "red")
    told = [row.action, row.subject, *([row.task_id, _named("grant", row.grant)] if with_task else ())]
    told += [_named("attempt", row.attempt), _named("lease", row.lease_id)]
    told += [_named("risk", row.duplicate_risk), _named("declared", row.declared)]
    told += [row.reason, *(f"{name} {count}" for name, count in row.counts.items())]
    return safe(row.actor), what, safe(", ".join(part for part in told if part))


def _named(name: str, value: object) -> str | None:
    return None if value is None else f"{name} {value}"


_store_option: Final = click.option(
    "--store", metavar="URL", help="The folder, file:PATH, or the database, postgresql://…. Default: <home>/data."
)


@audit.command()
@_store_option
@click.option(
    "--realm",
    type=KeyType(),
    metavar="PUBKEY",
    multiple=True,
    help="Who must have signed it; several for a database. Default: the home's own key, or those of the daemons.",
)
@answers
def verify(session: Session, store: str | None, realm: tuple[str, ...]) -> None:
    """Whether every row is as it was written. Reads the store itself; daemons may run meanwhile."""
    if is_database(store):
        assert store is not None
        tell_lanes(session, store, realm)
        return
    if len(realm) > 1:
        raise BadSetting("the journal in a folder is signed by one key", name="--realm")
    tell_integrity(session, store, realm[0] if realm else None, "audit_integrity")


class Export(Struct, tag="audit_export", tag_field="kind"):
    after: int
    rows: list[AuditRow]


@audit.command()
@click.option("--after", type=NUMBER, default=0, metavar="SEQ", help="Only what came behind this row.")
@_store_option
@answers
def export(session: Session, after: int, store: str | None) -> None:
    """Every row as a line of JSON, the oldest first. Reads the store itself; daemons may run meanwhile."""
    if is_database(store):
        assert store is not None
        _export_lanes(session, store, after)
        return
    rows = _rows(journal_of(session, store), after)
    if session.given.as_json:
        session.answer(Export(after, list(rows)), lambda: None)
        return
    for row in rows:
        _write(row)


def _write(row: AuditRow) -> None:
    with written():
        click.echo(json_text(row))


def _rows(folder: str, after: int) -> Iterator[AuditRow]:
    from covenant.rules.audit import rows_of
    from covenant.store.journal.files import Files
    from covenant.store.journal.log import Log
    from covenant.store.journal.segment import segment_names

    files = Files(folder)
    names = segment_names(files)
    log = Log(files, names[-1] if names else None, files.size(names[-1]) if names else 0)
    last: int | None = None  # of the commit before
    while stretch := log.after(after, _STRETCH):
        for logged in stretch:
            if last is not None and logged.seq != last + 1:
                raise _missing(folder, last + 1, logged.seq - 1)
            yield from (row for row in rows_of(logged) if row.seq > after)
            last = logged.last
        after = stretch[-1].last


def _missing(folder: str, first: int, last: int) -> StoreDamaged:
    why = f"events {first} to {last} are missing: damaged, or dropped meanwhile; `covenant journal verify` says which"
    return StoreDamaged(why, file=folder, line=0)


def _export_lanes(session: Session, store: str, after: int) -> None:
    """All lanes as one, by the numbers of their events."""

    async def told(connection: Any, where: Any) -> None:
        from covenant.rules.audit import rows_of
        from covenant.store.postgres.log import commits_of
        from covenant.store.postgres.schema import check_current

        await check_current(connection, where.schema)
        kept: list[AuditRow] = []
        take = kept.append if session.given.as_json else _write
        async with aclosing(commits_of(connection, after)) as commits:
            async for logged in commits:
                for row in rows_of(logged):
                    if row.seq > after:
                        take(row)
        if session.given.as_json:
            session.answer(Export(after, kept), lambda: None)

    connected(store, told)
