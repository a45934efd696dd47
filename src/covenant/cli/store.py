"""`covenant store`: moving from one store to another."""

from __future__ import annotations

import asyncio

import click
import msgspec

from covenant.cli.database import is_database
from covenant.cli.folder import folder_of
from covenant.cli.option import answers
from covenant.cli.session import Session
from covenant.cli.table import Column, print_fields, print_table
from covenant.model.error import BadSetting
from covenant.rules.secret import without_passwords


@click.group()
def store() -> None:
    """Move a store: copy."""


@store.command()
@click.argument("source", metavar="file:PATH")
@click.argument("target", metavar="postgresql://…")
@answers
def copy(session: Session, source: str, target: str) -> None:
    """Copy a journal into an empty store on PostgreSQL.

    No daemon may run on either. Killed on the way, it leaves the target empty. The source stays as it is.
    """
    if not is_database(target):
        raise BadSetting(f"{without_passwords(target)!r} is no database: postgresql://USER@HOST/NAME", name="TARGET")
    from covenant.store.postgres.copy import copy as copy_store

    report = asyncio.run(copy_store(folder_of(session, source), target))

    def tell() -> None:
        click.echo(f"copied {source} to {without_passwords(target)}\n")
        columns = (Column("kind"), Column("source"), Column("target"))
        kinds = sorted({*report.source.records, *report.target.records})
        counts = (
            (kind, *(str(side.records.get(kind, 0)) for side in (report.source, report.target))) for kind in kinds
        )
        print_table(columns, counts)
        click.echo()
        head = report.target_head
        print_fields(
            [
                ("digest", f"{report.source.digest} (source)\n{report.target.digest} (target)"),
                ("log", f"{report.commits} commits with {report.events} events, lane {report.lane}"),
                ("head", None if head is None else f"event {head.seq}, {head.hash}"),
            ]
        )
        click.echo(f"\nstart on it with: {session.command(f'serve --store {without_passwords(target)!r}')}")

    session.answer({"kind": "store_copied", "report": msgspec.to_builtins(report)}, tell)
