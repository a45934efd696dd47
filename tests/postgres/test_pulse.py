"""Signs of life, and the bell between daemons."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from covenant import AgentId, Mailbox
from covenant.model.daemon import DaemonState
from covenant.store.postgres import bell as bells
from covenant.store.postgres import pulse as pulses
from covenant.store.postgres import rounds
from covenant.store.postgres.engine import Postgres
from tests.conformance.support import plain, soon
from tests.postgres import store_url
from tests.postgres.support import engine_of, sql, until

ALICE, BOB = AgentId.named("alice@lab"), AgentId.named("bob@lab")
BURY = "update daemon set ended = clock_timestamp(), proof = 'silent' where id = $1"
CLOSE_LANES = "update lane set closed = true where daemon = $1"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats that come often, and no look that could hide what a ring does."""
    monkeypatch.setattr(pulses, "BEAT_S", 0.05)
    monkeypatch.setattr(pulses, "SILENCE_BEATS", 100)
    monkeypatch.setattr(rounds, "POLL_S", 600.0)


async def state_of(looking: Postgres, daemon_id: str) -> DaemonState:
    return {one.id: one.state for one in await looking.daemons()}[daemon_id]


async def test_a_slow_question_does_not_make_a_daemon_look_dead(fast: None) -> None:
    url = store_url()
    async with Mailbox.open(url) as box, sql(url) as owner:
        engine = engine_of(box)
        await owner.execute("select pg_advisory_lock(7)")
        asked = asyncio.create_task(engine._reader.fetch("select pg_advisory_lock(7)"))
        seen = "select seen from daemon where id = $1"
        before = await owner.fetchval(seen, engine.member.id)
        async with asyncio.timeout(10):
            while await owner.fetchval(seen, engine.member.id) <= before or not await owner.fetchval(
                "select exists (select from pg_locks where locktype = 'advisory' and objid = 7 and not granted)"
            ):
                pass
        later = await owner.fetchval(seen, engine.member.id)
        async with asyncio.timeout(10):
            while await owner.fetchval(seen, engine.member.id) <= later:
                pass
        assert not asked.done() and engine.is_up
        await owner.execute("select pg_advisory_unlock(7)")
        await asked


async def test_an_idle_daemon_that_was_taken_for_dead_registers_anew_by_itself(fast: None) -> None:
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as here, Mailbox.open(url) as there, sql(url) as owner:
        idle, other = engine_of(there), engine_of(here)
        name = idle.member.id
        waiting = asyncio.create_task(there.of(BOB).recv_task())
        await there.of(BOB).recent_tasks(1)  # asked behind it, and answered
        await owner.execute(BURY, name)
        await owner.execute(CLOSE_LANES, name)
        await until(lambda: idle.member.id != name)
        async with asyncio.timeout(10):
            while idle.member.id not in {one.id for one in await other.daemons()}:
                pass
        assert await state_of(other, idle.member.id) is DaemonState.ALIVE
        assert await state_of(other, name) is DaemonState.SILENT
        await until(lambda: other.companions() == 2)
        sent = await here.of(ALICE).send_task(plain(there.of(BOB)))
        async with asyncio.timeout(10):
            assert (await waiting).task.id == sent.task_id
        named = "select count(*) from pg_stat_activity where application_name = $1"
        assert await owner.fetchval(named, idle.member.session) >= 2  # the lane, and the pulse


async def test_a_daemon_that_the_store_has_forgotten_is_in_it_again(fast: None) -> None:
    """As after a failover to a replica that had not heard of it."""
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as box, sql(url) as owner:
        engine = engine_of(box)
        await owner.execute("delete from lane")
        await owner.execute("delete from daemon")
        async with asyncio.timeout(10):
            while not await owner.fetchval("select exists (select from daemon where ended is null)"):
                pass
        await box.of(ALICE).send_task(plain(box.of(BOB)))
        assert await state_of(engine, engine.member.id) is DaemonState.ALIVE


async def test_the_others_know_of_a_daemon_once_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not know of any rings for nobody."""
    monkeypatch.setattr(pulses, "BEAT_S", 600.0)
    monkeypatch.setattr(bells.Bell, "work", lambda bell: asyncio.sleep(600))
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as here:
        heard = asyncio.Event()
        monkeypatch.setattr(engine_of(here), "rung", lambda *rung: heard.set())
        async with Mailbox.open(url):
            await soon(heard.wait())
            assert engine_of(here).companions() == 2


async def test_what_the_bell_could_not_tell_it_tells_when_it_can(fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{store_url()}&lanes=1"
    monkeypatch.setattr(bells, "_AGAIN_S", 0.01)
    async with Mailbox.open(url) as here, Mailbox.open(url) as there:
        waiting = asyncio.create_task(there.of(BOB).recv_task())
        await there.of(BOB).recent_tasks(1)
        bell = engine_of(here)._bell
        say, failed = bell._say, 0

        async def fails(payload: str) -> None:
            nonlocal failed
            failed += 1
            if failed <= 2:
                raise asyncpg.ConnectionDoesNotExistError("cut")
            await say(payload)

        monkeypatch.setattr(bell, "_say", fails)
        sent = await here.of(ALICE).send_task(plain(there.of(BOB)))
        async with asyncio.timeout(10):
            assert (await waiting).task.id == sent.task_id
        assert failed == 3


async def test_more_than_a_bell_keeps_is_told_as_one_ring_for_everybody(
    fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{store_url()}&lanes=1"
    monkeypatch.setattr(bells, "_KEPT_MAX", 3)
    async with Mailbox.open(url) as here, Mailbox.open(url) as there:
        woken: list[Any] = []
        monkeypatch.setattr(engine_of(there).waking, "wake_all", lambda: woken.append(None))
        engine_of(here)._bell.ring([f"{number}" for number in range(4)], (), (), False)
        await until(lambda: bool(woken))
