"""The schema, made by whoever comes first of several."""

from __future__ import annotations

import asyncio
from typing import Final

from covenant.store.postgres.connection import Where, connect
from covenant.store.postgres.schema import migrate
from tests.postgres import store_url

_AT_ONCE: Final = 8


async def test_daemons_that_start_at_once_make_the_schema_once() -> None:
    """All have seen that there is none; then they come one after the other."""
    where = Where.of(store_url())
    connections = await asyncio.gather(*(connect(where) for _ in range(_AT_ONCE)))
    try:
        states = await asyncio.gather(*(migrate(connection, where.schema) for connection in connections))
        assert all(state.is_current for state in states)
    finally:
        await asyncio.gather(*(connection.close() for connection in connections))
