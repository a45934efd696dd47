"""`covenant a2a`: what concerns tasks, put together from one module for each noun."""

from __future__ import annotations

from typing import Final

import click

from covenant.cli.cache import cache
from covenant.cli.dialog import artifact, ask, inputs, reject, reply, say, update
from covenant.cli.lease import beat, post, release, take
from covenant.cli.option import Duration, answers
from covenant.cli.repair import force_error, requeue, retry_stale
from covenant.cli.result import results
from covenant.cli.session import Session
from covenant.cli.status import status
from covenant.cli.task import cancel, send, show, tree, watch
from covenant.cli.words import counted, size
from covenant.serve import wire as w

_COMPACTION_MS: Final = 60_000  # it rewrites a snapshot, which is not done in a moment


@click.group()
def a2a() -> None:
    """Send tasks, work on them, see and repair what is stuck."""


@click.command()
@click.option(
    "--older-than",
    "older_than_ms",
    type=Duration(),
    help="Only those that ended so long ago: 7d. Default: the retention.",
)
@answers
def compact(session: Session, older_than_ms: int | None) -> None:
    """Let go of tasks that are over.

    The daemon may take a minute longer for it than --timeout says.
    """
    done = session.ask(w.Compact(older_than_ms=older_than_ms), w.Compacted, _COMPACTION_MS)

    def tell() -> None:
        freed = f", {counted(done.segments_dropped, 'segment')}, {size(done.bytes_freed)}" if done.bytes_freed else ""
        click.echo(f"let go of {counted(done.dropped, 'task')}{freed}")

    session.answer(done, tell)


for command in (
    status,
    send,
    show,
    tree,
    watch,
    say,
    cancel,
    take,
    post,
    beat,
    update,
    artifact,
    ask,
    inputs,
    reject,
    reply,
    release,
    results,
    requeue,
    force_error,
    retry_stale,
    cache,
    compact,
):
    a2a.add_command(command)
