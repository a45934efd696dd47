"""Going ahead where something fails, a line, a look, a store or we ourselves: everybody is told what is so."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from covenant import Limits, Mailbox, OpenMailbox
from covenant.model.command import LeaseTasks, SendTask
from covenant.model.error import StoreUnavailable, UnknownTask
from covenant.model.push import PushConfig
from covenant.store.clock import ManualClock
from covenant.store.postgres.lane import Lane
from covenant.store.postgres.pace import Pace
from covenant.store.postgres.waking import Waking
from tests.conformance.support import nothing_for, plain, soon, take, turn, uid
from tests.postgres.ahead.support import ALICE, BOB, die, go_ahead
from tests.postgres.support import WAITING, engine_of, sql, until


class Deaf:
    """A statement that is carried out, and whose answer is lost."""

    def __init__(self, statement: Any) -> None:
        self._statement = statement

    async def fetch(self, *values: Any) -> None:
        await self._statement.fetch(*values)
        raise ConnectionResetError("the line was cut")


class Cut:
    """A statement that never arrives."""

    async def fetch(self, *values: Any) -> None:
        raise ConnectionResetError("the line was cut")


async def test_a_webhook_hears_of_an_append_whose_answer_was_lost(
    box: OpenMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(box)
    moved: list[str] = []
    monkeypatch.setattr(engine.hooks, "_leads", lambda: True)
    engine.watch_pushes(moved.append)
    push = PushConfig(id="hook", url="https://example.org/hook")
    sent = (await engine.run(SendTask(ALICE, plain(box.of(BOB)), push=push))).task_id
    await go_ahead(box, box.of("carol@lab"), box.of("dave@lab"))
    going = engine.ahead.stretch
    assert going is not None
    assert sent in going.work.records
    moved.clear()
    going._lane._append_statement = Deaf(going._lane._append_statement)
    assert (await take(box.of(BOB))).task.id == sent
    assert moved == [sent]


async def gone_back(url: str, lane: int, seq: int, mark: str) -> None:
    """As where a replica has taken over that lacks the last commits."""
    async with sql(url) as server:
        await server.execute("delete from log where lane = $1 and seq > $2", lane, seq)
        await server.execute("update lane set seq = $2, hash = $3 where id = $1", lane, seq, mark)


async def test_the_tables_show_nothing_that_the_log_lacks_where_a_store_has_gone_back(
    box: OpenMailbox, url: str
) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    engine = await go_ahead(box, alice, bob)
    lane = engine.ahead.stretch._lane  # type: ignore[union-attr]  # it has gone ahead
    before = lane.id, lane.seq, lane.hash.decode()
    lost = (await alice.send_task(plain(bob))).task_id
    await gone_back(url, *before)
    with pytest.raises(UnknownTask):
        await box.get_task(lost)
    assert await nothing_for(bob)


async def test_a_store_that_has_gone_back_is_not_spoken_for_by_memory(box: OpenMailbox, url: str) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    engine = await go_ahead(box, alice, bob)
    lane = engine.ahead.stretch._lane  # type: ignore[union-attr]  # it has gone ahead
    before = lane.id, lane.seq, lane.hash.decode()
    await alice.send_task(plain(bob, id=uid(1)))
    await gone_back(url, *before)
    assert not (await alice.send_task(plain(bob, id=uid(1)))).duplicate
    assert (await take(bob)).task.id == uid(1)


async def test_one_that_was_taken_for_dead_prunes_nothing_that_the_tables_lack(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(Mailbox.open(url))
        engine = engine_of(box)
        limits = Limits(retention_ms=1, dedup_ms=1)
        async with Mailbox.open(url, limits=limits) as other, sql(url) as owner:
            frozen = engine_of(other)
            monkeypatch.setattr(frozen._pulse, "_beat", lambda ears: asyncio.sleep(0))  # it gives no sign of life
            monkeypatch.setattr(frozen._pulse, "open", lambda: asyncio.sleep(0))
            await owner.execute("update daemon set seen = seen - interval '1 minute' where id = $1", frozen.member.id)
            engine._pulse._stirred.set()
            await until(lambda: engine.is_alone)
            alice, bob = box.of(ALICE), box.of(BOB)
            await go_ahead(box, alice, bob)
            sent = (await alice.send_task(plain(bob))).task_id
            assert engine.ahead.is_on
            await frozen.housekeeper.tidy()
            await die(box)
            stack.pop_all()
            assert (await other.get_task(sent)).task.id == sent


@pytest.mark.parametrize(("of", "name"), [(Waking, "wake"), (Pace, "appended")])
async def test_who_was_decided_ahead_is_answered_whatever_fails_behind_the_append(
    box: OpenMailbox, monkeypatch: pytest.MonkeyPatch, of: type, name: str
) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await go_ahead(box, alice, bob)
    faultless, faults = getattr(of, name), [1]

    def faulty(*values: Any) -> None:
        if faults:
            faults.pop()
            raise RuntimeError("a fault of ours")
        faultless(*values)

    monkeypatch.setattr(of, name, faulty)
    sent = (await soon(alice.send_task(plain(bob)))).task_id
    assert (await take(bob)).task.id == sent
    assert await nothing_for(bob)


async def test_nothing_stays_in_doubt_where_a_fault_of_ours_keeps_from_looking(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Mailbox.open(f"{url}&lanes=1") as box:
        alice, bob = box.of(ALICE), box.of(BOB)
        engine = await go_ahead(box, alice, bob)
        going = engine.ahead.stretch
        assert going is not None
        lane = going._lane
        lane._append_statement = Deaf(lane._append_statement)

        async def faulty(self: Lane, batch: Any) -> int:
            raise RuntimeError("a fault of ours")

        with monkeypatch.context() as patch:
            patch.setattr(Lane, "recover", faulty)
            sending = [engine.submit(SendTask(ALICE, plain(bob)))]
            await turn()
            sending.append(engine.submit(SendTask(ALICE, plain(bob))))
            with pytest.raises(StoreUnavailable):
                await soon(sending[0].future)
            await until(lambda: engine.ahead._ending is None)
        assert not lane.is_in_doubt
        assert (await soon(sending[1].future)).task_id


async def test_what_is_due_is_not_taken_for_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    async with Mailbox.open(url, clock=clock) as box:
        alice, bob = box.of(ALICE), box.of(BOB)
        engine = engine_of(box)

        async def away(*values: Any) -> Any:
            raise StoreUnavailable("for a moment", outcome="not_stored")

        for at, to in ((1000, box.of("eve@lab")), (2000, bob)):
            await alice.send_task(plain(to, deadline_ms=clock.now_ms() + at))
        following = (await alice.send_task(plain(bob))).task_id
        with monkeypatch.context() as patch:
            patch.setattr(engine._reader, "fetch", away)  # nobody learns what is due next
            clock.advance(1000)
            await engine.due.passed()
        await go_ahead(box, box.of("carol@lab"), box.of("dave@lab"))
        clock.advance(1000)
        assert engine.ahead.is_on
        taken = await engine.take(LeaseTasks(BOB, BOB, "one"), 0)
        assert [one.task.id for one in taken] == [following]


async def test_a_stretch_that_was_broken_off_puts_nothing_into_the_tables_any_more(box: OpenMailbox, url: str) -> None:
    """What it was at is read from the log, and the next stretch has the connection."""
    alice, bob = box.of(ALICE), box.of(BOB)
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None
    async with sql(url) as server, sql(url) as looking:
        holding = server.transaction()
        await holding.start()
        await server.execute("select from ahead for update")
        settling = going._settling = asyncio.create_task(going._settle())
        settling.add_done_callback(going._has_settled)
        async with asyncio.timeout(10):
            while not await looking.fetchval(WAITING, engine.member.session):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        going._lane._append_statement = Cut()
        sending = asyncio.create_task(alice.send_task(plain(bob)))
        await until(lambda: engine.ahead.is_owed and engine.ahead._ending is None)
        assert settling.done()
        await holding.rollback()
    sent = await soon(sending)
    assert (await take(bob)).task.id == sent.task_id


@pytest.mark.parametrize("statement", [Deaf, lambda _: Cut()])
async def test_an_append_in_doubt_is_looked_for_until_a_database_that_is_away_comes_back(
    box: OpenMailbox, monkeypatch: pytest.MonkeyPatch, statement: Any
) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    engine = await go_ahead(box, alice, bob)
    lane = engine.ahead.stretch._lane  # type: ignore[union-attr]  # it has gone ahead
    lane._append_statement = statement(lane._append_statement)
    connected, away = Lane._connected, iter(range(3))

    async def is_away(self: Lane) -> Any:
        if self is lane and next(away, None) is not None:
            raise ConnectionRefusedError("the database is away")
        return await connected(self)

    monkeypatch.setattr(Lane, "_connected", is_away)
    sent = await soon(alice.send_task(plain(bob)))
    assert (await take(bob)).task.id == sent.task_id
    assert await nothing_for(bob)
