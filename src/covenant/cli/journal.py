"""`covenant journal`: the folder of a daemon, read and mended without one."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from covenant.cli.folder import folder_of, realm_option, store_option, tell_integrity
from covenant.cli.option import answers
from covenant.cli.session import Session
from covenant.cli.table import print_fields
from covenant.cli.words import counted, size


@click.group()
def journal() -> None:
    """The folder of a daemon: verify, repair, back up, restore."""


@journal.command()
@store_option
@realm_option
@answers
def verify(session: Session, store: str | None, realm: str | None) -> None:
    """Whether the folder reads as it was written. A daemon may run meanwhile."""
    tell_integrity(session, store, realm, "journal_integrity")


@journal.command()
@click.option("--dry-run", is_flag=True, help="Only tell what would be cut off.")
@click.option("--force", is_flag=True, help="Cut also where a daemon still starts, and what is cut is in use.")
@store_option
@answers
def repair(session: Session, dry_run: bool, force: bool, store: str | None) -> None:
    """Cut a damaged journal behind its last sound line.

    What is cut off is kept beside, in a folder of its own.
    """
    from covenant.store.journal.repair import RepairReport
    from covenant.store.journal.repair import repair as repair_folder

    folder = folder_of(session, store)
    report = repair_folder(folder, dry_run=dry_run, force=force)

    def tell(found: RepairReport = report) -> None:
        if found.damage is None:
            click.echo(f"{folder} is sound: nothing to repair")
            return
        verb = "was cut off" if found.done else "would be cut off"
        print_fields(
            [
                ("damage", found.damage.message),
                ("sound to", f"event {found.damage.head.seq}"),
                (verb, f"{counted(found.lines, 'line')} with {counted(found.events, 'event')}"),
                ("unreadable", f"{found.unreadable} of them" if found.unreadable else None),
                ("tasks", "\n".join(found.tasks)),
                ("files", "\n".join(found.files)),
                ("kept in", None if found.moved_to is None else str(Path(folder) / found.moved_to)),
            ]
        )

    session.answer({"kind": "journal_repair", "report": msgspec.to_builtins(report)}, tell)


@journal.command()
@click.argument("target", type=click.Path(path_type=Path))
@store_option
@answers
def backup(session: Session, target: Path, store: str | None) -> None:
    """Copy the journal into the folder TARGET. A daemon may run meanwhile."""
    from covenant.store.journal.backup import backup as back_up

    folder = folder_of(session, store)
    report = back_up(folder, target)

    def tell() -> None:
        copied = f"{counted(report.files, 'file')}, {size(report.bytes)}, up to event {report.head.seq}"
        click.echo(f"backed up {folder} to {report.target}: {copied}")

    session.answer({"kind": "journal_backup", "report": msgspec.to_builtins(report)}, tell)


@journal.command()
@click.argument("source", type=click.Path(path_type=Path))
@store_option
@answers
def restore(session: Session, source: Path, store: str | None) -> None:
    """Put the backup SOURCE where a daemon can start on it.

    There must be no journal there yet.
    """
    from covenant.store.journal.backup import restore as put_back

    report = put_back(source, folder_of(session, store))

    def tell() -> None:
        copied = f"{counted(report.files, 'file')}, {size(report.bytes)}, up to event {report.head.seq}"
        click.echo(f"restored {source} to {report.folder}: {copied}")
        click.echo(f"start on it with: {session.command('serve')}")

    session.answer({"kind": "journal_restore", "report": msgspec.to_builtins(report)}, tell)
