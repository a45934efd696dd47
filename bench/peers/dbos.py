"""A peer: DBOS with its system database in SQLite or in PostgreSQL, by its queue and as workflows called directly.

The SQLite file is put into WAL mode beforehand (DBOS leaves the slower rollback journal); synchronous stays at
SQLite's default, FULL. SQLite lets one writer in at a time: with the default pool of 20 connections DBOS loses a third
of its throughput to busy waits, so it gets three. In PostgreSQL it has its default pool. Clients are threads, as its
synchronous API wants it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dbos import DBOS, DBOSConfig

from bench.clients import end_after, run_threads
from bench.work import INTENT, REPLY, Figures, Tally

_SQLITE_CONNECTIONS: Final = 3
_CONNECTIONS: Final = 20
_QUEUE_POLL_S: Final = 0.005
_RESULT_POLL_S: Final = 0.02
_QUEUE_START_S: Final = 1.5  # DBOS looks for new queues once a second


def cycles(folder: Path, clients: int, form: str, warm_s: float, seconds: float, url: str | None = None) -> Figures:
    end_after(warm_s + seconds)
    _launch(url or _sqlite(folder / "dbos.db"), clients)
    cycle = _by_queue() if form == "queue" else _directly
    return run_threads(lambda tally: _client(cycle, tally), clients, warm_s, seconds)


@DBOS.workflow()
def answer(_intent: str) -> str:
    return REPLY


def _sqlite(path: Path) -> str:
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.close()
    return f"sqlite:///{path}"


def _launch(url: str, clients: int) -> None:
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": url,
        "sys_db_pool_size": _SQLITE_CONNECTIONS if url.startswith("sqlite:") else _CONNECTIONS,
        "max_executor_threads": clients,
        "log_level": "ERROR",
    }
    DBOS(config=config)
    DBOS.launch()


def _by_queue() -> Callable[[], str]:
    queue = DBOS.register_queue("bench", polling_interval_sec=_QUEUE_POLL_S)
    time.sleep(_QUEUE_START_S)
    return lambda: queue.enqueue(answer, INTENT).get_result(polling_interval_sec=_RESULT_POLL_S)


def _directly() -> str:
    return answer(INTENT)


def _client(cycle: Callable[[], str], tally: Tally) -> None:
    start = time.perf_counter()
    while start < tally.window.end:
        if cycle() != REPLY:
            raise RuntimeError("dbos gave another result")
        stop = time.perf_counter()
        tally.note(start, stop)
        start = stop
