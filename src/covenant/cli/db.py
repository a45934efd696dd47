"""`covenant db`: the schema of a store on PostgreSQL, without a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from covenant.cli.database import connected, database_option
from covenant.cli.option import answers
from covenant.cli.session import Session
from covenant.cli.table import print_fields

if TYPE_CHECKING:
    from covenant.store.postgres.schema import SchemaState


@click.group()
def db() -> None:
    """The schema of a store on PostgreSQL: migrate, status."""


@db.command()
@database_option
@answers
def migrate(session: Session, store: str) -> None:
    """Make the schema, or bring it to this program's version.

    Daemons may run on it meanwhile, and several may do this at once. There is no way back.
    """
    from covenant.store.postgres import schema

    found = connected(store, lambda connection, where: schema.migrate(connection, where.schema))
    _answer(session, store, found)


@db.command()
@database_option
@answers
def status(session: Session, store: str) -> None:
    """Which version the schema has. Exits with 1 when a daemon of this version could not start on it as it is."""
    from covenant.store.postgres import schema

    found = connected(store, lambda connection, where: schema.state_of(connection, where.schema))
    _answer(session, store, found)
    if not found.is_current:
        raise click.exceptions.Exit(1)


def _answer(session: Session, store: str, state: SchemaState) -> None:
    answer = {
        "kind": "db_state",
        "schema": state.schema,
        "version": state.version,
        "newest": state.newest,
        "current": state.is_current,
    }

    def tell() -> None:
        print_fields([("schema", state.schema), ("version", str(state.version)), ("this program", _told(state))])

    session.answer(answer, tell)


def _told(state: SchemaState) -> str:
    if state.is_current:
        return f"knows version {state.newest}: it is current"
    if state.version > state.newest:
        return f"knows version {state.newest}: the store is newer, update the program"
    return f"knows version {state.newest}: run covenant db migrate"
