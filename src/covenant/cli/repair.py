"""What an operator does about a lease whose holder is gone: by hand, or through the bounded gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import click

from covenant.cli.bounds import ATTEMPTS, PAGE, REQUEUES, SPAN_MS, reason_option, text_option
from covenant.cli.entry import print_result
from covenant.cli.option import RISKS, Spelled, answers, lease_guard
from covenant.cli.session import Session
from covenant.cli.table import Column, print_table
from covenant.cli.words import brief, counted
from covenant.model.repair import (
    DuplicateRisk,
    ForceError,
    RepairOutcome,
    RepairRequest,
    Requeue,
    RetryPolicy,
    RetryReport,
)
from covenant.model.span import span
from covenant.serve import wire as w

_DEFAULT: Final = RetryPolicy()

F = TypeVar("F", bound=Callable[..., Any])


@click.command()
@click.argument("task_id")
@reason_option
@click.option(
    "--duplicate-risk",
    "risk",
    required=True,
    type=Spelled(RISKS),
    help="idempotent: doing it twice is safe. operator-accepted: it may not be, and you accept that.",
)
@lease_guard
@answers
def requeue(session: Session, task_id: str, reason: str, risk: str, lease_id: str | None) -> None:
    """Take a task from its holder and queue it again.

    It keeps its id; the next lease is its next attempt.
    """
    posture = cast(DuplicateRisk, risk.replace("-", "_"))
    _repair(session, RepairRequest(task_id, Requeue(posture, lease_id), reason))


@click.command()
@click.argument("task_id")
@reason_option
@text_option("--message", required=True, meaning="What the sender is told.")
@lease_guard
@answers
def force_error(session: Session, task_id: str, reason: str, message: str, lease_id: str | None) -> None:
    """Take a task from its holder and end it with an error."""
    _repair(session, RepairRequest(task_id, ForceError(message, lease_id), reason))


def _repair(session: Session, request: RepairRequest) -> None:
    done = session.ask(w.Repair(request=request), w.Repaired)
    session.answer(done, lambda: _tell_outcome(done.outcome))


def _tell_outcome(outcome: RepairOutcome) -> None:
    told = {
        "requeued": f"queued again after attempt {outcome.attempt}",
        "forced_error": "ended with an error; its sender is told",
        "canceled": "canceled, as its sender had asked",
    }
    click.echo(f"{outcome.task_id} is {told[outcome.action]}")
    if outcome.result is not None:
        print_result(outcome.result)


def _bound(name: str, kind: click.IntRange, default: int, told: str) -> Callable[[F], F]:
    return click.option(name, type=kind, default=default, show_default=True, help=told)


@click.command()
@click.option("--enable", is_flag=True, help="Do it. Without this it only tells what it would do.")
@_bound("--min-lease-age-ms", SPAN_MS, _DEFAULT.min_lease_age_ms, "Only leases silent for so many ms.")
@_bound("--max-attempts", ATTEMPTS, _DEFAULT.max_attempts, "Leave alone what was tried so often.")
@_bound("--max-requeues", REQUEUES, _DEFAULT.max_requeues, "Queue no more than so many.")
@_bound("--scan-limit", PAGE, _DEFAULT.scan_limit, "Look at no more leases than so many.")
@answers
def retry_stale(
    session: Session, enable: bool, min_lease_age_ms: int, max_attempts: int, max_requeues: int, scan_limit: int
) -> None:
    """Queue again what is stale and may be done twice."""
    policy = RetryPolicy(
        enabled=enable,
        min_lease_age_ms=min_lease_age_ms,
        max_attempts=max_attempts,
        max_requeues=max_requeues,
        scan_limit=scan_limit,
    )
    done = session.ask(w.RetryStale(policy=policy), w.AutoRetried)
    session.answer(done, lambda: _tell_report(session, done.report))


def _tell_report(session: Session, report: RetryReport) -> None:
    chosen = report.requeued if report.policy.enabled else report.would_requeue
    verb = "requeued" if report.policy.enabled else "would requeue"
    click.echo(
        f"looked at {counted(report.considered, 'lease')}: {verb} {len(chosen)}, left alone {len(report.skipped)}, "
        f"out of attempts {len(report.exhausted)}"
    )
    rows = [
        *(
            (one.task_id, verb, str(one.attempt), span(one.lease_age_ms), f"key {brief(one.idempotency_key, 40)}")
            for one in chosen
        ),
        *(
            (one.task_id, "leaves", str(one.attempt), span(one.lease_age_ms), one.reason.value)
            for one in report.skipped
        ),
    ]
    if rows:
        click.echo()
        columns = (Column("task"), Column("gate"), Column("try"), Column("silent"), Column("why", fits=True))
        print_table(columns, rows)
    if chosen and not report.policy.enabled:
        click.echo(
            f"\nnothing was changed; to do it: {session.command('a2a retry-stale --enable')} (and the same bounds)"
        )
    elif not report.policy.enabled:
        click.echo("\nnothing was changed: without --enable it only looks")
