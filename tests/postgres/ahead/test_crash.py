"""A server that crashes while a daemon goes ahead: what was put into the tables last may be gone, and is in the log."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from os import kill

import asyncpg
import pytest

from covenant import CovenantError, Mailbox
from covenant.model.event import Sent
from covenant.store.postgres import pulse as pulses
from covenant.store.postgres.connection import LOST
from tests.conformance.support import finish, nothing_for, plain, soon, take, uid
from tests.postgres import misplaced, started_server, store_url
from tests.postgres.ahead.support import ALICE, BOB, every_record_is_what_the_log_tells, go_ahead, in_tables, whole_log
from tests.postgres.servers import forget
from tests.postgres.support import sql, until

# What is not waited for stays in memory until it is.
_LAZY = "wal_writer_delay = 10s\nwal_writer_flush_after = 1GB\nautovacuum = off\nrestart_after_crash = on\n"


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign of life is waited for, and with it all that was written before."""
    monkeypatch.setattr(pulses, "BEAT_S", 600.0)


async def crash(url: str, pid: int) -> None:
    """As where the system ends one of its processes: it comes back by itself, with what was flushed."""
    kill(pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while True:
            await asyncio.sleep(0.05)
            try:
                async with sql(url) as server:
                    await server.fetchval("select 1")
                return
            except (*LOST, asyncpg.PostgresError):  # it is not there yet
                continue


@pytest.mark.parametrize("again", [True, False])
async def test_a_send_under_an_id_is_the_same_send_after_a_crash_of_the_server(again: bool) -> None:
    """Even if somebody was told in between that there is nothing: that alone must not mend the line."""
    running = await asyncio.to_thread(started_server, _LAZY)
    url = store_url(running.get_uri())
    async with Mailbox.open(url) as box:
        alice, bob = box.of(ALICE), box.of(BOB)
        engine = await go_ahead(box, alice, bob)
        going = engine.ahead.stretch
        assert going is not None
        async with sql(url) as server:
            await server.execute("checkpoint")
        await finish(alice, bob, plain(bob, id=uid(1)))
        await going._settle()
        assert await in_tables(url, uid(1))
        tables = engine.ahead._tables
        assert tables is not None
        await crash(url, tables.get_server_pid())
        assert not await in_tables(url, uid(1))  # or this shows nothing
        await until(lambda: going._lane._connection is None or going._lane._connection.is_closed())
        assert await nothing_for(bob)
        if again:
            assert (await soon(alice.send_task(plain(bob, id=uid(1))))).duplicate
        else:
            with pytest.raises(CovenantError) as refused:
                await soon(alice.send_task(plain(bob, "something else", id=uid(1))))
            assert refused.value.code == "task_conflict"
        assert await nothing_for(bob)
        sends = Counter(event.key for one in await whole_log(engine) for event in one.events if type(event) is Sent)
        assert sends[uid(1)] == 1
        assert await misplaced(engine) == ([], [])
        assert await every_record_is_what_the_log_tells(engine)
    forget(running)


@pytest.mark.parametrize("first", ["ask", "take", "send"])
async def test_a_crash_that_takes_back_the_end_of_a_stretch_loses_nothing(first: str) -> None:
    running = await asyncio.to_thread(started_server, _LAZY)
    url = store_url(running.get_uri())
    async with Mailbox.open(url) as box:
        alice, bob = box.of(ALICE), box.of(BOB)
        engine = await go_ahead(box, alice, bob)
        sent = (await alice.send_task(plain(bob))).task_id
        engine.ahead.end()
        await until(lambda: engine.ahead._ending is None)
        assert await in_tables(url, sent)
        tables = engine.ahead._tables
        assert tables is not None and not engine.ahead.is_owed
        await crash(url, tables.get_server_pid())
        assert not await in_tables(url, sent)
        if first == "ask":
            assert (await soon(box.get_task(sent))).task.id == sent
        elif first == "send":
            await soon(alice.send_task(plain(bob, "later")))
        assert (await take(bob)).task.id == sent
        assert await misplaced(engine) == ([], [])
        assert await every_record_is_what_the_log_tells(engine)
    forget(running)
