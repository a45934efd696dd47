"""The statements of Covenant's cycles on PostgreSQL, sent again as they were, with no engine between them.

What is left is the driver and the server: no change of the engine alone can make a cycle cheaper than this.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import asyncpg
import psutil

from bench.covenant_cycle import run_clients
from bench.work import Figures
from covenant import Mailbox
from covenant.store.postgres.connection import connect
from covenant.store.postgres.lane import LOAD
from covenant.store.postgres.saving import ON_BLOCK, SAVE

_SQL: Final = {"load": LOAD, "save": SAVE}


class _Kept:
    """A prepared statement that remembers what it was asked."""

    def __init__(self, name: str, statement: Any, asked: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._name = name
        self._statement = statement
        self._asked = asked

    async def fetch(self, *values: Any) -> Any:
        answer = await self._statement.fetch(*values)
        self._asked.append((self._name, values))  # unless it was refused
        return answer


async def repeated(folder: Path, url: str, again_url: str, clients: int, warm_s: float, seconds: float) -> Figures:
    """Cycles by one lane, then their statements once more in another database: `driver_us` and `server_us` are the CPU
    of a cycle."""
    asked: list[tuple[str, tuple[Any, ...]]] = []
    async with Mailbox.open(_one_lane(url)) as box:
        engine: Any = box._engine
        (lane,) = engine._lanes
        lane._load_statement = _Kept("load", lane._load_statement, asked)
        lane._save_statement = _Kept("save", lane._save_statement, asked)
        await run_clients(box, clients, warm_s, seconds)
    async with Mailbox.open(_one_lane(again_url)) as box:  # it makes the tables and the lane
        where: Any = box._engine
        connection = await connect(where.where)
        try:
            return await _sent_again(connection, asked)
        finally:
            await connection.close()


def _one_lane(url: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}lanes=1"


async def _sent_again(connection: asyncpg.Connection[Any], asked: list[tuple[str, tuple[Any, ...]]]) -> Figures:
    prepared = {name: await connection.prepare(sql) for name, sql in _SQL.items()}
    driver, server, start = time.process_time(), _server_s(), time.perf_counter()
    drawn = 0
    for name, values in asked:
        block = values[ON_BLOCK] if name == "save" else 0
        if block == 0 and not connection.is_in_transaction():
            await connection.execute("begin")
        elif block not in (0, drawn):  # what was drawn then has not been drawn here
            await connection.execute(f"select setval('block', {block})")
            drawn = block
        await prepared[name].fetch(*values)
        if connection.is_in_transaction() and name == "save":
            await connection.execute("commit")
            drawn = 0
    stop, driver, server = time.perf_counter(), time.process_time() - driver, _server_s() - server
    if connection.is_in_transaction():
        await connection.execute("rollback")  # the last look found nothing to save
    cycles = await connection.fetchval("select count(*) from task where not open")
    return {
        "rate": cycles / (stop - start),
        "driver_us": driver / cycles * 1e6,
        "server_us": server / cycles * 1e6,
    }


def _server_s() -> float:
    """The CPU of all PostgreSQL processes on this machine that run now: a run has one server, and nobody else's."""
    total = 0.0
    for process in psutil.process_iter(["name", "cpu_times"]):
        if process.info["name"] == "postgres" and process.info["cpu_times"] is not None:
            total += process.info["cpu_times"].user + process.info["cpu_times"].system
    return total
