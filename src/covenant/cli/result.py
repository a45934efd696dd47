"""Results: those that were given, and the one that comes next."""

from __future__ import annotations

import click

from covenant.cli.bounds import PAGE
from covenant.cli.entry import print_result, result_brief, status_cell
from covenant.cli.option import answers, wait_option
from covenant.cli.session import Daemon, Session, waits
from covenant.cli.table import Column, print_table
from covenant.serve import wire as w


@click.command()
@click.option("--next", "drain", is_flag=True, help="Receive the oldest result that waits; it waits no longer.")
@wait_option("With --next: wait for one, for ever or so long.")
@click.option("--for", "peer", metavar="LABEL", help="With --next, as the operator: only those of this sender.")
@click.option("--recent", type=PAGE, metavar="N", help="The results of the N newest. Default: 10.")
@click.option("--task", "task_id", metavar="ID", help="The result of this task.")
@answers
def results(
    session: Session, drain: bool, wait_ms: int | None, peer: str | None, recent: int | None, task_id: str | None
) -> None:
    """Look at results, or receive the next one."""
    if sum((drain, recent is not None, task_id is not None)) > 1:
        raise click.UsageError("give one of --next, --recent and --task")
    if not drain and (wait_ms is not None or peer is not None):
        raise click.UsageError("--wait and --for go with --next")
    if drain:
        _tell_one(session, session.run(lambda daemon: _next(daemon, wait_ms, peer)), "no result waits")
    elif task_id is not None:
        _tell_one(session, session.ask(w.GetResult(task_id=task_id), w.ResultOpt), "no result yet")
    else:
        found = session.ask(w.RecentResults(limit=recent or w.PAGE), w.Results)
        session.answer(found, lambda: _tell_all(found))


async def _next(daemon: Daemon, wait_ms: int | None, peer: str | None) -> w.ResultOpt:
    for once_ms in waits(wait_ms):
        got = await daemon.call(w.RecvResult(wait_ms=once_ms, peer=peer), w.ResultOpt)
        if got.result is not None:
            break
    return got


def _tell_one(session: Session, got: w.ResultOpt, nothing: str) -> None:
    def tell() -> None:
        if got.result is None:
            click.echo(nothing)
        else:
            beside = ", replayed from the cache" if got.replayed else f", attempt {got.attempt}" if got.attempt else ""
            print_result(got.result, beside)

    session.answer(got, tell)


def _tell_all(found: w.Results) -> None:
    if not found.results:
        click.echo("no results yet")
        return
    columns = (Column("result of"), Column("status"), Column("attempt"), Column("what", fits=True))
    print_table(
        columns,
        (
            (
                result.task_id,
                status_cell(result),
                "cache" if beside.replayed else str(beside.attempt),
                result_brief(result),
            )
            for result, beside in zip(found.results, found.beside, strict=True)
        ),
    )
