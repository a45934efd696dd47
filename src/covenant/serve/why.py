"""Why a task is where it is: one reason from a closed list, and the command that would move it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from shlex import quote
from typing import Final

from msgspec import Struct

from covenant.model.agent import AgentId
from covenant.model.record import Asks, Outcome, TaskState
from covenant.model.run import RunSeen, RunStatus
from covenant.model.view import QueueEntry


class Reason(StrEnum):
    WAITS_FOR_ITS_TIME = "waits_for_its_time"
    FOLLOWS_ANOTHER = "follows_another"
    REVOKED = "revoked"
    WAITS_FOR_A_WORKER = "waits_for_a_worker"
    REQUEUED = "requeued"
    CANCEL_ASKED = "cancel_asked"
    WAITING_FOR_INPUT = "waiting_for_input"
    OVERDUE_IN_FLIGHT = "overdue_in_flight"
    HELD = "held"
    AWAITING_WORK = "awaiting_work"
    AWAITING_INPUT = "awaiting_input"
    EFFECT_IN_DOUBT = "effect_in_doubt"
    CHILD_IN_DOUBT = "child_in_doubt"
    WOKEN = "woken"
    WAITS_TO_BE_DRAINED = "waits_to_be_drained"
    REPLAYED = "replayed"
    ANSWERED = "answered"
    CANCELED = "canceled"
    FORCED = "forced"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    REJECTED = "rejected"


_NEEDED: Final = {Asks.INPUT: "input", Asks.AUTH: "an authorisation"}


class Why(Struct, frozen=True):
    reason: Reason
    explanation: str
    command: str | None = None


def _unix(at_ms: int) -> str:
    return f"Unix time {at_ms} ms"


def reason_of(
    entry: QueueEntry,
    when: Callable[[int], str] = _unix,
    run: RunSeen | None = None,
    revoked: Collection[str] = (),
) -> Why:
    """Return the reason why a task does not move, and the command that moves it.

    `when` formats times, as numbers for a program or in words for a person. `run` is the run of a durable agent with
    this task, `revoked` has at least the keys of the revoked peers among its parties.
    """
    task = entry.task
    if is_stranded(entry, revoked) and entry.follows is None:
        return _why_stranded(entry)
    if run is not None and (entry.state is TaskState.PARKED or not _is_odd(entry)):
        return why_run(run, when)
    if entry.state is TaskState.QUEUED:
        return _why_queued(entry, when)
    if entry.state is TaskState.IN_FLIGHT:
        return _why_in_flight(entry, when)
    if entry.state is TaskState.PARKED:
        return Why(Reason.AWAITING_WORK, "It is a run, and waits.", f"covenant runs show {task.id}")
    if entry.state is TaskState.RESULT_PENDING:
        return Why(
            Reason.WAITS_TO_BE_DRAINED,
            f"It has ended ({entry.outcome}); its result waits for {task.sender} to receive it, whoever looks at it.",
        )
    if entry.replayed:
        return Why(Reason.REPLAYED, "It was answered from the result cache, and its sender has received that.")
    outcome = entry.outcome or Outcome.ANSWERED
    return Why(Reason(outcome.value), f"It is over: {outcome.value}, and its sender has received the result.")


def is_stranded(entry: QueueEntry, revoked: Collection[str]) -> bool:
    """Return whether the task waits for a revoked peer: its holder or recipient, or the sender of a finished one."""
    waits_for = entry.leased_to or entry.task.recipient
    if entry.state is TaskState.RESULT_PENDING:
        return entry.task.sender is not None and entry.task.sender.pubkey in revoked
    return entry.outcome is None and waits_for.pubkey in revoked


def _why_stranded(entry: QueueEntry) -> Why:
    task = entry.task
    if entry.state is TaskState.RESULT_PENDING and task.sender is not None:
        return Why(
            Reason.REVOKED,
            f"It has ended ({entry.outcome}); its result waits for {task.sender}, who was revoked. "
            f"{_enroll_again(task.sender)}, or receives it in its place.",
            f"covenant a2a results --next --for {task.sender}",
        )
    gone = entry.leased_to or task.recipient
    what = "holds it, and can neither go on nor answer" if entry.leased_to else "nobody else can lease it"
    return Why(
        Reason.REVOKED,
        f"{gone} was revoked: {what}. {_enroll_again(gone)}, or somebody cancels it.",
        f"covenant a2a cancel {task.id} --reason REASON",
    )


def _enroll_again(gone: AgentId) -> str:
    return f"The operator lets it in again (covenant peers enroll {gone} --key {gone.pubkey})"


def _is_odd(entry: QueueEntry) -> bool:
    """Something is to be said of it before anything else."""
    return entry.cancel_requested or entry.asks is not None or entry.state is not TaskState.IN_FLIGHT


def why_run(run: RunSeen, when: Callable[[int], str] = _unix) -> Why:
    """Why a run stands where it stands. What it waits for is told in full by `covenant runs show`."""
    match run.status:
        case RunStatus.EFFECT_IN_DOUBT:
            effect = run.doubts[0]
            return Why(
                Reason.EFFECT_IN_DOUBT,
                f"{effect} was begun, and nobody knows what became of it. Find out, and say: done, failed or retry.",
                f"covenant runs judge {run.task_id} {quote(effect)} done|failed|retry --reason REASON",
            )
        case RunStatus.CHILD_IN_DOUBT:
            return Why(
                Reason.CHILD_IN_DOUBT,
                f"It waits for task {run.doubts[0]}, whose worker is silent, and which may not simply be done again.",
                f"covenant why {run.doubts[0]}",
            )
        case RunStatus.AWAITING_INPUT | RunStatus.AWAITING_WORK:
            return _why_waiting(run, when)
        case RunStatus.WOKEN | RunStatus.QUEUED:
            return Why(
                Reason.WOKEN,
                f"What it waited for is there; no worker of {run.agent} has taken it up yet: is one running?",
                f"covenant runs cancel {run.task_id} --reason REASON",
            )
        case RunStatus.RUNNING:
            since = "" if run.since_ms is None else f", without a step since {when(run.since_ms)}"
            seen = "" if run.heartbeat_ms is None else f" (last sign of life: {when(run.heartbeat_ms)})"
            return Why(
                Reason.HELD,
                f"Worker {run.incarnation} of {run.agent} is at step {run.step + 1}{since}{seen}. "
                "If it is gone, say so; if it lives and does not go on, its function hangs: restart it.",
                f"covenant runs resume {run.task_id} --reason REASON",
            )
        case RunStatus.ENDED:
            failed = "" if run.error is None else f", with an error: {run.error}"
            return Why(Reason(run.outcome or "answered"), f"It is over: {run.outcome}{failed}.")


def _why_waiting(run: RunSeen, when: Callable[[int], str]) -> Why:
    until = "" if run.until_ms is None else f", until {when(run.until_ms)} at the latest"
    names = [name for kind, _, name in (told.partition(" ") for told in run.awaits) if kind == "signal"]
    if run.status is RunStatus.AWAITING_INPUT:
        return Why(
            Reason.AWAITING_INPUT,
            f"It waits for somebody to say {' or '.join(names)}{until}.",
            f"covenant runs signal {run.task_id} {quote(names[0])} VALUE",
        )
    tasks = [name for kind, _, name in (told.partition(" ") for told in run.awaits) if kind == "task"]
    if not tasks:
        return Why(Reason.AWAITING_WORK, f"It sleeps{until.removesuffix(' at the latest')}.")
    others = f" and {len(tasks) - 1} more" if len(tasks) > 1 else ""
    said = f", or for somebody to say {' or '.join(names)}" if names else ""
    return Why(Reason.AWAITING_WORK, f"It waits for task {tasks[0]}{others}{said}{until}.", f"covenant why {tasks[0]}")


def _why_queued(entry: QueueEntry, when: Callable[[int], str]) -> Why:
    task = entry.task
    if entry.follows is not None:
        return Why(
            Reason.FOLLOWS_ANOTHER,
            f"Task {entry.follows} is doing the same work under the same key; this one gets its result.",
            f"covenant why {entry.follows}",
        )
    if entry.not_before_ms is not None:
        return Why(
            Reason.WAITS_FOR_ITS_TIME,
            f"It is not to be handed out before {when(entry.not_before_ms)}.",
        )
    cancel = f"covenant a2a cancel {task.id} --reason REASON"
    if entry.attempt > 0:
        return Why(
            Reason.REQUEUED,
            f"Attempt {entry.attempt} ended without a result; it waits for {task.recipient} to lease it again.",
            cancel,
        )
    return Why(Reason.WAITS_FOR_A_WORKER, f"No worker of {task.recipient} has leased it yet: is one running?", cancel)


def _why_in_flight(entry: QueueEntry, when: Callable[[int], str]) -> Why:
    task = entry.task
    safe = task.idempotency is not None and task.idempotency.duplicate_safety == "idempotent"
    risk = "idempotent" if safe else "operator-accepted"
    command = f"covenant a2a requeue {task.id} --lease-id {entry.lease_id} --duplicate-risk {risk} --reason REASON"
    seen = "" if entry.heartbeat_ms is None else f" (last sign of life: {when(entry.heartbeat_ms)})"
    holder = f"{entry.leased_to} holds attempt {entry.attempt}{seen}"
    if entry.cancel_requested:
        return Why(Reason.CANCEL_ASKED, f"A cancel was asked for, and {holder}.", f"covenant a2a cancel {task.id}")
    if entry.asks is not None:
        return Why(
            Reason.WAITING_FOR_INPUT,
            f"{holder}, and waits for {task.sender}: it has asked for {_NEEDED[entry.asks]}.",
            f"covenant a2a say {task.id} TEXT",
        )
    if entry.overdue:
        return Why(Reason.OVERDUE_IN_FLIGHT, f"Its deadline has passed, but {holder}: a late result counts.", command)
    return Why(
        Reason.HELD, f"{holder}. If that worker is gone, nothing is redelivered until somebody decides.", command
    )
