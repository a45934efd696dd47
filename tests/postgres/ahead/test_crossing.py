"""Going ahead of the tables where things cross: a settle and an append, a mend and a settle, an end and a close."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest
from msgspec import structs

from covenant import Mailbox, OpenMailbox
from covenant.exchange.bounds import Refusals
from covenant.model.command import Call, EnrollPeer, LeaseTasks, SendTask
from covenant.model.error import CovenantError
from covenant.model.event import Sent
from covenant.model.peer import Caller, Role
from covenant.model.push import PushConfig
from covenant.store.postgres import ahead
from covenant.store.postgres import engine as engines
from covenant.store.postgres.lane import Lane
from covenant.store.postgres.stretch import Stretch
from tests.conformance.support import finish, nothing_for, plain, soon, take, turn, uid
from tests.postgres import misplaced
from tests.postgres.ahead.support import ALICE, BOB, die, go_ahead, send_many, whole_log
from tests.postgres.support import engine_of, sql, until


async def test_what_is_appended_together_with_what_the_tables_show_is_not_lost(url: str) -> None:
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(Mailbox.open(url))
        alice, bob = box.of(ALICE), box.of(BOB)
        engine = await go_ahead(box, alice, bob)
        going = engine.ahead.stretch
        assert going is not None
        entries = [engine.submit(SendTask(ALICE, plain(bob)))]
        settling = asyncio.ensure_future(going._settle())
        await asyncio.sleep(0)
        entries.append(engine.submit(SendTask(ALICE, plain(bob))))  # not among what is settled
        sent = [(await soon(entry.future)).task_id for entry in entries]
        await soon(settling)
        await die(box)
        stack.pop_all()
    async with Mailbox.open(url) as box:
        assert [(await take(box.of(BOB))).task.id for _ in sent] == sent
        assert await misplaced(engine_of(box)) == ([], [])


async def test_another_daemon_can_come_while_the_tables_are_brought_up_to_date(
    box: OpenMailbox, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "PORTION", 2)
    alice, bob = box.of(ALICE), box.of(BOB)
    engine = await go_ahead(box, alice, bob)
    sent = await send_many(alice, bob, 6)
    half_way, go_on = asyncio.Event(), asyncio.Event()
    statement = engine.ahead._settle_statement

    class Slow:
        async def fetch(self, *values: Any) -> None:
            half_way.set()
            await go_on.wait()
            await statement.fetch(*values)

    engine.ahead._settle_statement = Slow()
    asking = asyncio.create_task(box.get_task(sent[0]))
    await soon(half_way.wait())
    async with AsyncExitStack() as stack:
        coming = asyncio.create_task(stack.enter_async_context(Mailbox.open(url)))
        await until_it_waits(url)
        go_on.set()
        other = await soon(coming)
        assert (await soon(asking)).task.id == sent[0]
        assert [(await take(other.of(BOB))).task.id for _ in sent] == sent


async def until_it_waits(url: str) -> None:
    async with sql(url) as server:
        while not await server.fetchval("select exists (select from pg_locks where not granted)"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_flood_of_denials_is_counted_and_not_written(box: OpenMailbox) -> None:
    engine = engine_of(box)
    alice, bob = box.of(ALICE), box.of(BOB)
    engine.context.refused = Refusals(3, lambda: 60_000).draw
    await engine.run(EnrollPeer(None, ALICE, Role.PEER, "token"))
    await go_ahead(box, alice, bob)
    call = Call(Caller(ALICE, Role.PEER, "token"), SendTask(ALICE, plain(bob)))
    for _ in range(10):
        with pytest.raises(CovenantError) as refused:
            await engine.run(call)
        assert refused.value.code == "missing_capability"
    rows = [row for row in await box.recent_audit(1000) if row.kind == "capability_check"]
    assert len(rows) == 3


async def test_one_that_was_taken_for_dead_answers_with_what_others_have_acknowledged(
    box: OpenMailbox, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    engine = engine_of(box)
    async with Mailbox.open(url) as other, sql(url) as owner:
        frozen = engine_of(other)
        monkeypatch.setattr(frozen._pulse, "_beat", lambda ears: asyncio.sleep(0))  # it gives no sign of life
        monkeypatch.setattr(frozen._pulse, "open", lambda: asyncio.sleep(0))
        await owner.execute("update daemon set seen = seen - interval '1 minute' where id = $1", frozen.member.id)
        engine._pulse._stirred.set()
        await until(lambda: engine.is_alone)
        await go_ahead(box, alice, bob)
        sent = (await alice.send_task(plain(bob))).task_id
        assert engine.ahead.is_on
        assert (await other.get_task(sent)).task.id == sent
        taken = await take(bob)
        assert taken.task.id == sent


async def test_nobody_goes_ahead_while_one_that_was_taken_for_dead_has_a_session(
    box: OpenMailbox, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    engine = engine_of(box)
    monkeypatch.setattr(engine._pulse, "_end", lambda *of: asyncio.sleep(0))  # it may not end those of others
    async with Mailbox.open(url) as other, sql(url) as owner:
        frozen = engine_of(other)
        monkeypatch.setattr(frozen._pulse, "_beat", lambda ears: asyncio.sleep(0))
        await owner.execute("update daemon set seen = seen - interval '1 minute' where id = $1", frozen.member.id)
        engine._pulse._stirred.set()
        await until(lambda: engine.is_alone)
        for _ in range(3):
            await finish(alice, bob, plain(bob))
            assert not engine.ahead.is_on
        sent = (await alice.send_task(plain(bob))).task_id
        assert (await other.get_task(sent)).task.id == sent


async def test_nobody_waits_for_ever_where_the_database_is_away_when_the_store_is_closed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_ENDING_S", 0.1)
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(Mailbox.open(url))
        alice, bob = box.of(ALICE), box.of(BOB)
        engine = await go_ahead(box, alice, bob)
        going = engine.ahead.stretch
        assert going is not None
        lane, is_cut, is_asked = going._lane, asyncio.Event(), asyncio.Event()

        class Cut:
            async def fetch(self, *values: Any) -> None:
                await is_cut.wait()
                raise ConnectionResetError("the line was cut")

        async def silence(batch: Any) -> int:
            is_asked.set()
            await asyncio.Event().wait()
            return 0

        lane._append_statement = Cut()
        monkeypatch.setattr(lane, "recover", silence)
        sending = [asyncio.create_task(alice.send_task(plain(bob)))]
        await turn()  # it goes out, and the next one waits for it
        sending.append(asyncio.create_task(alice.send_task(plain(bob))))
        await turn()
        is_cut.set()
        await until(lambda: going._writing.done())
        engine.ahead.end()
        await soon(is_asked.wait())
    for failed in await soon(asyncio.gather(*sending, return_exceptions=True)):
        assert isinstance(failed, CovenantError)


async def test_those_of_one_call_keep_their_order_where_an_append_is_refused(url: str) -> None:
    async with Mailbox.open(f"{url}&lanes=1") as box:
        await _keep_their_order(box)


async def _keep_their_order(box: OpenMailbox) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None

    class Refused:
        async def fetch(self, *values: Any) -> None:
            raise asyncpg.SerializationError("not now")

    going._lane._append_statement, statement = Refused(), going._lane._append_statement
    tasks = [plain(bob, intent=str(number)) for number in range(4)]
    tasks[2] = structs.replace(tasks[2], id="01a1ec44-e8c8-7ce3-a399-09afd211feb0")  # it wants to be looked for
    sent = [one.task_id for one in await alice.send_tasks(tasks) if not isinstance(one, CovenantError)]
    going._lane._append_statement = statement
    assert [(await take(bob)).task.id for _ in sent] == sent


async def test_where_it_is_never_worth_it_it_is_seldom_tried(box: OpenMailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """To begin and to end costs more than a few commands ahead are worth."""
    monkeypatch.setattr(ahead, "WORTH", 8)
    alice, bob = box.of(ALICE), box.of(BOB)
    begun, begin = 0, ahead.Ahead._begun

    async def counted(self: ahead.Ahead, lane: Lane) -> Stretch | None:
        nonlocal begun
        begun += 1
        return await begin(self, lane)

    monkeypatch.setattr(ahead.Ahead, "_begun", counted)
    for _ in range(10):
        for _ in range(3):
            sent = await finish(alice, bob, plain(bob))
        assert (await box.get_task(sent)).task.id == sent
    assert 1 <= begun <= 2
    await go_ahead(box, alice, bob)


async def test_a_webhook_that_comes_with_a_send_is_known_at_once(box: OpenMailbox) -> None:
    engine = await go_ahead(box, box.of(ALICE), box.of(BOB))
    assert not engine.hooks
    push = PushConfig(id="hook", url="https://example.org/hook")
    await engine.run(SendTask(ALICE, plain(box.of(BOB)), push=push))
    assert engine.hooks


async def test_what_a_fault_of_ours_keeps_from_being_noted_is_not_in_the_log_twice(
    box: OpenMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = box.of(BOB)
    engine = await go_ahead(box, box.of(ALICE), bob)
    note, notes = Stretch._note, 0

    def faulty(self: Stretch, *values: Any) -> None:
        nonlocal notes
        notes += 1
        if notes == 2:
            raise RuntimeError("a fault of ours")
        note(self, *values)

    monkeypatch.setattr(Stretch, "_note", faulty)
    entries = [engine.submit(SendTask(ALICE, plain(bob))) for _ in range(2)]
    sent = [(await soon(entry.future)).task_id for entry in entries]
    assert [(await take(bob)).task.id for _ in sent] == sent
    assert await nothing_for(bob)
    logged = [event.key for one in await whole_log(engine) for event in one.events if type(event) is Sent]
    assert [logged.count(task_id) for task_id in sent] == [1, 1]


async def test_who_was_refused_an_append_does_not_wait_for_the_next_command(box: OpenMailbox) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await finish(alice, bob, plain(bob, id=uid(1)))
    await box.get_task(uid(1))  # it is in the tables
    engine = await go_ahead(box, alice, bob)
    assert uid(1) not in engine.ahead.stretch.work.records  # type: ignore[union-attr]  # it has gone ahead
    async with asyncio.timeout(1):
        assert (await alice.send_task(plain(bob, id=uid(1)))).duplicate


async def test_one_that_was_frozen_does_not_say_that_there_is_nothing(box: OpenMailbox, url: str) -> None:
    engine = await go_ahead(box, box.of(ALICE), box.of(BOB))
    sent: list[str] = []

    async def send() -> None:
        async with Mailbox.open(url) as other:
            sent.append((await other.of(ALICE).send_task(plain(other.of(BOB)))).task_id)

    another = threading.Thread(target=lambda: asyncio.run(send()))
    another.start()
    another.join()  # nothing else happens here meanwhile
    assert engine.ahead.is_on
    taken = await engine.take(LeaseTasks(BOB, BOB, "one"), 0)
    assert [one.task.id for one in taken] == sent
