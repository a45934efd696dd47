"""The folder of a journal, for the commands that read it themselves, and what they found in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
import msgspec

from covenant.cli.session import Session
from covenant.cli.table import print_fields
from covenant.cli.words import counted
from covenant.model.agent import is_key
from covenant.model.error import BadSetting, StoreUnavailable
from covenant.rules.secret import without_passwords

_HINT: Final = "; --store says where it is"


class KeyType(click.ParamType[str]):
    name = "pubkey"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not is_key(value):
            self.fail(f"{value!r} is no key: base58 of 32 bytes", param, ctx)
        return str(value)


realm_option = click.option(
    "--realm", type=KeyType(), metavar="PUBKEY", help="Who must have signed it. Default: the home's own key."
)
store_option = click.option("--store", metavar="URL", help="The folder, file:PATH. Default: <home>/data.")


def folder_of(session: Session, store: str | None) -> str:
    if store is None:
        return str(session.home.data)
    path = store.removeprefix("file:")
    if path == store or not path:
        raise BadSetting(f"{without_passwords(store)!r} is no folder: file:./data", name="--store")
    return str(Path(path.removeprefix("//") if path.startswith("///") else path))


def journal_of(session: Session, store: str | None) -> str:
    """The same for those who only read: there must be something to read."""
    from covenant.store.journal.files import Files
    from covenant.store.journal.segment import segment_names

    folder = folder_of(session, store)
    if not segment_names(Files(folder)):
        is_elsewhere = store is None and session.home.has_key
        hint = ": the daemon of this home has its store elsewhere, give its --store" if is_elsewhere else _HINT
        raise StoreUnavailable(f"there is no journal in {folder}{hint}", folder=folder)
    return folder


def tell_integrity(session: Session, store: str | None, realm: str | None, kind: str) -> None:
    """Exit 1 when it is not sound."""
    from covenant.store.journal.verify import verify

    folder = journal_of(session, store)
    report = verify(folder, realm=realm or (_own_realm(session) if store is None else None))
    answer: dict[str, Any] = {"kind": kind, "valid": report.is_sound, "report": msgspec.to_builtins(report)}

    def tell() -> None:
        sound = click.style("sound", fg="green") if report.is_sound else click.style("damaged", fg="red")
        click.echo(f"{folder} is {sound}")
        head = report.head
        print_fields(
            [
                ("read", f"{counted(report.commits, 'commit')} in {counted(report.segments, 'segment')}"),
                ("head", None if head is None else f"event {head.seq}, {head.hash}"),
                ("signed", _signed(report.signatures, report.signed_until, report.signed_by)),
                ("unsigned", _unsigned(report.unsigned_after)),
                (
                    "torn",
                    f"{report.torn_bytes} bytes at the end; the next start cuts them off"
                    if report.torn_bytes
                    else None,
                ),
                ("damage", "\n".join(report.damage)),
            ]
        )

    session.answer(answer, tell)
    if not report.is_sound:
        raise click.exceptions.Exit(1)


def _own_realm(session: Session) -> str | None:
    """The key that must have signed what lies in this home."""
    return session.home.realm().pubkey if session.home.has_key else None


def _unsigned(after: int | None) -> str | None:
    return None if after is None else f"after event {after}: who signs every second has not signed since"


def _signed(signatures: int, until: int, by: str | None) -> str:
    if not signatures:
        return "nowhere: the end of the chain only vouches for itself"
    return f"up to event {until}, {counted(signatures, 'time')}, by {by}"
