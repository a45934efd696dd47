"""The log of all lanes, as one.

Numbers are drawn before a commit and seen after it, so a commit may appear behind one with a higher number. Who reads
the whole log in order is told only what nothing can come before any more: up to the last number that was drawn before
the oldest transaction that is still open. Who follows one task needs no such care: its commits wait for each other.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from covenant.model.audit import Logged
from covenant.model.record import Key
from covenant.store.journal.line import decode_line
from covenant.store.postgres.reader import Reader

_HORIZON: Final = """
    select (select last_value from block) + 4095 as drawn,
           pg_snapshot_xmin(pg_current_snapshot())::text::bigint as oldest,
           pg_snapshot_xmax(pg_current_snapshot())::text::bigint as next
"""
_KEPT: Final = 64


class CommitLog:
    def __init__(self, reader: Reader, space: int) -> None:
        self._reader = reader
        self._looks: deque[tuple[int, int]] = deque(maxlen=_KEPT)  # what was drawn, and the transaction after that
        self._horizon = 0

    async def _settled(self) -> int:
        """Every commit up to this number is visible, or will never be."""
        for _ in range(2):
            (row,) = await self._reader.fetch(_HORIZON)
            self._looks.append((row["drawn"], row["next"]))
            while self._looks and self._looks[0][1] <= row["oldest"]:
                self._horizon = max(self._horizon, self._looks.popleft()[0])
            if not self._looks:
                break
        return self._horizon

    async def after(self, seq: int, limit: int) -> list[Logged]:
        until = await self._settled()
        rows = await self._reader.fetch(
            "select line from log where last > $1 and seq > $1 - 4096 and seq <= $2 order by seq limit $3",
            seq,
            until,
            limit,
        )
        return [_logged(row["line"]) for row in rows]

    async def back(self, before: int | None, limit: int) -> list[Logged]:
        until = 2**62 if before is None else before
        rows = await self._reader.fetch("select line from log where seq < $1 order by seq desc limit $2", until, limit)
        return [_logged(row["line"]) for row in rows]

    async def trail(self, seq: int, key: Key, limit: int) -> list[Logged]:
        rows = await self._reader.fetch("select line from trail($1, $2, $3)", seq, key, limit)
        return [_logged(row["line"]) for row in rows]


def _logged(line: Any) -> Logged:
    return decode_line(line.rstrip(b"\n"), "log", 0).logged()
