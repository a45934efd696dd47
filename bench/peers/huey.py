"""A peer: Huey on SQLite with fsync, enqueue, execute, store the result, read it back: four commits.

Clients and consumer are threads of one process. A client that polls for its result loses a third of Huey's throughput,
so it waits for Huey's own signal that the task is complete.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any, Final

from huey import SqliteHuey
from huey.signals import SIGNAL_COMPLETE

from bench.clients import run_threads
from bench.work import INTENT, REPLY, Figures, Tally

_WORKERS: Final = 8
_POLL_S: Final = 0.01
_PATIENCE_S: Final = 30


def cycles(folder: Path, clients: int, warm_s: float, seconds: float) -> Figures:
    logging.getLogger("huey").setLevel(logging.ERROR)
    huey = SqliteHuey("bench", filename=str(folder / "huey.db"), fsync=True)
    job = huey.task()(_answer)
    done = _Done()
    huey.signal(SIGNAL_COMPLETE)(done.tell)
    consumer = huey.create_consumer(
        workers=_WORKERS, periodic=False, initial_delay=_POLL_S, max_delay=_POLL_S, backoff=1.0
    )
    consumer.start()
    figures = run_threads(lambda tally: _client(job, done, tally), clients, warm_s, seconds)
    consumer.stop(graceful=True)
    return figures


def _answer(_intent: str) -> str:
    return REPLY


def _client(job: Any, done: _Done, tally: Tally) -> None:
    start = time.perf_counter()
    while start < tally.window.end:
        result = job(INTENT)
        done.wait(result.id)
        if result.get(blocking=True, timeout=_PATIENCE_S) != REPLY:
            raise RuntimeError("huey gave another result")
        stop = time.perf_counter()
        tally.note(start, stop)
        start = stop


class _Done:
    """Which tasks are complete; a client waits for its own."""

    def __init__(self) -> None:
        self._events: dict[str, threading.Event] = {}

    def tell(self, _signal: str, task: Any, *_: Any) -> None:
        self._events.setdefault(task.id, threading.Event()).set()

    def wait(self, task_id: str) -> None:
        if not self._events.setdefault(task_id, threading.Event()).wait(_PATIENCE_S):
            raise TimeoutError("huey did not complete a task")
        del self._events[task_id]
