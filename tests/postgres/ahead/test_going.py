"""A daemon that is alone goes ahead of the tables: everything is in the log, and whoever comes next sees it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from covenant import Limits, Mailbox, OpenMailbox, Result, Task, TaskState, Text
from covenant.model.error import CovenantError
from covenant.model.event import Sent
from covenant.store.clock import ManualClock
from covenant.store.postgres import ahead, stretch
from covenant.store.postgres.numbers import BLOCK, BLOCKS_AHEAD
from covenant.store.postgres.pace import Pace
from covenant.store.postgres.saving import APPEND, Rows
from covenant.store.postgres.view import Working
from tests.beings import Being
from tests.conformance.support import DONE, answer_next, drain, finish, nothing_for, plain, soon, take, turn, uid
from tests.postgres import misplaced
from tests.postgres.ahead.hasty import work
from tests.postgres.ahead.support import (
    ALICE,
    BOB,
    die,
    go_ahead,
    in_tables,
    send_many,
    whole_log,
)
from tests.postgres.support import engine_of, sql, until

_QUEUED = "select exists (select from pg_locks where pid = $1 and locktype = 'advisory' and not granted)"


async def test_a_commit_is_in_the_log_before_it_is_in_the_tables(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str
) -> None:
    engine = await go_ahead(box, alice, bob)
    sent = await alice.send_task(plain(bob))
    assert engine.ahead.is_on
    assert not await in_tables(url, sent.task_id)
    async with sql(url) as server:
        assert await server.fetchval("select count(*) from ahead") == 1
        lines = await server.fetchval("select lines from log order by seq desc limit 1")
    assert sent.task_id.encode() in lines
    assert (await box.get_task(sent.task_id)).state is TaskState.QUEUED  # a question has the tables made whole
    assert not engine.ahead.is_on
    assert await in_tables(url, sent.task_id)
    async with sql(url) as server:
        assert await server.fetchval("select count(*) from ahead") == 0


async def test_who_opens_the_store_of_one_that_died_finds_all_that_was_acknowledged(url: str) -> None:
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(Mailbox.open(url))
        alice, bob = box.of(ALICE), box.of(BOB)
        await go_ahead(box, alice, bob)
        queued = (await alice.send_task(plain(bob, intent="queued"))).task_id
        leased = await take(bob)
        answered = (await alice.send_task(plain(bob, intent="answered"))).task_id
        await answer_next(bob)
        assert not await in_tables(url, answered)
        await die(box)
        stack.pop_all()
    async with Mailbox.open(url) as box:
        alice, bob = box.of(ALICE), box.of(BOB)
        assert leased.task.id == queued
        assert (await box.get_task(queued)).state is TaskState.IN_FLIGHT
        assert (await box.get_task(answered)).state is TaskState.RESULT_PENDING
        assert await nothing_for(bob)
        assert (await drain(alice)).task_id == answered
        await bob.send_result(Result.ok(leased, DONE))
        assert (await drain(alice)).task_id == queued
        assert await misplaced(engine_of(box)) == ([], [])


async def test_another_daemon_that_comes_sees_everything_and_the_first_goes_on(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str
) -> None:
    engine = await go_ahead(box, alice, bob)
    first = (await alice.send_task(plain(bob))).task_id
    assert not await in_tables(url, first)
    async with Mailbox.open(url) as other:
        assert (await take(other.of(BOB))).task.id == first
        second = (await alice.send_task(plain(bob))).task_id  # decided ahead, refused, and decided again
        assert await in_tables(url, second)
        assert (await take(other.of(BOB))).task.id == second
        assert not engine.ahead.is_on
        for _ in range(3):  # nobody goes ahead while there are two
            await finish(alice, bob, plain(bob))
            assert not engine.ahead.is_on
            assert not engine_of(other).ahead.is_on


async def test_one_that_takes_itself_for_alone_is_refused_by_the_database(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str
) -> None:
    """It may have been frozen, and another has come meanwhile of whom it has not heard."""
    engine = engine_of(box)
    await finish(alice, bob, plain(bob))
    async with Mailbox.open(url):
        engine._pulse.companions = 1
        for _ in range(4):
            await finish(alice, bob, plain(bob))
            engine._pulse.companions = 1
        assert not engine.ahead.is_on


async def test_a_frozen_one_is_refused_when_it_thaws(box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str) -> None:
    engine = await go_ahead(box, alice, bob)
    held = (await alice.send_task(plain(bob))).task_id
    async with Mailbox.open(url) as other:
        taken = await take(other.of(BOB))
        assert taken.task.id == held
        engine._pulse.companions = 1  # it has heard of nothing
        assert await nothing_for(bob)  # on what it remembers there would be one
        await other.of(BOB).send_result(Result.ok(taken, DONE))
        assert (await drain(alice)).task_id == held


async def test_what_is_decided_in_a_crowd_keeps_its_order(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    engine = await go_ahead(box, alice, bob)
    sent = await send_many(alice, bob, 100)
    assert engine.ahead.is_on
    taken = [(await take(bob)).task.id for _ in range(50)]
    taken += [one.task.id for one in await bob.recv_tasks(50)]
    assert taken == sent


async def test_the_tables_are_brought_up_to_date_on_the_way(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretch, "OWED", 20)
    monkeypatch.setattr(ahead, "PACED", 7)
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    hung = [(await alice.send_task(plain(bob))).task_id for _ in range(3)]
    held = [await take(bob) for _ in hung]
    done = [await finish(alice, bob, plain(bob)) for _ in range(60)]
    assert engine.ahead.stretch is going
    async with sql(url) as server:
        there = await server.fetchval("select count(*) from record where key = any($1)", done)
    assert 0 < there <= 60
    for delivery in held:
        await bob.send_result(Result.ok(delivery, DONE))
    assert engine.ahead.stretch is going
    assert [(await drain(alice)).task_id for _ in hung] == hung


@pytest.mark.parametrize("is_as_much_owed", [False, True])
async def test_an_append_has_its_turn_between_portions_of_what_is_owed_unless_as_much_is_owed_again(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, is_as_much_owed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "PACED", 2)
    monkeypatch.setattr(stretch, "PAUSE_S", 60.0)
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None
    lane, seen, is_let_go = going._lane, list[str](), asyncio.Event()
    append, put = lane._append_statement, engine.ahead._put_statement

    class Held:
        async def fetch(self, *values: Any) -> None:
            await is_let_go.wait()
            seen.append("append")
            await append.fetch(*values)

    class Noted:
        async def fetch(self, *values: Any) -> None:
            await put.fetch(*values)
            seen.append("put")

    await send_many(alice, bob, 9)
    owed = len(going.work.touched)
    lane._append_statement, engine.ahead._put_statement = Held(), Noted()
    going._settling = asyncio.ensure_future(going._settle())
    await asyncio.sleep(0)
    sending = [asyncio.create_task(alice.send_task(plain(bob))) for _ in range(owed if is_as_much_owed else 1)]
    try:
        if is_as_much_owed:
            await soon(asyncio.shield(going._settling))
            assert set(seen) == {"put"}
        else:
            await until(lambda: bool(seen))
            await turn()
            assert not going._settling.done()
    finally:
        is_let_go.set()
    await soon(asyncio.gather(*sending))
    await soon(going._settling)
    if not is_as_much_owed:
        assert seen[:2] == ["put", "append"] and seen.count("put") >= 4
    assert engine.ahead.stretch is going


async def test_what_has_gathered_goes_out_before_those_are_answered_who_are_in_the_log(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "share", 1)  # no more of them are waited for
    going = (await go_ahead(box, alice, bob)).ahead.stretch
    assert going is not None
    append, is_let_go, answered = going._lane._append_statement, asyncio.Event(), list[bool]()

    class Held:
        async def fetch(self, *values: Any) -> None:
            answered.append(first is not None and first.future.done())
            await is_let_go.wait()
            await append.fetch(*values)

    first = None
    going._lane._append_statement = Held()
    sending = [asyncio.create_task(alice.send_task(plain(bob)))]
    await until(lambda: bool(going._going.entries))
    first = going._going.entries[0]
    sending.append(asyncio.create_task(alice.send_task(plain(bob))))
    await until(lambda: bool(going._gathered.entries))
    is_let_go.set()
    await soon(asyncio.gather(*sending))
    assert answered == [False, False] and first.future.done()


async def test_whether_this_is_the_time_to_go_ahead_is_not_looked_at_for_each_append(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await go_ahead(box, alice, bob)
    looks = list[bool]()

    def looked() -> bool:
        looks.append(False)
        return False

    monkeypatch.setattr(stretch, "LOOK_S", 60.0)
    await finish(alice, bob, plain(bob))  # with the last look for a long time
    monkeypatch.setattr(engine, "may_recall", looked)
    going = engine.ahead.stretch
    await finish(alice, bob, plain(bob))
    assert not looks and going is not None and engine.ahead.stretch is going
    going._looks_at_s = 0.0  # the time has come
    await alice.send_task(plain(bob))
    await turn()
    assert looks and engine.ahead.stretch is not going


async def test_another_daemon_that_comes_while_an_append_is_waited_for_holds_up_nobody(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for what is put into the tables, the append for it: what is put there must not wait for the append."""
    monkeypatch.setattr(ahead, "PACED", 2)
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None
    append, let_one_append = going._lane._append_statement, going._let_one_append
    pauses, is_queued = list[int](), asyncio.Event()
    await send_many(alice, bob, 9)

    class Late:
        async def fetch(self, *values: Any) -> None:
            await is_queued.wait()
            await append.fetch(*values)

    async def counted(owed: int) -> bool:
        pauses.append(owed)
        await is_queued.wait()
        return await let_one_append(owed)

    monkeypatch.setattr(going, "_let_one_append", counted)
    going._lane._append_statement = Late()
    settling = asyncio.ensure_future(going._settle())
    await turn()
    sending = asyncio.create_task(alice.send_task(plain(bob)))
    await until(lambda: bool(pauses and going._going.entries))
    async with sql(url) as newcomer, sql(url) as witness:
        joining = asyncio.create_task(newcomer.execute("select pg_advisory_xact_lock($1, 1)", engine.space))
        async with asyncio.timeout(10):
            while not await witness.fetchval(_QUEUED, newcomer.get_server_pid()):
                await turn()
        is_queued.set()
        await soon(asyncio.gather(settling, sending, joining))
    assert len(pauses) == 1  # one is enough to see that it does not come
    assert engine.ahead.stretch is going


