"""`covenant runs`: how durable agents get on, what they wait for, and what nobody but a person can decide."""

from __future__ import annotations

import json
from typing import Final, get_args

import click
import msgspec
from msgspec import Raw, Struct

from covenant.cli.bounds import NUMBER, PAGE, key_option, reason_option, text_option
from covenant.cli.content import value_of
from covenant.cli.option import Spelled, answers, cursor_option, limit_option
from covenant.cli.session import Daemon, Session
from covenant.cli.table import Cell, Column, print_fields, print_table
from covenant.cli.words import ago, brief, clock, counted, safe
from covenant.model.run import NOTHING, EntrySeen, RunSeen, RunStatus, Verdict
from covenant.rules.dialog import text_of
from covenant.serve import wire as w
from covenant.serve.why import why_run

_COLOURS: Final = {
    RunStatus.QUEUED: "cyan",
    RunStatus.RUNNING: "yellow",
    RunStatus.AWAITING_WORK: "blue",
    RunStatus.AWAITING_INPUT: "magenta",
    RunStatus.EFFECT_IN_DOUBT: "red",
    RunStatus.CHILD_IN_DOUBT: "red",
    RunStatus.WOKEN: "cyan",
    RunStatus.ENDED: "bright_black",
}
_STATUSES: Final = tuple(status.replace("_", "-") for status in RunStatus)
_ENTRIES: Final = 20


class Shown(Struct, tag="run", tag_field="kind", omit_defaults=True):
    """A run and, where they were asked for, its entries: one object."""

    run: RunSeen
    entries: list[EntrySeen] | None = None
    before: int | None = None


@click.group()
def runs() -> None:
    """Durable agents: list, show, signal, cancel, resume, judge."""


@runs.command("list")
@limit_option(20)
@click.option("--status", type=Spelled(_STATUSES), help="Only those that stand so.")
@cursor_option
@answers
def list_runs(session: Session, limit: int, status: str | None, cursor: str | None) -> None:
    """Runs, the newest first."""
    wanted = None if status is None else RunStatus(status.replace("-", "_"))
    page = session.ask(w.ListRuns(limit=limit, status=wanted, cursor=cursor), w.Runs)
    session.answer(page, lambda: _tell_page(session, page))


def _tell_page(session: Session, page: w.Runs) -> None:
    columns = (Column("run"), Column("status"), Column("agent"), Column("begun"), Column("waits for", fits=True))
    print_table(columns, (_row(run) for run in page.runs))
    session.tell_more("runs list", page.cursor, filtered=True)


def _row(run: RunSeen) -> tuple[str | Cell, ...]:
    return run.task_id, _status_cell(run), run.agent.removesuffix("@local"), ago(run.begun_ms), brief(_waits_for(run))


def _status_cell(run: RunSeen) -> Cell:
    return Cell(run.status.replace("_", " "), _COLOURS[run.status])


def _waits_for(run: RunSeen) -> str:
    """In the words of a person: the doubts, if there are any, are what it waits for."""
    if run.doubts:
        return f"a decision about {', '.join(run.doubts)}"
    until = [] if run.until_ms is None else [f"{clock(run.until_ms)} ({ago(run.until_ms)})"]
    return ", ".join((*run.awaits, *until))


@runs.command()
@click.argument("task_id")
@click.option(
    "--entries",
    type=PAGE,
    is_flag=False,
    flag_value=_ENTRIES,
    metavar="[N]",
    help=f"With what was said and done: the newest {_ENTRIES}, or so many.",
)
@click.option("--leaf", type=NUMBER, help="The way to this entry, instead of the last.")
@click.option("--before", type=NUMBER, help="What lies before a page of entries.")
@click.option("--every", is_flag=True, help="With the entries of other branches.")
@answers
def show(
    session: Session, task_id: str, entries: int | None, leaf: int | None, before: int | None, every: bool
) -> None:
    """Show how a run stands, and what to type next."""
    if entries is None and (leaf is not None or before is not None or every):
        raise click.UsageError("--leaf, --before and --every go with --entries")

    async def look(daemon: Daemon) -> Shown:
        run = (await daemon.call(w.GetRun(task_id=task_id), w.RunReply)).run
        if entries is None:
            return Shown(run)
        request = w.RunEntries(task_id=task_id, limit=entries, leaf=leaf, before=before, every=every)
        page = await daemon.call(request, w.Entries)
        return Shown(run, page.entries, page.before)

    shown = session.run(look)
    session.answer(shown, lambda: _tell(session, shown))


def _tell(session: Session, shown: Shown) -> None:
    run = shown.run
    print_fields(_fields(run))
    if shown.entries is not None:
        _tell_entries(session, shown)
    why = why_run(run, lambda at_ms: f"{clock(at_ms)}, {ago(at_ms)}")
    click.echo(f"\n{safe(why.explanation)}")
    if why.command is not None:
        click.echo(f"to move it: {session.command(safe(why.command.removeprefix('covenant ')))}")


