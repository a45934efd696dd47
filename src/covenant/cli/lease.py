"""What a worker does: take a task, show that it lives, answer, or give the task back."""

from __future__ import annotations

from pathlib import Path

import click

from covenant.cli.bounds import reason_option, text_option
from covenant.cli.content import blocks_in, file_option
from covenant.cli.entry import task_fields
from covenant.cli.option import Duration, answers, wait_option
from covenant.cli.session import Daemon, Session, waits
from covenant.cli.table import print_fields
from covenant.cli.words import now_ms, safe
from covenant.model.content import Text
from covenant.model.task import Result
from covenant.serve import wire as w


@click.command("next")
@wait_option("Wait for a task, for ever or so long.")
@click.option("--for", "recipient", metavar="LABEL", help="As the operator: only for this peer. Default: for anybody.")
@answers
def take(session: Session, wait_ms: int | None, recipient: str | None) -> None:
    """Lease the oldest task that waits."""

    async def receive(daemon: Daemon) -> w.TaskOpt:
        for once_ms in waits(wait_ms):
            got = await daemon.call(w.RecvTask(wait_ms=once_ms, recipient=recipient), w.TaskOpt)
            if got.task is not None:
                break
        return got

    got = session.run(receive)
    session.answer(got, lambda: _tell_task(session, got))


def _tell_task(session: Session, got: w.TaskOpt) -> None:
    if got.task is None:
        click.echo("no task waits")
        return
    print_fields([*task_fields(got.task), ("lease", got.lease_id), ("attempt", str(got.attempt))])
    post_it = f"a2a post {got.task.id} --lease-id {got.lease_id} --text TEXT"
    click.echo(f"\nanswer it:     {session.command(post_it)}")
    click.echo(f"or give back:  {session.command(f'a2a release {got.lease_id} --reason REASON')}")


@click.command()
@click.argument("task_id")
@click.option("--lease-id", required=True, metavar="LEASE", help="The lease under which the work was done.")
@click.option("--text", help="It is done: this is the answer.")
@text_option("--error", "message", meaning="It failed: this is why.")
@click.option("--partial", help="It goes on: this is what there is so far.")
@file_option("It is done")
@answers
def post(
    session: Session,
    task_id: str,
    lease_id: str,
    text: str | None,
    message: str | None,
    partial: str | None,
    file: Path | None,
) -> None:
    """Answer a leased task."""
    if sum(given is not None for given in (text, message, partial, file)) != 1:
        raise click.UsageError("give one of --text, --error, --partial and --file")
    if message is not None:
        result = Result(task_id, "error", (), message, lease_id)
    elif partial is not None:
        result = Result(task_id, "partial", (Text(partial),), None, lease_id)
    else:
        blocks = (Text(text),) if text is not None else blocks_in(file or Path("-"))
        result = Result(task_id, "ok", blocks, None, lease_id)
    done = session.ask(w.PostResult(result=result), w.ResultPosted)

    def tell() -> None:
        what = f"partial result {done.sequence}" if result.status == "partial" else "the result"
        click.echo(f"posted {what} of {done.task_id}{' (it was there already)' if done.duplicate else ''}")

    session.answer(done, tell)


@click.command("heartbeat")
@click.argument("lease_id")
@answers
def beat(session: Session, lease_id: str) -> None:
    """Show that the work goes on; learn whether it is to stop."""
    status = session.ask(w.Heartbeat(lease_id=lease_id), w.LeaseBeat)

    def tell() -> None:
        if status.cancel_requested:
            click.echo(f"stop: a cancel of {status.task_id} was asked for: {safe(status.cancel_reason or '')}")
        else:
            click.echo(f"go on with {status.task_id}, attempt {status.attempt}")

    session.answer(status, tell)


@click.command()
@click.argument("lease_id")
@reason_option
@click.option("--delay", "delay_ms", type=Duration(), help="Let nobody have it for so long: 30s, 5m.")
@answers
def release(session: Session, lease_id: str, reason: str, delay_ms: int | None) -> None:
    """Give a task back without a result."""
    not_before_ms = None if delay_ms is None else now_ms() + delay_ms
    done = session.ask(w.Release(lease_id=lease_id, reason=reason, not_before_ms=not_before_ms), w.ReleasedReply)
    session.answer(done, lambda: click.echo(f"gave back {done.task_id} after attempt {done.attempt}"))
