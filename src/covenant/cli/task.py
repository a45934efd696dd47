"""What a sender does with a task: send it, look at it, wait for it, call it off."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from covenant.cli.bounds import TIME_MS, key_option, kind_option, text_option
from covenant.cli.content import blocks_in, file_option, value_of
from covenant.cli.entry import print_entry, print_result, short, state_cell, state_line
from covenant.cli.option import FOR_EVER, Duration, answers, wait_option
from covenant.cli.output import last_word, written
from covenant.cli.session import Daemon, Session, moment, waits
from covenant.cli.words import brief, clock, now_ms
from covenant.model.agent import AgentId
from covenant.model.content import Json
from covenant.model.error import StoreUnavailable, Unreachable
from covenant.model.record import Outcome
from covenant.model.task import Idempotency, Task
from covenant.model.view import QueueEntry, TreeNode
from covenant.serve import wire as w

_BREATH_S: Final = 0.2


@click.command()
@click.argument("recipient")
@click.argument("intent")
@click.option(
    "--data", metavar="JSON", help="What goes along, such as the input of a durable agent; what is no JSON is a text."
)
@file_option("What goes along")
@kind_option("--kind", meaning="What sort of task it is; part of the cache key.")
@key_option("--key", metavar="KEY", meaning="Declare it idempotent under this key: it may be done twice, and cached.")
@click.option("--deadline-ms", type=TIME_MS, help="Unix time in ms after which it ends unless somebody works on it.")
@click.option("--deadline-in", "deadline_in_ms", type=Duration(), help="The same from now on: 5m, 2h.")
@click.option("--not-before-ms", type=TIME_MS, help="Unix time in ms before which nobody gets it.")
@click.option("--parent", metavar="ID", help="The task or intent that it belongs to.")
@click.option("--id", "task_id", metavar="ID", help="Its id, a UUID; the same id again is the same send.")
@wait_option("Wait for its result, for ever or so long, and show it; exit 1 without an ok. It is not received by this.")
@answers
def send(
    session: Session,
    recipient: str,
    intent: str,
    data: str | None,
    file: Path | None,
    kind: str | None,
    key: str | None,
    deadline_ms: int | None,
    deadline_in_ms: int | None,
    not_before_ms: int | None,
    parent: str | None,
    task_id: str | None,
    wait_ms: int | None,
) -> None:
    """Send a task to RECIPIENT (a label like bob or bob@lab)."""
    if data is not None and file is not None:
        raise click.UsageError("give one of --data and --file")
    along = () if data is None else (Json(value_of(data)),)
    due_ms = moment("deadline", deadline_ms, deadline_in_ms)
    task = Task(
        id=task_id or str(uuid.uuid4()),  # known here, so that a send whose answer is lost can be repeated
        recipient=AgentId.named(recipient),
        intent_text=intent,
        task_kind=kind,
        content=along if file is None else blocks_in(file),
        parent=parent,
        deadline_ms=due_ms,
        not_before_ms=not_before_ms,
        idempotency=None if key is None else Idempotency("idempotent", key),
    )
    try:
        queued, got = session.run(lambda daemon: _send(daemon, task, wait_ms))
    except KeyboardInterrupt:
        last_word(f"it may have been sent; see with: {session.command(f'a2a watch {task.id}')}", err=True)
        raise
    session.answer(_sent(queued, got, wait_ms), lambda: _tell_sent(session, queued, got, wait_ms))
    if wait_ms is not None and (got is None or got.result is None or got.result.status != "ok"):
        raise click.exceptions.Exit(1)


async def _send(daemon: Daemon, task: Task, wait_ms: int | None) -> tuple[w.TaskQueued, w.ResultOpt | None]:
    try:
        queued = await daemon.call(w.SendTask(task=task), w.TaskQueued)
    except (Unreachable, StoreUnavailable) as lost:
        if lost.details.get("outcome") != "unknown":
            raise
        again = f"{lost.message}; it may have been sent: send it again with --id {task.id}, which is safe"
        raise type(lost)(again, **lost.details) from lost
    if wait_ms is None:
        return queued, None
    async for entry in _changes(daemon, queued.task_id, wait_ms):
        if entry.outcome is not None:
            return queued, await daemon.call(w.GetResult(task_id=queued.task_id), w.ResultOpt)
    return queued, None


def _sent(queued: w.TaskQueued, got: w.ResultOpt | None, wait_ms: int | None) -> Any:
    """The reply, and beside it the result that was waited for: one object."""
    if wait_ms is None:
        return queued
    return {**msgspec.to_builtins(queued), "result": None if got is None else got.result}


def _tell_sent(session: Session, queued: w.TaskQueued, got: w.ResultOpt | None, wait_ms: int | None) -> None:
    beside = ""
    if queued.duplicate:
        beside = " (it was there already)"
    elif queued.replayed:
        beside = " (answered from the cache)"
    elif queued.follows is not None:
        beside = f" (it follows {queued.follows}, which does the same work)"
    click.echo(f"sent {queued.task_id}{beside}")
    if got is not None and got.result is not None:
        print_result(got.result)
        click.echo(click.style(f"(it still waits to be received: {session.command('a2a results --next')})", dim=True))
    elif wait_ms is not None:
        click.echo(f"no result yet; wait on with: {session.command(f'a2a watch {queued.task_id}')}", err=True)


async def _changes(daemon: Daemon, task_id: str, wait_ms: int | None) -> AsyncIterator[QueueEntry]:
    """The task as it is, and then each time that it has changed, until it has ended or the wait is over."""
    entry = (await daemon.call(w.GetTask(task_id=task_id), w.TaskReply)).entry
    yield entry
    for once_ms in waits(wait_ms):
        if entry.outcome is not None:
            return
        began = time.monotonic()
        request = w.GetTask(task_id=task_id, current_generation=entry.generation, wait_ms=once_ms)
        newer = (await daemon.call(request, w.TaskReply)).entry
        if (newer.generation, newer.cancel_requested) != (entry.generation, entry.cancel_requested):
            yield newer
        elif time.monotonic() - began < _BREATH_S < once_ms / 1000:
            await asyncio.sleep(_BREATH_S)  # a daemon that is ending holds no request
        entry = newer


@click.command()
@click.argument("task_id")
@answers
def show(session: Session, task_id: str) -> None:
    """Show one task, and its result if there is one."""

    async def look(daemon: Daemon) -> tuple[w.TaskReply, w.ResultOpt]:
        task = await daemon.call(w.GetTask(task_id=task_id), w.TaskReply)
        return task, await daemon.call(w.GetResult(task_id=task_id), w.ResultOpt)

    reply, got = session.run(look)

    def tell() -> None:
        print_entry(reply.entry)
        if got.result is not None:
            click.echo()
            print_result(got.result)

    session.answer(reply, tell)


@click.command()
@click.argument("task_id")
@answers
def watch(session: Session, task_id: str) -> None:
    """Follow a task until it ends.

    With --json it waits, and shows the task as it ended.
    """

    async def follow(daemon: Daemon) -> QueueEntry:
        async for entry in _changes(daemon, task_id, FOR_EVER):
            last = entry
            if not session.given.as_json:
                told = click.style(clock(now_ms()), dim=True)
                with written():
                    click.echo(f"{told}  generation {entry.generation}  {state_line(entry)}")
        return last

    last = session.run(follow)
    session.answer(w.TaskReply(entry=last), lambda: None)


@click.command()
@click.argument("task_id")
@text_option("--reason", default="canceled", show_default=True, meaning="Why; the holder and the sender hear it.")
@click.option("--graceful", is_flag=True, help="Ask who holds it to stop, instead of ending it now.")
@click.option("--cascade", is_flag=True, help="Take along what hangs below it.")
@answers
def cancel(session: Session, task_id: str, reason: str, graceful: bool, cascade: bool) -> None:
    """Call a task off; its sender is told."""
    request = w.Cancel(task_id=task_id, reason=reason, graceful=graceful, cascade=cascade)
    done = session.ask(request, w.CanceledReply)

    def tell() -> None:
        if done.state == "in_flight":
            click.echo(f"asked the holder of {done.task_id} to stop; it ends when the holder answers")
        elif done.state == "parked":
            click.echo(f"asked the run {done.task_id} to stop; it ends when it has cleaned up")
        else:
            click.echo(f"canceled {done.task_id}")

    session.answer(done, tell)


@click.command()
@click.argument("task_id")
@answers
def tree(session: Session, task_id: str) -> None:
    """Draw what hangs below a task.

    TASK_ID may also be an intent that is no task here.
    """
    reply = session.ask(w.GetTree(task_id=task_id), w.TreeReply)

    def tell() -> None:
        _draw(reply.root)
        if reply.truncated:
            click.echo(f"… and more: only the first {reply.size} are shown")

    session.answer(reply, tell)


def _draw(root: TreeNode) -> None:
    """Without recursion: a chain of tasks may be long."""
    waiting = [(root, "", "")]
    while waiting:
        node, lead, below = waiting.pop()
        click.echo(f"{lead}{_node(node)}")
        last = len(node.children) - 1
        for place, child in reversed(list(enumerate(node.children))):
            corner, bar = ("└─ ", "   ") if place == last else ("├─ ", "│  ")
            waiting.append((child, below + corner, below + bar))


def _node(node: TreeNode) -> str:
    if node.entry is None:
        return f"{node.id}  (no task here)"
    entry = node.entry
    state, colour = state_cell(entry)
    if entry.outcome is not None:
        state, colour = entry.outcome.replace("_", " "), "green" if entry.outcome is Outcome.ANSWERED else "red"
    told = (node.id, click.style(state, fg=colour), short(entry.task.recipient), brief(entry.task.intent_text, 50))
    return "  ".join(told)
