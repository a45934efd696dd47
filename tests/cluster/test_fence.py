"""A daemon that the others took for dead: it can write nothing under its old name, and goes on under one new one."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from covenant import Mailbox
from covenant.store.postgres.connection import connect
from tests.conformance.support import drain, plain, soon, take, uid
from tests.postgres import store_url

_BURIED = """
    update daemon set ended = clock_timestamp(), proof = 'silent';
    update lane set closed = true;
"""
_COMMANDS = 200


async def test_one_that_was_taken_for_dead_goes_on_under_one_new_name(caplog: pytest.LogCaptureFixture) -> None:
    """Each of its lanes finds out for itself, and all of them take the same name."""
    async with Mailbox.open(store_url() + "&lanes=4") as box:
        engine: Any = box._engine
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        other = await connect(engine.where)
        try:
            for burial in (1, 2):
                await other.execute(_BURIED)
                sends = (alice.send_task(plain(bob, id=uid(1000 * burial + n))) for n in range(_COMMANDS))
                sent = await soon(asyncio.gather(*sends))
                assert not any(one.duplicate for one in sent)
                assert await other.fetchval("select count(*) from daemon") == 1 + burial
                assert await other.fetchval("select count(*) from daemon where ended is null") == 1
                open_lanes = await other.fetch("select daemon from lane where not closed")
                assert {row["daemon"] for row in open_lanes} <= {engine.member.id}
        finally:
            await other.close()
        delivery = await take(bob)
        await bob.reject(delivery, "no")
        assert (await drain(alice)).task_id == delivery.task.id
    told = [row.getMessage() for row in caplog.records if row.levelno >= logging.WARNING]
    assert told == ["others took this daemon for dead; it goes on under a new name"] * 2
