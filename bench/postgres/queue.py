"""A peer: the queue that one would write by hand on PostgreSQL with asyncpg, at its best.

One table; each step is one prepared statement, which is its own transaction; the claim is FOR UPDATE SKIP LOCKED over a
partial index that holds only what is ready. Pages are left half empty, and what a completion changes is in no index,
so that it stays on its page. Every client has a connection and a recipient of its own: nobody is in its way.

Its cycle is enqueue, claim, complete. With `answers` the sender also takes the answer, as in a cycle of Covenant: a
fourth step, and an index for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import asyncpg

from bench.clients import end_after
from bench.work import INTENT, REPLY, Figures, Tally, Window

_SCHEMA: Final = """
CREATE TABLE task (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, sender text NOT NULL, recipient text NOT NULL,
    intent text NOT NULL, lease integer, result text, drained boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);
CREATE INDEX ready ON task (recipient, id) WHERE lease IS NULL;
"""
_ANSWERS: Final = """
CREATE INDEX answer ON task (sender, id) WHERE result IS NOT NULL AND NOT drained;
"""
_ENQUEUE: Final = "INSERT INTO task (sender, recipient, intent) VALUES ($1, $2, $3) RETURNING id"
_CLAIM: Final = """
UPDATE task SET lease = $1 WHERE id = (
    SELECT id FROM task WHERE recipient = $2 AND lease IS NULL ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING id, intent
"""
_COMPLETE: Final = "UPDATE task SET result = $1 WHERE id = $2 AND lease = $3 AND result IS NULL RETURNING id"
_DRAIN: Final = """
UPDATE task SET drained = true WHERE id = (
    SELECT id FROM task WHERE sender = $1 AND result IS NOT NULL AND NOT drained
    ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING id, result
"""


async def cycles(
    folder: Path,
    url: str,
    clients: int,
    first: int,
    answers: bool,
    warm_s: float,
    seconds: float,
    turns: AsyncIterator[None],
) -> AsyncIterator[Figures]:
    """First that all are connected, then the figures of each turn. The times are those of one step."""
    end_after(warm_s + seconds)
    connections = [await asyncpg.connect(url) for _ in range(clients)]
    await _make_tables(connections[0], answers)
    queues = [await _Client.prepared(connection, first + n, answers) for n, connection in enumerate(connections)]
    yield {}
    async for _ in turns:
        end_after(warm_s + seconds)
        steps = Tally(Window(warm_s, seconds))
        await asyncio.gather(*(queue.run(steps) for queue in queues))
        figures = steps.figures()
        figures["rate"] /= 4 if answers else 3
        yield figures


async def _make_tables(connection: Any, answers: bool) -> None:
    """Once, by the first process that comes."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(1)")
        if await connection.fetchval("SELECT to_regclass('task')") is None:
            await connection.execute(_SCHEMA + (_ANSWERS if answers else ""))


class _Client:
    def __init__(self, number: int, enqueue: Any, claim: Any, complete: Any, drain: Any | None) -> None:
        self._number = number
        self._sender, self._recipient = f"p{number}", f"w{number}"
        self._enqueue, self._claim, self._complete, self._drain = enqueue, claim, complete, drain

    @staticmethod
    async def prepared(connection: Any, number: int, answers: bool) -> _Client:
        prepare = connection.prepare
        drain = await prepare(_DRAIN) if answers else None
        return _Client(number, await prepare(_ENQUEUE), await prepare(_CLAIM), await prepare(_COMPLETE), drain)

    async def run(self, steps: Tally) -> None:
        clock, end = time.perf_counter, steps.window.end
        start = clock()
        while start < end:
            sent = await self._enqueue.fetchval(self._sender, self._recipient, INTENT)
            enqueued = clock()
            steps.note(start, enqueued)
            claimed, _ = await self._claim.fetchrow(self._number, self._recipient)
            leased = clock()
            steps.note(enqueued, leased)
            completed = await self._complete.fetchval(REPLY, claimed, self._number)
            start = clock()
            steps.note(leased, start)
            if self._drain is not None:
                answered = start
                completed, _ = await self._drain.fetchrow(self._sender)
                start = clock()
                steps.note(answered, start)
            if not sent == claimed == completed:
                raise RuntimeError("the queue gave another task")
