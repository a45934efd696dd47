"""A peer: Procrastinate on PostgreSQL, jobs deferred and done in one process.

A client goes on as soon as its job has run; the commit of the job's end follows at once, and holds the job's place in
the worker until it is through, so it counts. Workers hear of new jobs by NOTIFY. A worker takes one job at a time from
the database, so there are several.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any, Final

from procrastinate import App, PsycopgConnector

from bench.clients import end_after
from bench.work import INTENT, REPLY, Figures, Tally, Window

_WORKERS_MAX: Final = 8
_CONNECTIONS_MAX: Final = 40
_POLL_S: Final = 0.02  # a notification that comes while a worker looks for a job is lost on it
_START_S: Final = 0.5


async def cycles(folder: Path, url: str, clients: int, warm_s: float, seconds: float) -> Figures:
    logging.getLogger("procrastinate").setLevel(logging.ERROR)
    end_after(warm_s + seconds)
    workers = min(clients, _WORKERS_MAX)
    size = min(clients, _CONNECTIONS_MAX) + 2 * workers
    app = App(connector=PsycopgConnector(conninfo=url, min_size=size, max_size=size))
    ran: dict[int, asyncio.Future[str]] = {}

    @app.task(name="answer", queue="bench")
    async def answer(number: int, intent: str) -> str:
        ran[number].set_result(intent)
        return REPLY

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        at_once = -(-clients // workers)
        working = [asyncio.create_task(_work(app, at_once)) for _ in range(workers)]
        await asyncio.sleep(_START_S)
        tally = Tally(Window(warm_s, seconds))
        await asyncio.gather(*(_client(answer, ran, number, tally) for number in range(clients)))
        for worker in working:
            worker.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    return tally.figures()


async def _work(app: App, at_once: int) -> None:
    await app.run_worker_async(
        queues=["bench"], concurrency=at_once, fetch_job_polling_interval=_POLL_S, install_signal_handlers=False
    )


async def _client(answer: Any, ran: dict[int, asyncio.Future[str]], number: int, tally: Tally) -> None:
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    while start < tally.window.end:
        ran[number] = loop.create_future()
        await answer.defer_async(number=number, intent=INTENT)
        if await ran[number] != INTENT:
            raise RuntimeError("procrastinate gave another job")
        stop = time.perf_counter()
        tally.note(start, stop)
        start = stop
