"""What the tests of a shared store need beside it: a plain connection, and roles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from covenant import OpenMailbox
from covenant.store.postgres.connection import Where
from covenant.store.postgres.engine import Postgres

WAITING: Final = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and application_name = $1"
_numbers: Final = count(1)


@asynccontextmanager
async def sql(url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """As somebody who knows nothing of Covenant, in the schema of this store."""
    where = Where.of(url)
    connection = await asyncpg.connect(where.dsn, server_settings={"search_path": where.schema})
    try:
        yield connection
    finally:
        await connection.close()


def as_role(url: str, role: str) -> str:
    """The same store, for another user of the database."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{role}@{parts.netloc.rpartition('@')[2]}"))


def role_name(url: str) -> str:
    return f"{Where.of(url).schema}_role{next(_numbers)}"


def engine_of(box: OpenMailbox) -> Postgres:
    assert isinstance(box._engine, Postgres)
    return box._engine


async def until(is_true: Callable[[], bool]) -> None:
    """What another process or a real server does cannot be waited for by an event of ours."""
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
