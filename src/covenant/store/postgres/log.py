"""The log of all lanes, as one.

Numbers are drawn before a commit and seen after it, so a commit may appear behind one with a higher number. Who reads
the whole log in order is told only what nothing can come before any more: up to the last number that was drawn before
the oldest transaction that is still open. A transaction may use what is left of a block, but only as long as that is
the last one that was drawn. Who follows one task needs no such care: its commits wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from itertools import islice
from typing import Any, Final

import asyncpg

from covenant.model.audit import Logged
from covenant.model.record import Key
from covenant.store.journal.line import decode_line
from covenant.store.postgres.line import lines_in
from covenant.store.postgres.numbers import BLOCK, Numbers
from covenant.store.postgres.reader import Reader

# Drawn, and not only looked at: what is left of a block that a daemon has drawn before is of no use any more.
_DRAWN: Final = "select nextval('block') as drawn"
# A number of one's own, and not the end of the snapshot: that lies behind what is done, not behind what has begun.
_OPEN: Final = """
    select pg_current_xact_id()::text::bigint as next,
           pg_snapshot_xmin(pg_current_snapshot())::text::bigint as oldest
"""
_KEPT: Final = 64
_ROWS: Final = 200


class CommitLog:
    def __init__(self, reader: Reader, numbers: Numbers) -> None:
        self._reader = reader
        self._numbers = numbers
        self._looks: deque[tuple[int, int]] = deque()  # what was drawn, and the transaction after that
        self._horizon = 0

    def forget(self) -> None:
        """Numbers and transactions may come again."""
        self._looks.clear()
        self._horizon = 0

    async def _settled(self) -> int:
        """Every commit up to this number is visible, or will never be."""
        for _ in range(2):
            (drawn,) = await self._reader.fetch(_DRAWN)
            block = drawn["drawn"]
            self._numbers.drawn(block)
            self._numbers.go_on(block, block, block + BLOCK)
            (row,) = await self._reader.fetch(_OPEN)  # only now: whoever has drawn has begun before
            if len(self._looks) < _KEPT:  # the oldest are kept: they are the first to be settled
                self._looks.append((block, row["next"]))
            while self._looks and self._looks[0][1] <= row["oldest"]:
                self._horizon = max(self._horizon, self._looks.popleft()[0])
            if not self._looks:
                break
        return self._horizon

    async def end(self) -> int:
        return await self._settled()

    async def is_pruned(self, after: int) -> bool:
        """Whether commits behind this event are gone."""
        (row,) = await self._reader.fetch("select exists (select from anchor where seq > $1) as is_so", after)
        return bool(row["is_so"])

    async def after(self, seq: int, limit: int) -> list[Logged]:
        until = await self._settled()
        rows = await self._reader.fetch(
            """select lines from log where last > $1 and seq <= $2
               and seq >= coalesce((select seq from log where seq <= $1 order by seq desc limit 1), 0)
               order by seq limit $3""",
            seq,
            until,
            min(limit, _ROWS),
        )
        commits = (_logged(line) for row in rows for line in lines_in(row["lines"]))
        return list(islice((logged for logged in commits if logged.last > seq), limit))

    async def back(self, before: int | None, limit: int) -> list[Logged]:
        until = 2**62 if before is None else before
        sql = "select lines from log where seq < $1 order by seq desc limit $2"
        rows = await self._reader.fetch(sql, until, min(limit, _ROWS))
        commits = (_logged(line) for row in rows for line in reversed(lines_in(row["lines"])))
        return list(islice((logged for logged in commits if logged.seq < until), limit))

    async def trail(self, seq: int, key: Key, limit: int) -> list[Logged]:
        named = key.encode()
        found: list[Logged] = []
        for row in await self._reader.fetch("select lines from trail($1, $2, $3)", seq, key, min(limit, _ROWS)):
            for line in reversed(lines_in(row["lines"])):
                if named not in line:
                    continue
                logged = _logged(line)
                if logged.seq <= seq <= logged.last and len(found) < limit:
                    found.append(logged)
                    seq = logged.previous(key)
        return found


async def commits_of(connection: asyncpg.Connection[Any], after: int) -> AsyncGenerator[Logged, None]:
    """The whole log behind this event, in the order of its numbers, as it is now."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        sql = "select lines from log where last > $1 order by seq"
        async for row in connection.cursor(sql, after, prefetch=_ROWS):
            for line in lines_in(row["lines"]):
                yield _logged(line)


def _logged(line: bytes) -> Logged:
    return decode_line(line, "log", 0).logged()
