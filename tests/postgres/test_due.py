"""What is due while somebody holds some of it: a stray session, or a daemon that was frozen in a transaction. What is
free is ended on time; what is held waits for who holds it, and for nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from covenant import AgentId, Mailbox, OpenMailbox
from covenant.model import command as c
from covenant.store.clock import ManualClock
from covenant.store.postgres import due, queue
from covenant.store.postgres.batch import TRIES_MAX
from covenant.store.postgres.engine import Postgres
from covenant.store.postgres.lane import Lane, Tried
from tests.conformance.support import answer_next, drain, drain_many, keyed, nothing_for, plain, soon, uid
from tests.postgres import store_url
from tests.postgres.support import sql, until

pytestmark = pytest.mark.usefixtures("short_waits")

ALICE, BOB = AgentId.named("alice@lab"), AgentId.named("bob@lab")
_SLOT: Final = "select key from record where key like 'slot:%' order by ord"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def url() -> str:
    return f"{store_url()}&lanes=1"


@pytest.fixture
async def box(url: str, clock: ManualClock) -> AsyncIterator[OpenMailbox]:
    async with Mailbox.open(url, clock=clock) as box:
        yield box


@asynccontextmanager
async def holding(url: str, *keys: str) -> AsyncIterator[None]:
    async with sql(url) as owner, owner.transaction():
        found = await owner.fetch("select key from record where key = any($1) for update", keys)
        assert len(found) == len(keys)
        yield


async def test_a_due_record_that_somebody_holds_keeps_no_other_from_its_end(
    box: OpenMailbox, url: str, clock: ManualClock
) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    for number in (1, 2, 3):
        await alice.send_task(plain(bob, id=uid(number), deadline_ms=clock.now_ms() + 1000 + number))
    async with holding(url, uid(1)):
        clock.advance(2000)
        ended = await drain_many(alice, 2)
        assert [answer.task_id for answer in ended] == [uid(2), uid(3)]
        assert all((answer.error_message or "").startswith("deadline_exceeded") for answer in ended)
        assert (await alice.get_task(uid(1))).outcome is None
    assert (await drain(alice)).task_id == uid(1)
    assert (await alice.get_task(uid(1))).outcome == "deadline_exceeded"


async def test_what_a_due_task_goes_with_may_be_held_and_keeps_only_that_task(
    box: OpenMailbox, url: str, clock: ManualClock
) -> None:
    """Its slot, which passes to a follower or is closed with it."""
    alice, bob = box.of(ALICE), box.of(BOB)
    for number in (1, 3):
        await alice.send_task(keyed(bob, f"key{number}", id=uid(number), deadline_ms=clock.now_ms() + 1000 + number))
        await alice.send_task(plain(bob, id=uid(number + 1), deadline_ms=clock.now_ms() + 1001 + number))
    async with sql(url) as owner:
        slots = [row["key"] for row in await owner.fetch(_SLOT)]
    async with holding(url, *slots):
        clock.advance(2000)
        assert [answer.task_id for answer in await drain_many(alice, 2)] == [uid(2), uid(4)]
    assert sorted(answer.task_id for answer in await drain_many(alice, 2)) == [uid(1), uid(3)]


async def test_a_follower_that_somebody_holds_keeps_only_its_leader(
    box: OpenMailbox, url: str, clock: ManualClock
) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await alice.send_task(keyed(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    await alice.send_task(keyed(bob, id=uid(2)))
    await alice.send_task(plain(bob, id=uid(3), deadline_ms=clock.now_ms() + 1001))
    async with holding(url, uid(2)):
        clock.advance(2000)
        assert (await drain(alice)).task_id == uid(3)
    assert (await drain(alice)).task_id == uid(1)
    assert (await answer_next(bob)).task.id == uid(2)


async def test_what_comes_due_while_something_is_held_is_ended_before_the_next_command(
    box: OpenMailbox, url: str, clock: ManualClock
) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    await alice.send_task(plain(bob, id=uid(2), deadline_ms=clock.now_ms() + 2001))
    await alice.send_task(plain(bob, id=uid(3), not_before_ms=clock.now_ms() + 2001))
    async with holding(url, uid(1)):
        clock.advance(1500)
        await soon(alice.send_task(plain(bob, id=uid(4))))  # what is held was found out
        clock._now_ms += 1000  # and nobody is woken
        taken = await soon(bob.recv_tasks(10, wait_ms=0))
        assert [delivery.task.id for delivery in taken] == [uid(4), uid(3)]
        assert (await soon(drain(alice))).task_id == uid(2)
    assert (await drain(alice)).task_id == uid(1)
    assert await nothing_for(bob)


async def test_where_more_is_held_than_is_told_apart_all_that_is_due_waits_and_no_command_does(
    box: OpenMailbox, url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due, "HELD_MAX", 1)
    alice, bob = box.of(ALICE), box.of(BOB)
    for number in (1, 2, 3):
        await alice.send_task(plain(bob, id=uid(number), deadline_ms=clock.now_ms() + 1000 + number))
    async with holding(url, uid(1), uid(2)):
        clock.advance(2000)
        async with asyncio.timeout(5):
            for _ in range(5):
                await alice.send_task(plain(bob))
    assert [answer.task_id for answer in await drain_many(alice, 3)] == [uid(1), uid(2), uid(3)]


async def test_what_is_held_is_tried_again_from_time_to_time_and_not_all_the_time(
    box: OpenMailbox, url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (due, queue):
        monkeypatch.setattr(module, "ASIDE_S", 0.25)  # six times while it is looked at
    looked_at_s, tries_max = 1.5, 20
    tries: list[float] = []
    transact, loop = Lane.transact, asyncio.get_running_loop()

    async def noted(lane: Lane, batch: list[Any], tried: Tried) -> int:
        if type(batch[0].command) is c.Expire:
            tries.append(loop.time())
        return await transact(lane, batch, tried)

    monkeypatch.setattr(Lane, "transact", noted)
    alice, bob = box.of(ALICE), box.of(BOB)
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    async with holding(url, uid(1)):
        clock.advance(2000)
        begun_s = loop.time()
        await until(lambda: loop.time() - begun_s > looked_at_s and len(tries) > 4)
        assert len([at for at in tries if at <= begun_s + looked_at_s]) < tries_max
        for number in range(50):
            await soon(alice.send_task(plain(bob, id=uid(number + 2))))
    assert (await drain(alice)).task_id == uid(1)


@pytest.mark.parametrize("what", ["slots", "followers"])
async def test_what_goes_with_many_due_tasks_may_be_held_and_keeps_no_other_from_its_end(
    box: OpenMailbox, url: str, clock: ManualClock, what: str
) -> None:
    """More of them than a batch is tried."""
    alice, bob = box.of(ALICE), box.of(BOB)
    count = TRIES_MAX + 20
    for number in range(count):
        key, due_ms = f"key{number}", clock.now_ms() + 1000 + number
        await alice.send_task(keyed(bob, key, id=uid(number), deadline_ms=due_ms))
        await alice.send_task(keyed(bob, key, id=uid(count + number)))
    await alice.send_task(plain(bob, id=uid(2 * count), deadline_ms=clock.now_ms() + 1900))
    async with sql(url) as owner:
        slots = [row["key"] for row in await owner.fetch(_SLOT)]
    async with holding(url, *(slots if what == "slots" else map(uid, range(count, 2 * count)))):
        clock.advance(2000)
        assert (await drain(alice)).task_id == uid(2 * count)
    ended = await drain_many(alice, count)
    assert sorted(answer.task_id for answer in ended) == [uid(number) for number in range(count)]


async def test_a_store_that_is_opened_again_tries_what_somebody_held(url: str, clock: ManualClock) -> None:
    box = Mailbox.open(url, clock=clock)
    engine = box._engine
    assert isinstance(engine, Postgres)
    async with box:
        alice, bob = box.of(ALICE), box.of(BOB)
        await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
        async with holding(url, uid(1)):
            clock.advance(2000)
            await until(lambda: bool(engine.due.left))
            await box.close()
    async with box:
        assert (await drain(box.of(ALICE))).task_id == uid(1)


async def test_what_one_step_of_the_clock_asks_for_is_not_asked_for_by_all_of_them(
    box: OpenMailbox, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    decide = Lane.decide

    def counted(lane: Lane, entry: Any, *more: Any, **named: Any) -> Any:
        nonlocal asked
        asked += type(entry.command) is c.Expire
        return decide(lane, entry, *more, **named)

    alice, bob = box.of(ALICE), box.of(BOB)
    for number in range(50):
        await alice.send_task(keyed(bob, f"key{number}", deadline_ms=clock.now_ms() + 1000))
    monkeypatch.setattr(Lane, "decide", counted)
    clock.advance(2000)
    await drain_many(alice, 50)
    assert asked < 200