def _fields(run: RunSeen) -> list[tuple[str, str | None]]:
    colour = _COLOURS[run.status]
    held = "" if run.heartbeat_ms is None else f", last sign of life {ago(run.heartbeat_ms)}"
    idle = "" if run.since_ms is None else f", none since {ago(run.since_ms)}"
    resumed = f", taken up {counted(run.resumes, 'time')} since" if run.resumes else ""
    return [
        ("run", run.task_id),
        ("agent", run.agent),
        ("kind", None if run.kind is None else safe(run.kind)),
        ("status", click.style(run.status.replace("_", " "), fg=colour)),
        ("outcome", None if run.outcome is None else run.outcome.replace("_", " ")),
        ("waits for", safe(_waits_for(run))),
        ("in doubt", safe(", ".join(run.doubts))),
        ("unheard", safe(", ".join(run.signals))),
        ("begun", ago(run.begun_ms)),
        ("step", f"{run.step}{resumed}{idle}"),
        ("entries", str(run.entries)),
        ("checkpoint", None if not run.checkpoints else f"{run.checkpoints}: {_spelled(run.state)}"),
        ("worker", None if run.incarnation is None else f"{safe(run.incarnation)}{held}"),
        ("lease", run.lease_id),
        ("attempt", str(run.attempt)),
        ("generation", str(run.generation)),
    ]


def _spelled(value: Raw) -> str:
    return brief(json.dumps(msgspec.json.decode(value), ensure_ascii=False), 400)


def _tell_entries(session: Session, shown: Shown) -> None:
    click.echo()
    columns = (Column("entry"), Column("after"), Column("when"), Column("role"), Column("what", fits=True))
    print_table(columns, (_entry_row(entry) for entry in shown.entries or ()))
    if shown.before is not None:
        earlier = f"runs show {shown.run.task_id} --entries --before {shown.before}"
        click.echo(f"\nbefore: {session.command(earlier)}")


def _entry_row(entry: EntrySeen) -> tuple[str, ...]:
    what = "" if entry.message is None else brief(text_of(entry.message))
    if entry.content != NOTHING and not what:
        what = _spelled(entry.content)
    kind = "" if entry.type == "message" else f" ({entry.type.replace('_', ' ')})"
    role = entry.role.replace("_", " ")
    return str(entry.number), str(entry.parent or ""), ago(entry.at_ms), f"{role}{kind}", what


@runs.command()
@click.argument("task_id")
@click.argument("name")
@click.argument("value", required=False)
@key_option("--key", metavar="KEY", meaning="Under the same key it is told once.")
@answers
def signal(session: Session, task_id: str, name: str, value: str | None, key: str | None) -> None:
    """Tell a run something. VALUE is JSON; what is none is a text."""
    request = w.SignalRun(task_id=task_id, name=name, value=_value(value), key=key)
    done = session.ask(request, w.SignaledReply)

    def tell() -> None:
        beside = " (it was told before)" if done.duplicate else ""
        click.echo(f"told {done.task_id}: {safe(name)}{beside}")

    session.answer(done, tell)


def _value(value: str | None) -> Raw:
    if value is None:
        return NOTHING
    return Raw(msgspec.json.encode(value_of(value)))


@runs.command()
@click.argument("task_id")
@text_option("--reason", default="canceled", show_default=True, meaning="Why; its agent and its sender hear it.")
@click.option("--graceful", is_flag=True, help="Ask the worker that holds it to stop, instead of ending it now.")
@answers
def cancel(session: Session, task_id: str, reason: str, graceful: bool) -> None:
    """Call a run off, and its open tasks with it; its sender is told."""
    done = session.ask(w.Cancel(task_id=task_id, reason=reason, graceful=graceful), w.CanceledReply)

    def tell() -> None:
        if done.state == "in_flight":
            click.echo(f"asked the worker of {done.task_id} to stop; it ends when the worker answers")
        else:
            click.echo(f"canceled {done.task_id}")

    session.answer(done, tell)


@runs.command()
@click.argument("task_id")
@reason_option
@click.option("--attested", is_flag=True, help="You know that its worker is dead, however silent it is.")
@click.option("--dead", metavar="INCARNATION", help="Only if this one holds it. Default: whichever does.")
@answers
def resume(session: Session, task_id: str, reason: str, attested: bool, dead: str | None) -> None:
    """Take a run from a dead worker, for the next one of its agent."""

    async def take(daemon: Daemon) -> w.ResumedReply:
        holder = dead or (await daemon.call(w.GetRun(task_id=task_id), w.RunReply)).run.incarnation
        request = w.ResumeRun(
            task_id=task_id,
            dead=holder or "nobody",
            reason=reason,
            evidence="attested" if attested else "lapsed",
        )
        return await daemon.call(request, w.ResumedReply)

    done = session.run(take)

    def tell() -> None:
        click.echo(f"{done.task.id} waits for a worker of {done.task.recipient.display.removesuffix('@local')}")
        if done.requeued:
            click.echo(f"given back with it: {', '.join(done.requeued)}")

    session.answer(done, tell)


@runs.command()
@click.argument("task_id")
@click.argument("effect")
@click.argument("verdict", type=click.Choice(get_args(Verdict)))
@reason_option
@click.option("--value", metavar="JSON", help="What it came to, or why it failed; what is no JSON is a text.")
@answers
def judge(session: Session, task_id: str, effect: str, verdict: Verdict, reason: str, value: str | None) -> None:
    """Say what became of an effect that is in doubt.

    It was done, it failed, or it is to be tried again.
    """
    request = w.JudgeEffect(task_id=task_id, effect=effect, verdict=verdict, reason=reason, value=_value(value))
    done = session.ask(request, w.MovedReply)
    session.answer(done, lambda: click.echo(f"judged {safe(effect)} of {done.task_id}: {verdict}"))
