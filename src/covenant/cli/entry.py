"""How one task and one result look to a person, wherever they are shown."""

from __future__ import annotations

from typing import Final

import click

from covenant.cli.table import Cell, print_fields
from covenant.cli.words import ago, brief, clock, now_ms, safe, said
from covenant.model.agent import AgentId
from covenant.model.record import TaskState
from covenant.model.span import MINUTE_MS, span
from covenant.model.task import Result, Task
from covenant.model.view import QueueEntry

STALE_MS: Final = 5 * MINUTE_MS
_COLOURS: Final = {
    TaskState.QUEUED: "cyan",
    TaskState.IN_FLIGHT: "yellow",
    TaskState.PARKED: "blue",
    TaskState.RESULT_PENDING: "green",
    TaskState.RESOLVED: "bright_black",
}
_RESULT_COLOURS: Final = {"ok": "green", "error": "red", "partial": "yellow"}


def state_cell(entry: QueueEntry) -> Cell:
    """With the number of the attempt, once it is not the first."""
    again = f" #{entry.attempt}" if entry.attempt > 1 else ""
    if is_stale(entry):
        return Cell(f"stale{again}", "red")
    if entry.asks is not None:
        return Cell(f"needs {entry.asks}{again}", "magenta")
    return Cell(f"{entry.state.replace('_', ' ')}{again}", _COLOURS[entry.state])


def silent_ms(entry: QueueEntry) -> int:
    """How long a lease has had no sign of life."""
    return _since(entry.heartbeat_ms)


def _since(at_ms: int | None) -> int:
    """Never negative: the clock of the daemon may be ahead of the one here, or have been."""
    return 0 if at_ms is None else max(0, now_ms() - at_ms)


def is_stale(entry: QueueEntry) -> bool:
    """Whoever waits for its sender is not."""
    return entry.asks is None and silent_ms(entry) > STALE_MS


def between(task: Task) -> str:
    return f"{short(task.sender)} → {short(task.recipient)}"


def short(agent: AgentId | None) -> str:
    """As it may be typed: `bob` is `bob@local`."""
    return "" if agent is None else agent.display.removesuffix("@local")


def state_line(entry: QueueEntry) -> str:
    """The state in one line: who holds it, since when, what is odd about it."""
    parts = [entry.state.replace("_", " ")]
    if entry.outcome is not None:
        parts.append(f"{entry.outcome.replace('_', ' ')} {ago(entry.finished_ms)}".strip())
    if entry.leased_to is not None:
        parts.append(f"held by {short(entry.leased_to)} for {span(_since(entry.leased_at_ms))}")
    if entry.attempt:
        parts.append(f"attempt {entry.attempt}")
    parts += _odd(entry)
    return ", ".join(parts)


def _odd(entry: QueueEntry) -> list[str]:
    odd = []
    if is_stale(entry):
        odd.append(f"no sign of life for {span(silent_ms(entry))}")
    if entry.asks is not None:
        odd.append(f"waits for {entry.asks} from {short(entry.task.sender)}")
    if entry.follows is not None:
        odd.append(f"follows {entry.follows}")
    if entry.not_before_ms is not None:
        odd.append(f"not before {clock(entry.not_before_ms)} ({ago(entry.not_before_ms)})")
    if entry.replayed:
        odd.append("replayed from the cache")
    if entry.overdue:
        odd.append("overdue")
    if entry.cancel_requested:
        odd.append("cancel asked for")
    return odd


def safety_line(task: Task) -> str:
    if task.idempotency is None:
        return "not declared: unsafe to do twice"
    return f"{task.idempotency.duplicate_safety}, key {safe(task.idempotency.key)}"


def task_fields(task: Task) -> list[tuple[str, str | None]]:
    deadline = task.deadline_ms
    return [
        ("task", task.id),
        ("from, to", between(task)),
        ("intent", safe(task.intent_text)),
        ("kind", None if task.task_kind is None else safe(task.task_kind)),
        ("content", "\n".join(said(task.content))),
        ("parent", task.parent),
        ("deadline", None if deadline is None else f"{clock(deadline)} ({ago(deadline)})"),
        ("twice", safety_line(task)),
    ]


def print_entry(entry: QueueEntry) -> None:
    print_fields(
        [
            *task_fields(entry.task),
            ("sent", ago(entry.sent_ms)),
            ("state", click.style(state_line(entry), fg=_COLOURS[entry.state])),
            ("lease", entry.lease_id),
            ("generation", str(entry.generation)),
        ]
    )
    for late in entry.late_results:
        click.echo("\nA result of an earlier lease came too late, and was not delivered:")
        print_result(late)


def status_text(result: Result) -> str:
    return click.style(result.status, fg=_RESULT_COLOURS[result.status])


def status_cell(result: Result) -> Cell:
    return Cell(result.status, _RESULT_COLOURS[result.status])


def result_brief(result: Result) -> str:
    if result.error_message is not None:
        return brief(result.error_message)
    return brief(" ".join(said(result.content)))


def print_result(result: Result, beside: str = "") -> None:
    click.echo(f"result of {result.task_id}: {status_text(result)}{beside}")
    if result.error_message is not None:
        click.echo(safe(result.error_message))
    for text in said(result.content):
        click.echo(text)
