"""What the operator reads afterwards: the log of commits, and the rows that tell of them.

A commit is logged with who made it. Its events are one sort of row, which say what changed; the rows that it carries
are the other, and say what was checked, granted, refused or decided. Both stand in the same line: neither can be
missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from covenant.model.event import Event


class AuditRow(Struct, frozen=True, omit_defaults=True, gc=False):
    """`kind` and `action` are closed lists: see docs/audit.md. In a commit, `seq`, `at_ms` and `actor` are left out:
    the commit has them."""

    kind: str
    action: str | None = None
    scope_id: str | None = None
    passed: bool | None = None
    grant: str | None = None
    subject: str | None = None
    task_id: str | None = None
    lease_id: str | None = None
    attempt: int | None = None
    reason: str | None = None
    duplicate_risk: str | None = None  # the posture of whoever repaired
    declared: str | None = None  # what the task itself declares
    counts: dict[str, int] = field(default_factory=dict)
    seq: int = 0
    at_ms: int = 0
    actor: str = ""  # display of the caller, `operator`, or `system` for what the clock brings


class Logged(Struct, frozen=True, gc=False):
    """One commit as the log keeps it. `seq` numbers its first event; `prev` says, for each event, which event last
    touched the same record before this commit (0: none)."""

    seq: int
    at: int
    by: str
    events: Sequence[Event]
    prev: Sequence[int] = ()
    audit: Sequence[AuditRow] = ()

    @property
    def last(self) -> int:
        return self.seq + max(1, len(self.events)) - 1

    def previous(self, key: str) -> int:
        """The event that last touched this record before this commit; 0 when there is none."""
        prev = (prev for event, prev in zip(self.events, self.prev, strict=False) if event.key == key)
        return next(prev, 0)
