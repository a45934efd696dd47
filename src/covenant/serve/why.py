"""Why a task is where it is: one reason from a closed list, and the command that would move it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from msgspec import Struct

from covenant.model.record import Asks, Outcome, TaskState
from covenant.model.view import QueueEntry


class Reason(StrEnum):
    WAITS_FOR_ITS_TIME = "waits_for_its_time"
    FOLLOWS_ANOTHER = "follows_another"
    WAITS_FOR_A_WORKER = "waits_for_a_worker"
    REQUEUED = "requeued"
    CANCEL_ASKED = "cancel_asked"
    WAITING_FOR_INPUT = "waiting_for_input"
    OVERDUE_IN_FLIGHT = "overdue_in_flight"
    HELD = "held"
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


def reason_of(entry: QueueEntry, when: Callable[[int], str] = _unix) -> Why:
    """`when` says how moments are told: to a program as numbers, to a person in words."""
    task = entry.task
    if entry.state is TaskState.QUEUED:
        return _why_queued(entry, when)
    if entry.state is TaskState.IN_FLIGHT:
        return _why_in_flight(entry, when)
    if entry.state is TaskState.RESULT_PENDING:
        return Why(
            Reason.WAITS_TO_BE_DRAINED,
            f"It has ended ({entry.outcome}); its result waits for {task.sender} to receive it.",
            f"covenant a2a results --task {task.id}",
        )
    if entry.replayed:
        return Why(Reason.REPLAYED, "It was answered from the result cache, and its sender has received that.")
    outcome = entry.outcome or Outcome.ANSWERED
    return Why(Reason(outcome.value), f"It is over: {outcome.value}, and its sender has received the result.")


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
