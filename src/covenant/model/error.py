"""Every way in which Covenant says no.

One hierarchy in one file. Each error has a stable `code`; surfaces map codes, never class names or messages.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self


class CovenantError(Exception):
    """A refusal with a stable code. `details` holds what a program may want to read."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def to_wire(self) -> dict[str, Any]:
        return {"kind": "error", "code": self.code, "message": self.message, **self.details}

    def saying(self, **details: Any) -> Self:
        """The same refusal with these details. Another one, as this may be told to others, too."""
        other = type(self).__new__(type(self), *self.args)
        vars(other).update(vars(self), details={**self.details, **details})
        return other


# --- bad input: nothing was stored -------------------------------------------------------------------------


class InvalidInput(CovenantError):
    code = "invalid_input"


class Malformed(InvalidInput):
    """A wrong type, a missing member, or text that is not JSON."""

    code = "malformed"


class BlankText(InvalidInput):
    """A text that must say something is empty or only white space; `field` names it."""

    code = "blank_text"


class BadId(InvalidInput):
    code = "bad_id"


class BadAgent(InvalidInput):
    code = "bad_agent"


class TooLarge(InvalidInput):
    """A body, text, page or batch over its limit; `field`, `size` and `limit` say which."""

    code = "too_large"


class HeadTooLarge(TooLarge):
    """What stands before the body of an HTTP request is over its limit."""

    code = "head_too_large"


class BadCursor(InvalidInput):
    code = "bad_cursor"


# --- refused by a rule -------------------------------------------------------------------------------------


class UnknownTask(CovenantError):
    """No such task, or none that the caller may see."""

    code = "unknown_task"


class UnknownLease(CovenantError):
    code = "unknown_lease"


class SenderMismatch(CovenantError):
    code = "sender_mismatch"


class NotPermitted(CovenantError):
    """The caller sees the task and may not do this to it."""

    code = "not_permitted"


class TaskConflict(CovenantError):
    """The task id is taken by other content."""

    code = "task_conflict"


class IdempotencyConflict(CovenantError):
    """The idempotency key is taken by other content."""

    code = "idempotency_conflict"


class ResultConflict(CovenantError):
    """The task was already answered with another result."""

    code = "result_conflict"


class PartialGap(CovenantError):
    """A numbered partial result does not follow the last one."""

    code = "partial_gap"


class NotLeased(CovenantError):
    code = "not_leased"


class LeaseRequired(CovenantError):
    """A result without `lease_id` is accepted only from the holder of the first attempt."""

    code = "lease_required"


class LeaseMismatch(CovenantError):
    code = "lease_mismatch"


class LeaseSuperseded(CovenantError):
    """The lease ended before this call: the task was requeued or released since."""

    code = "lease_superseded"


class TaskTerminal(CovenantError):
    """The task has ended; `outcome` says how."""

    code = "task_terminal"


class GenerationMismatch(CovenantError):
    """The task has moved on since the caller looked; `expected` and `current` say from where to where."""

    code = "generation_mismatch"


class ContextMismatch(CovenantError):
    """The task belongs to another conversation."""

    code = "context_mismatch"


class TooManyWaiters(CovenantError):
    code = "too_many_waiters"


# --- refused at the door ------------------------------------------------------------------------------------


class Unauthenticated(CovenantError):
    """No token, or none that is valid (any more)."""

    code = "unauthenticated"


class MissingCapability(NotPermitted):
    """No grant of this action; `action` names it."""

    code = "missing_capability"


class ScopeMismatch(NotPermitted):
    """There is a grant of this action, but it does not reach this far, or is used up or over."""

    code = "scope_mismatch"


class RecipientRefused(NotPermitted):
    """The recipient has not agreed to take tasks of this sender."""

    code = "recipient_refused"


class UnknownPeer(CovenantError):
    code = "unknown_peer"


class UnknownGrant(CovenantError):
    code = "unknown_grant"


class UnknownPush(CovenantError):
    code = "unknown_push"


