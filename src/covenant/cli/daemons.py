"""`covenant daemons`: the processes that have the store open."""

from __future__ import annotations

from typing import Final

import click

from covenant.cli.option import answers
from covenant.cli.session import Session
from covenant.cli.table import Cell, Column, print_table
from covenant.cli.words import ago, safe
from covenant.model.daemon import DaemonState, DaemonView
from covenant.serve import wire as w

_STYLE: Final = {DaemonState.ALIVE: "green", DaemonState.ENDED: "", DaemonState.SILENT: "red"}


@click.group()
def daemons() -> None:
    """Who has the store open."""


@daemons.command("list")
@answers
def list_daemons(session: Session) -> None:
    """Those that run, and those that ended in the last week.

    All that are on the store of the daemon that is asked.
    """
    found = session.ask(w.ListDaemons(), w.Daemons)
    titles = ("daemon", "where", "key", "since", "seen", "state", "lanes")
    session.answer(
        found, lambda: print_table([Column(title) for title in titles], (_row(one) for one in found.daemons))
    )


def _row(one: DaemonView) -> tuple[str | Cell, ...]:
    state = Cell(one.state.value, _STYLE[one.state])
    return one.id, safe(one.label), one.pubkey, ago(one.started_ms), ago(one.seen_ms), state, str(one.lanes)
