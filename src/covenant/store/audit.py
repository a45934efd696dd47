"""The newest rows of the audit, read from the log backwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from covenant.model.audit import AuditRow, Logged
from covenant.rules.audit import rows_of


async def newest_rows(log_back: Callable[[int | None, int], Awaitable[list[Logged]]], limit: int) -> list[AuditRow]:
    """In the order in which they were made; from no more commits than that."""
    rows: list[AuditRow] = []
    scanned, before = 0, None
    while scanned < limit and len(rows) < limit and (stretch := await log_back(before, limit - scanned)):
        for logged in stretch:
            rows += reversed(list(rows_of(logged)))
        scanned += len(stretch)
        before = stretch[-1].seq
    return rows[:limit][::-1]
