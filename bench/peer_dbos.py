"""A peer: DBOS with its system database in SQLite, by its queue and as workflows called directly.

The database file is put into WAL mode beforehand (DBOS leaves the slower rollback journal); synchronous stays at
SQLite's default, FULL. SQLite lets one writer in at a time: with the default pool of 20 connections DBOS loses a third
of its throughput to busy waits, so it gets three. Clients are threads, as its synchronous API wants it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dbos import DBOS, DBOSConfig

from bench.clients import run_threads
from bench.work import INTENT, REPLY, Figures, Tally

_CONNECTIONS: Final = 3
_QUEUE_POLL_S: Final = 0.005
_RESULT_POLL_S: Final = 0.02
_QUEUE_START_S: Final = 1.5  # DBOS looks for new queues once a second


def cycles(folder: Path, clients: int, form: str, warm_s: float, seconds: float) -> Figures:
    _launch(folder / "dbos.db", clients)
    cycle = _by_queue() if form == "queue" else _directly
    return run_threads(lambda tally: _client(cycle, tally), clients, warm_s, seconds)


@DBOS.workflow()
def answer(_intent: str) -> str:
    return REPLY


def _launch(path: Path, clients: int) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.close()
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": f"sqlite:///{path}",
        "sys_db_pool_size": _CONNECTIONS,
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
