"""What the operator reads afterwards: rows that stand in the same commit as the change that they describe."""

from __future__ import annotations

from msgspec import Struct, field


class AuditRow(Struct, frozen=True, omit_defaults=True, gc=False):
    """`kind` and `action` are closed lists: see docs/repair-and-retry.md."""

    kind: str
    at_ms: int
    actor: str  # display of the caller, or `operator`
    action: str | None = None
    task_id: str | None = None
    lease_id: str | None = None
    attempt: int | None = None
    reason: str | None = None
    duplicate_risk: str | None = None  # the posture of whoever repaired
    declared: str | None = None  # what the task itself declares
    counts: dict[str, int] = field(default_factory=dict)
