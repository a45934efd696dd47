"""A store on PostgreSQL whose line breaks: what was under way is done once, and who asked for it hears that."""

from __future__ import annotations

import logging
from typing import Any

import asyncpg
import pytest

from covenant import Mailbox
from covenant.store.postgres.lane import Lane
from tests.conformance.support import answer_next, drain, plain, soon, uid
from tests.postgres import store_url


@pytest.mark.parametrize("said", ["begin", "commit"])
async def test_a_driver_that_has_heard_the_end_and_not_seen_it_is_a_lost_line(
    said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thawed daemon meets a server that has given its session up: the driver calls that a fault of its own."""
    failures = 0
    connected = Lane._connected

    async def breaking(lane: Lane) -> Any:
        connection = await connected(lane)
        return _Heard(connection)

    class _Heard:
        def __init__(self, connection: Any) -> None:
            self._connection = connection

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

        async def execute(self, statement: str) -> Any:
            nonlocal failures
            if statement == said and not failures:
                failures += 1
                raise asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress")
            return await self._connection.execute(statement)

    monkeypatch.setattr(Lane, "_connected", breaking)
    async with Mailbox.open(store_url()) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        sent = await soon(alice.send_task(plain(bob, id=uid(1))))
        assert (sent.generation, sent.duplicate) == (1, False)
        await answer_next(bob)
        assert (await drain(alice)).task_id == uid(1)
    assert failures == 1
    assert [row for row in caplog.records if row.levelno >= logging.ERROR] == []
