"""`covenant version`: this program, and the daemon that it would talk to."""

from __future__ import annotations

import click

from covenant.cli.option import answers
from covenant.cli.output import written
from covenant.cli.session import Session
from covenant.model.error import CovenantError
from covenant.serve import wire as w
from covenant.version import VERSION


@click.command()
@answers
def version(session: Session) -> None:
    """Which Covenant this is, and which one runs."""
    if not session.given.as_json:
        with written():
            click.echo(f"covenant {VERSION}")  # before a daemon is asked, which may not answer
    try:
        running = session.ask(w.Version(), w.VersionReply)
        told = f"daemon {running.version} at {session.address}, realm {running.realm}"
    except CovenantError as silent:
        running, told = None, f"{silent.message} ({silent.code})"

    session.answer({"kind": "version", "version": VERSION, "daemon": running}, lambda: click.echo(told))
