"""A peer: the queue that one would write by hand on SQLite, at its best.

WAL, synchronous=FULL, one table with partial indexes, and one statement that is its own commit for each of the four
steps. SQLite lets one writer in at a time, so all clients share one connection and call it straight from the event
loop: there is no lock to wait for and no thread to switch to.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any, Final

from bench.work import INTENT, REPLY, Figures, Tally, Window

_SCHEMA: Final = """
CREATE TABLE task (
    id INTEGER PRIMARY KEY, sender TEXT NOT NULL, recipient TEXT NOT NULL, state INTEGER NOT NULL DEFAULT 0,
    intent TEXT NOT NULL, lease INTEGER, result TEXT
);
CREATE INDEX ready ON task (recipient, id) WHERE state = 0;
CREATE INDEX answer ON task (sender, id) WHERE state = 2;
"""
_SEND: Final = "INSERT INTO task (sender, recipient, intent) VALUES (?, ?, ?)"
_CLAIM: Final = """
UPDATE task SET state = 1, lease = ?
WHERE id = (SELECT id FROM task WHERE state = 0 AND recipient = ? ORDER BY id LIMIT 1) RETURNING id, intent
"""
_COMPLETE: Final = "UPDATE task SET state = 2, result = ? WHERE id = ? AND state = 1 AND lease = ?"
_DRAIN: Final = """
UPDATE task SET state = 3
WHERE id = (SELECT id FROM task WHERE state = 2 AND sender = ? ORDER BY id LIMIT 1) RETURNING id, result
"""


async def cycles(folder: Path, clients: int, warm_s: float, seconds: float) -> Figures:
    database = _open(folder / "queue.db")
    tally = Tally(Window(warm_s, seconds))
    await asyncio.gather(*(_client(database, number, tally) for number in range(clients)))
    database.close()
    return tally.figures()


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.executescript(_SCHEMA)
    return database


async def _client(database: sqlite3.Connection, number: int, tally: Tally) -> None:
    sender, recipient = f"p{number}", f"w{number}"
    start = time.perf_counter()
    while start < tally.window.end:
        database.execute(_SEND, (sender, recipient, INTENT))
        await asyncio.sleep(0)
        task_id, _ = _one(database, _CLAIM, number, recipient)
        await asyncio.sleep(0)
        database.execute(_COMPLETE, (REPLY, task_id, number))
        await asyncio.sleep(0)
        drained, _ = _one(database, _DRAIN, sender)
        await asyncio.sleep(0)
        if drained != task_id:
            raise RuntimeError("the queue gave the answer of another task")
        stop = time.perf_counter()
        tally.note(start, stop)
        start = stop


def _one(database: sqlite3.Connection, statement: str, *values: Any) -> tuple[int, str]:
    """The row that a step returns; it is committed when all rows are fetched."""
    ((number, text),) = database.execute(statement, values).fetchall()
    return number, text
