"""A peer: Absurd on PostgreSQL, by its asynchronous SDK.

Its functions in the database come as `absurd.sql` with its releases, not with the package: the benchmark is told where
that file is. Every client has a connection of its own, spawns a task, and works on one task of the queue, whosever it
is: so nobody waits for a poll.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

import asyncpg
from absurd_sdk import AsyncAbsurd

from bench.clients import end_after
from bench.work import INTENT, REPLY, Figures, Tally, Window

_QUEUE: Final = "bench"


async def cycles(folder: Path, url: str, sql: str, clients: int, warm_s: float, seconds: float) -> Figures:
    end_after(warm_s + seconds)
    await _install(url, Path(sql))
    workers = [_Client(url) for _ in range(clients)]
    for worker in workers:
        await worker.connect()
    tally = Tally(Window(warm_s, seconds))
    await asyncio.gather(*(worker.run(tally) for worker in workers))
    return tally.figures()


async def _install(url: str, sql: Path) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(sql.read_text())
    await connection.close()
    app = AsyncAbsurd(url, queue_name=_QUEUE)
    await app.create_queue()
    await app.close()


class _Client:
    def __init__(self, url: str) -> None:
        self._app = AsyncAbsurd(url, queue_name=_QUEUE)
        self._app.register_task(name="answer")(self._answer)
        self._done = 0

    async def connect(self) -> None:
        await self._app.list_queues()

    async def _answer(self, params: Any, _context: Any) -> str:
        if params["intent"] != INTENT:
            raise RuntimeError("absurd gave another task")
        self._done += 1
        return REPLY

    async def run(self, tally: Tally) -> None:
        start = time.perf_counter()
        while start < tally.window.end:
            await self._app.spawn("answer", {"intent": INTENT})
            before = self._done
            while self._done == before:  # others may have all that a snapshot shows; what they spawned is there by then
                await self._app.work_batch()
            stop = time.perf_counter()
            tally.note(start, stop)
            start = stop
