"""What the log tells: rows for what was checked and decided, and rows for what changed. (Contract 28.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, get_args

from msgspec import structs

from covenant.model import event as e
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow, Logged
from covenant.model.command import NoteRefusal, SignHead
from covenant.model.error import Malformed
from covenant.model.record import HEAD_KEY
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import check_id

_SILENT = (
    e.Heartbeat,
    e.Said,
    e.ChunkKept,
    e.CardPublished,
    e.CardWithdrawn,
    e.SlotOpened,
    e.SlotLed,
    e.SlotCached,
    e.SlotClosed,
    e.Enrolled,
    e.ActionHeld,
    e.TokenRotated,
    e.PeerRevoked,
    e.Granted,
    e.GrantUsed,
    e.GrantRevoked,
    e.HeadSigned,
    e.PushDelivered,
    e.KeyTaken,
    e.RunBegun,
    e.RunWaits,
    e.TaskAwaited,
    e.RunResumed,
    e.RunClosed,
    e.RunSwept,
    e.StepKept,
    e.StepDropped,
    e.EntryKept,
    e.Marked,
    e.SignalTaken,
)
_DECISIONS = frozenset(
    (  # of rows that are no event: checks, refusals and decisions
        "a2a_auto_retry_scheduler_scan",
        "authentication_failed",
        "cache",
        "capability_check",
        "capability_granted",
        "capability_revoked",
        "card_published",
        "card_withdrawn",
        "effect",
        "peer_enrolled",
        "peer_revoked",
        "push_given_up",
        "refusals_counted",
        "rejected",
        "repair",
        "resume",
        "token_rotated",
    )
)
ROW_KINDS: Final = _DECISIONS | {str(kind.__struct_config__.tag) for kind in get_args(e.Event) if kind not in _SILENT}
_ACTORS_WITHOUT_LABEL: Final = ("operator", "system")
_OF_A_TASK = frozenset(("part", "late", "push", "run", "signal"))
_CARRIED = ("lease_id", "reason", "cause", "outcome", "number")


def check_row_filters(kind: str | None, actor: str | None, task_id: str | None) -> tuple[str | None, str | None]:
    """Return the actor and the task in the form that rows have. Raises Malformed for a filter that no row can pass."""
    if kind is not None and kind not in ROW_KINDS:
        raise Malformed(f"no row is of kind {kind!r}; there are {', '.join(sorted(ROW_KINDS))}", field="row")
    if actor is not None and actor not in _ACTORS_WITHOUT_LABEL:
        actor = AgentId.named(actor).display
    return actor, None if task_id is None else check_id(task_id, "task_id")


def sign_head(command: SignHead, view: View, ctx: Context) -> Commit:
    signed = (command.seq, command.hash, command.signature, command.pubkey, command.anchors)
    return Commit((e.HeadSigned(HEAD_KEY, *signed),))


def note_refusal(command: NoteRefusal, view: View, ctx: Context) -> Commit:
    counts = {"not_written": command.count} if command.count else {}
    return Commit((), None, (AuditRow(command.kind, subject=command.subject, reason=command.reason, counts=counts),))


def rows_of(logged: Logged) -> Iterator[AuditRow]:
    """A commit as rows: first what was checked, then what changed. A sign of life is no row, and what a row of its own
    tells better is not told twice."""
    for row in logged.audit:
        yield structs.replace(row, seq=logged.seq, at_ms=logged.at, actor=logged.by)
    for number, event in enumerate(logged.events):
        if not isinstance(event, _SILENT):
            yield _row_of(event, logged.seq + number, logged)


def _row_of(event: e.Event, seq: int, logged: Logged) -> AuditRow:
    known: dict[str, Any] = {name: getattr(event, name, None) for name in _CARRIED}
    result = getattr(event, "result", None)
    lease_id = known["lease_id"] or getattr(result, "lease_id", None)
    reason = known["reason"] or known["outcome"] or known["cause"] or getattr(result, "status", None)
    return AuditRow(
        kind=str(event.__struct_config__.tag),
        task_id=task_of(event),
        lease_id=lease_id,
        reason=None if reason is None else str(reason),
        seq=seq,
        at_ms=logged.at,
        actor=logged.by,
    )


def task_of(event: e.Event) -> str | None:
    """The task that an event is about, if it is about one."""
    prefix, colon, rest = event.key.partition(":")
    if not colon:
        return event.key if "-" in prefix else None
    return rest.partition(":")[0] if prefix in _OF_A_TASK else None