class PeerConflict(CovenantError):
    """The label or the key is taken."""

    code = "peer_conflict"


class BadAction(InvalidInput):
    """Not one of the actions there are."""

    code = "bad_action"


class RateLimited(CovenantError):
    """Too many requests, waits or connections of this peer; `retry_after_ms` says when to try again."""

    code = "rate_limited"


class TooManyConnections(RateLimited):
    """The daemon has as many connections as it takes, of everybody together."""

    code = "too_many_connections"


class TooSlow(CovenantError):
    """A request that began and did not come to its end in time; nothing was done."""

    code = "too_slow"


class QueueFull(CovenantError):
    """The recipient has too many tasks waiting."""

    code = "queue_full"


class UnknownRoute(CovenantError):
    code = "unknown_route"


class WrongMethod(CovenantError):
    code = "wrong_method"


class UnsafeFile(CovenantError):
    """A secret that others could read, or that is none."""

    code = "unsafe_file"


class BadSetting(InvalidInput):
    """An option or a variable of the environment that does not say what it should; `name` says which."""

    code = "bad_setting"


class Draining(CovenantError):
    """The daemon is about to end and hands out no new work."""

    code = "draining"


class Unreachable(CovenantError):
    """The daemon did not answer. Whether the call took effect is unknown; sending it again under the same task id is
    safe."""

    code = "unreachable"


class Internal(CovenantError):
    """Something went wrong inside; the daemon's log tells what."""

    code = "internal"


# --- the store ---------------------------------------------------------------------------------------------


class StoreError(CovenantError):
    code = "store_error"


class StoreLocked(StoreError):
    """Another process owns the folder."""

    code = "store_locked"


class StoreUnavailable(StoreError):
    """A write or sync failed. What was unanswered may or may not be stored (`outcome: unknown`);
    sending it again under the same task id is safe."""

    code = "store_unavailable"


class ClockAstray(StoreError):
    """The clock of this machine and that of the store's database are too far apart: what is due, past its time or
    expired would be so for all daemons. `skew_ms` says by how much this one is ahead."""

    code = "clock_astray"


class StoreFull(StoreUnavailable):
    """No room on the disk. The store reopens by itself when there is room."""

    code = "store_full"


class StoreClosed(StoreError):
    code = "store_closed"


class StoreDamaged(StoreError):
    """A file does not read as it was written; `file` and `line` say where."""

    code = "store_damaged"


class UnsupportedFormat(StoreError):
    """Written by a newer version of Covenant."""

    code = "unsupported_format"


class UnknownStore(StoreError):
    """No engine answers to this URL."""

    code = "unknown_store"


class RepairRefused(StoreError):
    """A cut would not make this journal whole, or would take more than it saves; nothing was changed."""

    code = "repair_refused"


class CopyFailed(StoreError):
    """A store could not be copied into another; the message says why. The target is as it was."""

    code = "copy_failed"


class BackupFailed(StoreError):
    """A backup or a restore could not be done; the message says why. The journal is as it was."""

    code = "backup_failed"


# --- durable agents ----------------------------------------------------------------------------------------


class NotARun(CovenantError):
    """The task is no run of a durable agent, or none has begun or would begin with it."""

    code = "not_a_run"


class WrongStep(CovenantError):
    """A commit of a run out of its order; `expected` is the next number."""

    code = "wrong_step"


class NotProvenDead(CovenantError):
    """The worker that holds a run gave a sign of life not long ago."""

    code = "not_proven_dead"


class ResumesExhausted(CovenantError):
    """A run was taken up too often without getting any further."""

    code = "resumes_exhausted"


class NotInDoubt(CovenantError):
    """The run does not wait for a decision about this effect."""

    code = "not_in_doubt"


class KeyReused(CovenantError):
    """A key that is for once was used again, with other content."""

    code = "key_reused"


class ResultGone(CovenantError):
    """The result of a task is past its retention."""

    code = "result_gone"