async def test_a_stretch_with_much_under_way_brings_the_tables_up_to_date_before_it_has_to_end(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretch, "OWED", 4)
    monkeypatch.setattr(stretch, "OWED_MAX", 40)
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None
    for _ in range(30):  # each stays under way
        await alice.send_task(plain(bob))
        if going._settling is not None:
            await soon(asyncio.shield(going._settling))
    assert len(going.work.were) * stretch.OWED_SHARE > stretch.OWED_MAX
    for _ in range(60):
        await alice.send_task(plain(bob))
        if going._settling is not None:
            await soon(asyncio.shield(going._settling))
    assert engine.ahead.stretch is going


async def test_what_a_fault_has_spoilt_is_not_put_into_the_tables(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str
) -> None:
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None
    sent = await alice.send_task(plain(bob))
    settling = asyncio.ensure_future(going._settle())
    going.is_spoilt = True  # before it has begun
    await soon(settling)
    assert not await in_tables(url, sent.task_id)
    assert (await take(bob)).task.id == sent.task_id  # it is read from the log


@pytest.mark.parametrize("is_late", [False, True])
async def test_others_have_their_turn_while_rows_are_made_of_what_is_owed_unless_that_takes_long(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_late:
        monkeypatch.setattr(ahead, "SLICING_S", 0.0)
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None
    await send_many(alice, bob, 3 * ahead.SLICE)
    add, made = Rows.add, list[str]()

    def noted(rows: Rows, work: Working, keys: Iterable[str]) -> None:
        made.extend(keys)
        add(rows, work, keys)

    monkeypatch.setattr(Rows, "add", noted)
    going._settling = asyncio.ensure_future(going._settle())
    most = 0
    while not going._settling.done():
        before = len(made)
        await asyncio.sleep(0)
        most = max(most, len(made) - before)
    assert len(made) >= 3 * ahead.SLICE
    assert most == (len(made) if is_late else ahead.SLICE)
    assert engine.ahead.stretch is going


async def test_who_runs_out_of_numbers_draws_more_and_goes_on(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ahead, stretch):
        monkeypatch.setattr(module, "BLOCKS_AHEAD", 1)
    monkeypatch.setattr(stretch, "NUMBERS_LEFT_MIN", BLOCK // 2)
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None
    last, sent = going.work.order, list[str]()
    for _ in range(BLOCK // 250 + 1):
        sent += await send_many(alice, bob, 250)
    assert engine.ahead.stretch is going
    ours = sorted(one.seq for one in await whole_log(engine) if one.seq > last)
    assert ours == [*range(last + 1, last + 1 + len(sent))]  # right behind one another


@pytest.mark.parametrize("why", ["somebody else has drawn", "the tables were made whole", "the line was cut"])
async def test_who_gets_no_more_numbers_comes_back_and_loses_nothing(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    before = await alice.send_task(plain(bob))
    assert going is not None and engine.ahead.stretch is going
    drawn = going._block
    monkeypatch.setattr(stretch, "NUMBERS_LEFT_MIN", 1 << 40)  # each append wants more
    await alice.send_task(plain(bob))
    assert engine.ahead.stretch is going and going._block == drawn + BLOCKS_AHEAD * BLOCK
    async with sql(url) as server:
        if why == "somebody else has drawn":
            await server.fetchval("select nextval('block')")
        elif why == "the line was cut":
            await server.execute("select pg_terminate_backend($1)", going._lane._connection.get_server_pid())  # type: ignore[union-attr]
        else:
            async with Mailbox.open(url) as other:
                assert (await other.get_task(before.task_id)).state is TaskState.QUEUED
    sent = await soon(alice.send_task(plain(bob)))
    assert engine.ahead.stretch is not going
    assert [(await take(bob)).task.id for _ in range(3)][::2] == [before.task_id, sent.task_id]
    assert await nothing_for(bob)


@pytest.mark.parametrize("of", ["append", "settle"])
async def test_a_line_that_is_cut_loses_nothing_and_repeats_nothing(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretch, "OWED", 10)
    engine = await go_ahead(box, alice, bob)
    lane = engine.ahead.stretch._lane  # type: ignore[union-attr]  # it has gone ahead

    async def cycles(number: int) -> list[str]:
        sender, worker = box.of(f"p{number}@lab"), box.of(f"w{number}@lab")
        return [await finish(sender, worker, plain(worker)) for _ in range(25)]

    working = asyncio.gather(*(cycles(number) for number in range(6)))
    async with sql(url) as server:
        for _ in range(5):
            await turn()
            cut = lane._connection if of == "append" else engine.ahead._tables
            if cut is not None and not cut.is_closed():
                await server.execute("select pg_terminate_backend($1)", cut.get_server_pid())
    done = [task_id for one in await soon(working) for task_id in one]
    assert len(set(done)) == 150
    for task_id in done:
        entry = await box.get_task(task_id)
        assert (entry.state, entry.attempt) == (TaskState.RESOLVED, 1)


async def test_an_append_whose_answer_was_lost_is_known_to_have_happened(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None
    lane = going._lane
    statement = lane._append_statement

    class Deaf:
        async def fetch(self, *values: Any) -> None:
            await statement.fetch(*values)
            raise ConnectionResetError("the line was cut")

    lane._append_statement = Deaf()
    sent = await soon(alice.send_task(plain(bob)))
    assert not engine.ahead.is_on
    assert (await take(bob)).task.id == sent.task_id
    assert await nothing_for(bob)


async def test_an_append_that_never_arrived_is_decided_again_and_does_not_arrive_later(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str
) -> None:
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None
    late: list[Any] = []

    class Cut:
        async def fetch(self, *values: Any) -> None:
            late[:] = values
            raise ConnectionResetError("the line was cut")

    going._lane._append_statement = Cut()
    sent = await soon(alice.send_task(plain(bob)))
    async with sql(url) as server:
        with pytest.raises(asyncpg.PostgresError):
            await server.fetch(APPEND, *late)
    assert (await take(bob)).task.id == sent.task_id
    assert await nothing_for(bob)


@pytest.mark.parametrize("of", ["encode", "follow_task"])
async def test_a_fault_of_ours_in_a_command_is_nobodys_loss(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await go_ahead(box, alice, bob)
    first = (await alice.send_task(plain(bob))).task_id
    whole = getattr(stretch, of, None) or getattr(Working, of)
    faults = [1]

    def faulty(*values: Any) -> Any:
        if faults:
            faults.pop()
            if of == "follow_task":
                values[0].records.clear()  # whatever it did before
            raise RuntimeError("a fault of ours")
        return whole(*values)

    monkeypatch.setattr(stretch if of == "encode" else Working, of, faulty)
    second = (await soon(alice.send_task(plain(bob)))).task_id
    assert not faults
    assert not engine.ahead.is_on
    assert [(await take(bob)).task.id for _ in range(2)] == [first, second]
    assert await nothing_for(bob)


async def test_a_send_under_an_id_is_the_same_send_whenever_it_comes_again(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    engine = await go_ahead(box, alice, bob)
    before = await finish(alice, bob, plain(bob, id=uid(1)))
    await box.get_task(before)  # it is in the tables
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    task = plain(bob, id=uid(2))
    assert not (await alice.send_task(task)).duplicate
    assert engine.ahead.stretch is going
    assert (await alice.send_task(task)).duplicate  # still open
    assert engine.ahead.stretch is going
    await answer_next(bob)
    await drain(alice)
    assert (await alice.send_task(task)).duplicate  # it has ended, and the tables do not know yet
    assert engine.ahead.stretch is going
    assert going is not None
    await going._settle()
    assert uid(2) not in going.work.records
    assert (await alice.send_task(task)).duplicate  # it is in the tables, and in memory no more
    assert engine.ahead.stretch is not going
    await go_ahead(box, alice, bob)
    assert (await alice.send_task(plain(bob, id=uid(1)))).duplicate  # from before all of this
    await go_ahead(box, alice, bob)
    with pytest.raises(CovenantError) as refused:
        await alice.send_task(plain(bob, "something else", id=uid(1)))
    assert refused.value.code == "task_conflict"
    assert await nothing_for(bob)
    sends = Counter(event.key for one in await whole_log(engine) for event in one.events if type(event) is Sent)
    assert sends[uid(1)] == sends[uid(2)] == 1


async def test_a_send_under_an_id_that_is_on_its_way_into_the_tables_is_the_same_send(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None
    await finish(alice, bob, plain(bob, id=uid(3)))
    is_held, go_on = asyncio.Event(), asyncio.Event()
    settle = ahead.Ahead.settle

    async def slow(self: ahead.Ahead, *values: Any) -> None:
        is_held.set()
        await go_on.wait()
        await settle(self, *values)

    monkeypatch.setattr(ahead.Ahead, "settle", slow)
    going._settling = asyncio.create_task(going._settle())
    await soon(is_held.wait())
    again = asyncio.create_task(alice.send_task(plain(bob, id=uid(3))))
    await turn()
    go_on.set()
    assert (await soon(again)).duplicate
    assert await nothing_for(bob)


async def test_who_goes_away_before_the_answer_has_taken_nothing(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    engine = await go_ahead(box, alice, bob)
    sent = (await alice.send_task(plain(bob))).task_id
    receiving = asyncio.create_task(bob.recv_task())
    await turn()
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    delivery = await take(bob)
    assert (delivery.task.id, delivery.attempt) == (sent, 1)
    assert engine is not None


async def test_who_waits_is_woken_by_what_is_decided_ahead(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    for _ in range(3):
        waiting = asyncio.create_task(take(bob))
        answer = asyncio.create_task(drain(alice))
        await turn()
        sent = await alice.send_task(plain(bob))
        delivery = await soon(waiting)
        assert delivery.task.id == sent.task_id
        await bob.send_result(Result.ok(delivery, DONE))
        assert (await soon(answer)).task_id == sent.task_id
    assert engine.ahead.stretch is going


async def test_a_task_that_is_watched_is_seen_to_move(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    await go_ahead(box, alice, bob)
    sent = (await alice.send_task(plain(bob))).task_id
    watching = asyncio.create_task(alice.wait_generation(sent, 1))
    await turn()
    await take(bob)
    assert (await soon(watching)).generation == 2


async def test_what_is_due_comes_first(url: str) -> None:
    clock = ManualClock()
    async with Mailbox.open(url, clock=clock) as box:
        alice, bob = box.of(ALICE), box.of(BOB)
        await go_ahead(box, alice, bob)
        deadline_ms = clock.now_ms() + 1000
        late = (await alice.send_task(Task(recipient=BOB, intent_text="late", deadline_ms=deadline_ms))).task_id
        soon_enough = (await alice.send_task(plain(bob))).task_id
        clock.advance(2000)
        assert (await take(bob)).task.id == soon_enough
        ended = await drain(alice)
        assert (ended.task_id, ended.status) == (late, "error")


async def test_a_refusal_is_said_on_what_the_tables_show(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    await go_ahead(box, alice, bob)
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    await bob.send_result(Result.ok(delivery, DONE))
    with pytest.raises(CovenantError) as refused:
        await bob.send_result(Result.ok(delivery, [Text("something else")]))
    assert refused.value.code == "result_conflict"
    with pytest.raises(CovenantError) as unknown:
        await bob.send_result(Result(task_id="01a1ec44-e8c8-7ce3-a399-09afd211feb0", status="ok", content=DONE))
    assert unknown.value.code == "unknown_task"


async def test_the_operator_receives_for_all_in_the_order_of_sending(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    await go_ahead(box, alice, bob)
    carol = box.of("carol@lab")
    sent = [(await alice.send_task(plain(to))).task_id for to in (bob, carol, bob)]
    assert [(await take(box)).task.id for _ in sent] == sent


async def test_large_tasks_are_not_kept_in_memory(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    engine = await go_ahead(box, alice, bob)
    large = (await alice.send_task(plain(bob, intent="x" * 20_000))).task_id
    small = (await alice.send_task(plain(bob))).task_id
    going = engine.ahead.stretch
    assert going is not None
    await going._settle()
    assert large not in going.work.records
    assert small in going.work.records
    assert [(await take(bob)).task.id for _ in range(2)] == [large, small]


async def test_no_more_is_looked_at_for_a_beginning_than_everybody_may_wait_for(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "LOOKED_MAX", 40)
    crowd = [box.of(f"crowd{number}@lab") for number in range(10)]
    for one in crowd:
        await send_many(alice, one, 10)
        await take(one)
    engine = await go_ahead(box, alice, bob)
    going = engine.ahead.stretch
    assert going is not None
    assert going.looked <= 40
    for one in crowd:
        assert (await take(one)).task.intent_text == "1"


async def test_more_than_may_be_owed_is_put_into_the_tables_first(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretch, "OWED_MAX", 30)
    engine = await go_ahead(box, alice, bob)
    sent = await send_many(alice, bob, 40)
    assert not engine.ahead.is_on
    assert await in_tables(url, sent[0])


async def test_a_daemon_that_has_nothing_to_do_comes_back(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretch, "IDLE_S", 0.05)
    engine = engine_of(box)
    for _ in range(3):
        await finish(alice, bob, plain(bob))
    await until(lambda: not engine.ahead.is_on and engine.ahead._ending is None)
    async with sql(url) as server:
        assert await server.fetchval("select count(*) from ahead") == 0
        assert await server.fetchval("select count(*) from task") == 3


async def test_a_store_is_whole_when_it_was_closed(url: str) -> None:
    async with Mailbox.open(url) as box:
        alice, bob = box.of(ALICE), box.of(BOB)
        await go_ahead(box, alice, bob)
        sent = (await alice.send_task(plain(bob))).task_id
    assert await in_tables(url, sent)
    async with sql(url) as server:
        assert await server.fetchval("select count(*) from ahead") == 0


async def test_a_clerk_that_looks_into_the_log_sees_every_event_once(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    engine = engine_of(box)
    seen: list[str] = []
    at = 0
    for _ in range(12):
        await finish(alice, bob, plain(bob))
        while logged := await engine.log(at, 1000):
            at = logged[-1].last
            seen += [f"{type(event).__name__} {event.key}" for one in logged for event in one.events]
    for _ in range(5):
        await go_ahead(box, alice, bob)
        while logged := await engine.log(at, 1000):
            at = logged[-1].last
            seen += [f"{type(event).__name__} {event.key}" for one in logged for event in one.events]
    everything = [
        f"{type(event).__name__} {event.key}" for one in reversed(await whole_log(engine)) for event in one.events
    ]
    assert seen == everything


@pytest.mark.parametrize("limits", [Limits(retention_ms=1, dedup_ms=1)])
async def test_tasks_past_their_time_are_buried_while_it_goes_ahead(url: str, limits: Limits) -> None:
    clock = ManualClock()
    async with Mailbox.open(url, clock=clock, limits=limits) as box:
        alice, bob = box.of(ALICE), box.of(BOB)
        await go_ahead(box, alice, bob)
        clock.advance(1000)
        await box.compact()
        await go_ahead(box, alice, bob)
        assert await misplaced(engine_of(box)) == ([], [])


def lines_until_killed(url: str, after: int) -> Iterator[str]:
    """What a process says of itself until it has said so much, and what it said meanwhile."""
    being = Being(work, url)
    with being.line, open(being.line.fileno(), closefd=False) as lines:
        for said, line in enumerate(lines):
            if said == after:
                being.kill()
            if line.endswith("\n") and line != "open\n":
                yield line
    being.kill()


@pytest.mark.parametrize("kills", [pytest.param(6, id="some"), pytest.param(300, id="many", marks=pytest.mark.soak)])
async def test_kills_lose_nothing_and_lease_nothing_twice(url: str, kills: int) -> None:
    rng = random.Random(kills)
    was_ahead = 0
    for _ in range(kills):
        states: dict[str, str] = {}
        leases: dict[str, str] = {}
        for line in lines_until_killed(url, rng.randint(200, 900)):
            kind, task_id, *lease = line.split()
            states[task_id] = kind
            if lease:
                assert task_id not in leases
                leases[task_id] = lease[0]
        assert states
        async with sql(url) as server:
            was_ahead += await server.fetchval("select count(*) from ahead")
        async with Mailbox.open(url) as box:
            for task_id, kind in states.items():
                entry = await box.get_task(task_id)
                assert _ORDER[entry.state] >= _SAID[kind], (task_id, kind, entry.state)
                assert entry.attempt <= 1
            assert await misplaced(engine_of(box)) == ([], [])
            await _end_all(box)
    assert was_ahead > 0


_ORDER = {TaskState.QUEUED: 0, TaskState.IN_FLIGHT: 1, TaskState.RESULT_PENDING: 2, TaskState.RESOLVED: 3}
_SAID = {"sent": 0, "leased": 1, "answered": 2, "drained": 3}


async def _end_all(box: OpenMailbox) -> None:
    """So that the next one finds nothing of the one before."""
    for entry in (await box.task_queue(limit=1000)).tasks:
        if entry.outcome is None:
            await box.cancel_task(entry.task.id)
    while await box.recv_results(1000, wait_ms=0):
        pass
