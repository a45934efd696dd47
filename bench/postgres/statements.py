"""The statements of Covenant's cycles on PostgreSQL, sent again as they were, with no engine between them.

What is left is the driver and the server: no change of the engine alone can make a cycle cheaper than this.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final, TypeAlias

import asyncpg
import psutil

from bench.covenant_cycle import run_clients
from bench.work import Figures
from covenant import Mailbox
from covenant.store.postgres.connection import connect
from covenant.store.postgres.lane import LOAD
from covenant.store.postgres.saving import APPEND, APPEND_ON_BLOCK, ON_BLOCK, PUT, SAVE, SETTLE

_SQL: Final = {"load": LOAD, "save": SAVE, "append": APPEND, "put": PUT, "settle": SETTLE}
Asked: TypeAlias = list[tuple[str, tuple[Any, ...]]]


class _Kept:
    """A prepared statement that remembers what it was asked."""

    def __init__(self, name: str, statement: Any, asked: Asked) -> None:
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
    asked: Asked = []
    async with Mailbox.open(_one_lane(url)) as box:
        engine: Any = box._engine
        (lane,) = engine._lanes
        lane._load_statement = _Kept("load", lane._load_statement, asked)
        lane._save_statement = _Kept("save", lane._save_statement, asked)
        lane._append_statement = _Kept("append", lane._append_statement, asked)
        await engine.ahead.connected()
        engine.ahead._put_statement = _Kept("put", engine.ahead._put_statement, asked)
        engine.ahead._settle_statement = _Kept("settle", engine.ahead._settle_statement, asked)
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


async def _sent_again(connection: asyncpg.Connection[Any], asked: Asked) -> Figures:
    prepared = {name: await connection.prepare(sql) for name, sql in _SQL.items()}
    driver, server, start = time.process_time(), _server_s(), time.perf_counter()
    drawn = 0
    is_ahead = False
    for at, (name, values) in enumerate(asked):
        block = _block_of(name, values)
        if block is None and not connection.is_in_transaction():
            await connection.execute("begin")
        elif block not in (None, drawn):  # what was drawn then has not been drawn here
            await connection.execute(f"select setval('block', {block})")
            drawn = block or 0
        if name == "append" and not is_ahead:
            await connection.execute(f"insert into ahead (lane, settled) values ({values[1]}, {_settled(asked[at:])})")
            is_ahead = True
        await prepared[name].fetch(*values)
        if connection.is_in_transaction() and name in ("save", "settle"):
            await connection.execute("commit")
            drawn = 0 if name == "save" else drawn
        is_ahead = is_ahead and not (name == "settle" and values[4])
    stop, driver, server = time.perf_counter(), time.process_time() - driver, _server_s() - server
    if connection.is_in_transaction():
        await connection.execute("rollback")  # the last look found nothing to save
    cycles = await connection.fetchval("select count(*) from task where not open")
    return {
        "rate": cycles / (stop - start),
        "driver_us": driver / cycles * 1e6,
        "server_us": server / cycles * 1e6,
    }


def _block_of(name: str, values: tuple[Any, ...]) -> int | None:
    """The block of numbers that a statement counts on; None where it is one of several of a transaction."""
    if name == "append":
        return int(values[APPEND_ON_BLOCK])
    return values[ON_BLOCK] or None if name == "save" else None


def _settled(asked: Asked) -> int:
    """How far the tables were when it went ahead of them: the next time that they were brought up to date tells."""
    return next(int(values[2]) for name, values in asked if name == "settle")


def _server_s() -> float:
    """The CPU of all PostgreSQL processes on this machine that run now: a run has one server, and nobody else's."""
    total = 0.0
    for process in psutil.process_iter(["name", "cpu_times"]):
        if process.info["name"] == "postgres" and process.info["cpu_times"] is not None:
            total += process.info["cpu_times"].user + process.info["cpu_times"].system
    return total
