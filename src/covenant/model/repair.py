"""How a stuck lease is dealt with: repair by hand, and the bounded retry gate."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, TypeAlias

from msgspec import Struct

from covenant.model.record import TaskState
from covenant.model.task import Result

DuplicateRisk: TypeAlias = Literal["idempotent", "operator_accepted"]


class Requeue(
    Struct, frozen=True, tag="requeue", tag_field="action", omit_defaults=True, gc=False, forbid_unknown_fields=True
):
    duplicate_risk: DuplicateRisk
    lease_id: str | None = None


class ForceError(
    Struct, frozen=True, tag="force_error", tag_field="action", omit_defaults=True, gc=False, forbid_unknown_fields=True
):
    message: str
    lease_id: str | None = None


class RepairRequest(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    task_id: str
    command: Requeue | ForceError
    reason: str


class RepairOutcome(Struct, frozen=True, omit_defaults=True, gc=False):
    task_id: str
    action: Literal["requeued", "forced_error", "canceled"]  # canceled: its sender had asked for that
    state: TaskState
    attempt: int
    generation: int
    result: Result | None = None


class RetryPolicy(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """The bounds of one pass of the retry gate. Off, it only reports."""

    enabled: bool = False
    min_lease_age_ms: int = 300_000
    max_attempts: int = 3
    max_requeues: int = 1
    scan_limit: int = 100


class SkipReason(StrEnum):
    """Why the gate left a lease alone, in the order in which it looks."""

    WAITING_FOR_INPUT = "waiting_for_input"
    LEASE_TOO_YOUNG = "lease_too_young"
    MISSING_IDEMPOTENCY = "missing_idempotency"
    UNSAFE_DUPLICATE_SAFETY = "unsafe_duplicate_safety"
    CANCEL_REQUESTED = "cancel_requested"
    MAX_ATTEMPTS_REACHED = "max_attempts_reached"
    LIMIT_REACHED = "limit_reached"
    CAPABILITY_SCOPE_MISMATCH = "capability_scope_mismatch"


class RetryCandidate(Struct, frozen=True, gc=False):
    task_id: str
    lease_id: str
    attempt: int
    idempotency_key: str
    lease_age_ms: int


class RetrySkip(Struct, frozen=True, gc=False):
    task_id: str
    reason: SkipReason
    attempt: int
    lease_age_ms: int


class RetryReport(Struct, frozen=True, gc=False):
    """`requeued` is what was done; `would_requeue` is what a disabled pass would have done. `cursor` goes on behind
    the last lease that was looked at."""

    policy: RetryPolicy
    considered: int
    requeued: Sequence[RetryCandidate]
    would_requeue: Sequence[RetryCandidate]
    skipped: Sequence[RetrySkip]
    exhausted: Sequence[str]
    cursor: str | None = None
