"""The database of a store, for the commands that talk to it themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from covenant.cli.session import Session
from covenant.cli.table import print_fields
from covenant.cli.words import counted
from covenant.model.error import BadSetting
from covenant.rules.secret import without_passwords

if TYPE_CHECKING:
    from covenant.store.postgres.verify import LaneReport

T = TypeVar("T")

_SCHEMES: Final = ("postgresql:", "postgres:")
_PATIENT: Final = {"idle_in_transaction_session_timeout": "0"}  # who reads what is exported may take its time

database_option = click.option(
    "--store", metavar="URL", required=True, help="The database: postgresql://USER@HOST/NAME?schema=SCHEMA."
)


def is_database(store: str | None) -> bool:
    return store is not None and store.startswith(_SCHEMES)


def connected(store: str, work: Callable[[Any, Any], Awaitable[T]]) -> T:
    """What is done over one connection, and with where that leads; failures are told in our words."""
    if not is_database(store):
        raise BadSetting(f"{without_passwords(store)!r} is no database: postgresql://USER@HOST/NAME", name="--store")
    try:
        from covenant.store.postgres.connection import Where, borrowed
    except ImportError as missing:
        why = f"the store on PostgreSQL needs a package that is not installed ({missing.name})"
        raise BadSetting(f"{why}: pip install 'covenant-exchange[postgres]'", name="--store") from missing

    async def once() -> T:
        where = Where.of(store)
        async with borrowed(where, **_PATIENT) as connection:
            return await work(connection, where)

    return asyncio.run(once())


def tell_lanes(session: Session, store: str, realm: Collection[str]) -> None:
    """Whether the log is as it was written. Exit 1 when it is not."""
    from covenant.store.postgres.verify import verify

    report = connected(store, lambda connection, where: verify(connection, where.schema, realm))
    answer: dict[str, Any] = {
        "kind": "audit_integrity",
        "valid": report.is_sound,
        "report": msgspec.to_builtins(report),
    }

    def tell() -> None:
        sound = click.style("sound", fg="green") if report.is_sound else click.style("damaged", fg="red")
        click.echo(f"{without_passwords(store)} is {sound}")
        keys = sorted({lane.signed_by for lane in report.lanes if lane.signed_by is not None})
        more = [f"and {report.damage_more} more"] if report.damage_more else []
        print_fields(
            [
                ("read", f"{counted(report.commits, 'commit')} in {counted(len(report.lanes), 'lane')}"),
                ("signed", f"{counted(report.signatures, 'time')}, by {', '.join(keys)}" if keys else "nowhere"),
                ("unsigned", "\n".join(_unsigned(report.lanes))),
                ("damage", "\n".join([*report.damage, *more])),
            ]
        )

    session.answer(answer, tell)
    if not report.is_sound:
        raise click.exceptions.Exit(1)


def _unsigned(lanes: Iterable[LaneReport]) -> Iterator[str]:
    for lane in lanes:
        if lane.unsigned_after is not None:
            yield f"lane {lane.lane} after event {lane.unsigned_after}: who signs every second has not signed since"
