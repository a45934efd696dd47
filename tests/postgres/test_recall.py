"""What a daemon remembers of its own commits saves a look at the database, and is never taken for the truth."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from covenant import AgentId, Delivery, Idempotency, Mailbox, OpenMailbox, Result, Task
from covenant.model import command as c
from covenant.model.error import CovenantError, ResultConflict, TaskTerminal
from covenant.model.event import Sent
from covenant.model.peer import Caller, Capability, Grant, Role
from covenant.store.clock import ManualClock
from covenant.store.postgres import recall
from covenant.store.postgres.engine import Postgres
from covenant.store.postgres.lane import Lane, Tried
from covenant.store.postgres.saving import SAVE
from tests.conformance.support import DONE, drain, finish, plain, soon, take, uid
from tests.postgres import misplaced, store_url
from tests.postgres.support import sql

ALICE, BOB = AgentId.named("alice@lab"), AgentId.named("bob@lab")


class Loads:
    """How many transactions had to load what they decided on, and how many commands were in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[str] = []
        transact = Lane.transact

        async def noted(lane: Lane, batch: list[Any], tried: Tried) -> int:
            self.commands += [type(entry.command).__name__ for entry in batch]
            return await transact(lane, batch, tried)

        monkeypatch.setattr(Lane, "transact", noted)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


@pytest.fixture
async def box() -> AsyncIterator[OpenMailbox]:
    async with Mailbox.open(store_url()) as box:
        yield box
        assert await misplaced(engine_of(box)) == ([], [])
        assert all(logged.events for logged in await engine_of(box).log_back(None, 1000))


@pytest.fixture
async def both(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[OpenMailbox, OpenMailbox]]:
    """Two that take themselves for alone: whatever either remembers may be wrong."""
    monkeypatch.setattr(Postgres, "is_alone", True)
    url = store_url()
    async with AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(Mailbox.open(url)) for _ in range(2)]
        yield one, other
        assert await misplaced(engine_of(one)) == ([], [])


def engine_of(box: OpenMailbox) -> Any:
    return box._engine


async def test_a_round_of_plain_tasks_loads_nothing(box: OpenMailbox, loads: Loads) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await finish(alice, bob, plain(bob))
    loads.commands.clear()
    for _ in range(3):
        await finish(alice, bob, plain(bob))
    assert loads.commands == []
    assert not engine_of(box).recall._records  # what has ended is not needed any more


async def test_a_send_under_an_id_loads_nothing_and_is_the_same_send_when_it_comes_again(
    box: OpenMailbox, loads: Loads
) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await finish(alice, bob, plain(bob))
    loads.commands.clear()
    await finish(alice, bob, plain(bob, id=uid(1)))
    assert loads.commands == []
    assert (await alice.send_task(plain(bob, id=uid(1)))).duplicate
    assert loads.commands == ["SendTask"]
    with pytest.raises(CovenantError) as refused:
        await alice.send_task(plain(bob, "something else", id=uid(1)))
    assert refused.value.code == "task_conflict"
    sent = await alice.send_tasks([plain(bob, id=uid(2)), plain(bob, id=uid(2)), plain(bob, id=uid(1))])
    assert [one.duplicate for one in sent if not isinstance(one, CovenantError)] == [False, True, True]


@pytest.mark.parametrize("task_id", [None, uid(1)])
async def test_a_send_that_is_no_task_at_all_is_refused_in_the_ordinary_way(
    box: OpenMailbox, task_id: str | None
) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await finish(alice, bob, plain(bob))
    odd: Any = {"duplicate_safety": "idempotent"}
    with pytest.raises(CovenantError) as refused:
        await alice.send_task(Task(recipient=BOB, intent_text="work", idempotency=odd, id=task_id or ""))
    assert refused.value.code == "malformed"


async def test_many_at_once_get_what_is_theirs_from_memory(box: OpenMailbox, loads: Loads) -> None:
    async def client(number: int) -> None:
        alice, bob = box.of(f"alice{number}@lab"), box.of(f"bob{number}@lab")
        for _ in range(5):
            await finish(alice, bob, plain(bob, f"work {number}"))

    await soon(asyncio.gather(*(client(number) for number in range(20))))
    assert len(loads.commands) < 20 * 5 * 4 / 2


async def test_what_waits_on_a_shelf_is_handed_out_oldest_first(box: OpenMailbox) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await finish(alice, bob, plain(bob))
    sent = [(await alice.send_task(plain(bob))).task_id for _ in range(10)]
    taken = [(await take(bob)).task.id for _ in range(3)]
    taken += [delivery.task.id for delivery in await bob.recv_tasks(5)]
    taken += [(await take(bob)).task.id for _ in range(2)]
    assert taken == sent


async def test_a_long_queue_is_loaded_until_somebody_has_come_to_its_end(box: OpenMailbox, loads: Loads) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await alice.send_tasks([plain(bob) for _ in range(recall.STANDING_MAX + 1)])
    loads.commands.clear()
    while await bob.try_recv_task_for() is not None:
        pass
    assert loads.commands == ["LeaseTasks"] * (recall.STANDING_MAX + 2)
    loads.commands.clear()
    await alice.send_task(plain(bob))
    await take(bob)
    assert loads.commands == []


async def test_those_of_one_call_keep_their_order(box: OpenMailbox, loads: Loads) -> None:
    """Also where one of them has to be loaded and the others have not."""
    alice, bob = box.of(ALICE), box.of(BOB)
    await finish(alice, bob, plain(bob))
    keyed = Task(recipient=BOB, intent_text="keyed", idempotency=Idempotency("idempotent", "k"))
    await alice.send_tasks([plain(bob, "first"), keyed, plain(bob, "last")])
    assert [(await take(bob)).task.intent_text for _ in range(3)] == ["first", "keyed", "last"]


async def test_sends_to_one_recipient_keep_their_order(box: OpenMailbox) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await finish(alice, bob, plain(bob))
    keyed = Task(recipient=BOB, intent_text="keyed", idempotency=Idempotency("idempotent", "k"))
    sends = [alice.send_task(task) for task in (plain(bob, "first"), keyed, plain(bob, "last"))]
    await soon(asyncio.gather(*sends))
    assert [(await take(bob)).task.intent_text for _ in range(3)] == ["first", "keyed", "last"]


async def test_a_result_is_weighed_against_the_task_as_it_is(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    one, other = both
    await one.of(ALICE).send_task(plain(one.of(BOB), id=uid(1)))
    await one.of(ALICE).send_task(plain(one.of(BOB), id=uid(2)))
    first, second = [await take(one.of(BOB)) for _ in range(2)]
    await other.cancel_task(first.task.id)
    await other.of(BOB).send_result(Result.error(second, "broken"))
    with pytest.raises(TaskTerminal):
        await one.of(BOB).send_result(Result.ok(first, DONE))
    with pytest.raises(ResultConflict):
        await one.of(BOB).send_result(Result.ok(second, DONE))
    assert {(await drain(one.of(ALICE))).task_id, (await drain(one.of(ALICE))).task_id} == {uid(1), uid(2)}


async def test_a_task_that_another_sent_before_is_taken_first(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    one, other = both
    alice, bob = one.of(ALICE), one.of(BOB)
    await finish(alice, bob, plain(bob))
    await other.of(ALICE).send_task(plain(bob, "first"))
    await alice.send_task(plain(bob, "second"))
    assert [(await take(bob)).task.intent_text for _ in range(2)] == ["first", "second"]


async def test_a_task_that_another_has_taken_is_not_taken_again(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    one, other = both
    alice, bob = one.of(ALICE), one.of(BOB)
    await finish(alice, bob, plain(bob))
    await alice.send_task(plain(bob))
    await take(other.of(BOB))
    assert await bob.try_recv_task_for() is None


async def test_an_answer_that_another_has_drained_does_not_come_again(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    one, other = both
    alice, bob = one.of(ALICE), one.of(BOB)
    await alice.send_task(plain(bob))
    await bob.send_result(Result.ok(await take(bob), DONE))
    await drain(other.of(ALICE))
    assert await alice.try_recv_result_for() is None


async def test_a_task_that_is_answered_is_not_taken_from_a_shelf_where_it_stood(
    both: tuple[OpenMailbox, OpenMailbox],
) -> None:
    """Another has taken it there; what became of it is remembered, and that it left is not."""
    one, other = both
    alice, bob = one.of(ALICE), one.of(BOB)
    await finish(alice, bob, plain(bob))
    sent = await alice.send_task(plain(bob))
    await bob.send_result(Result.ok(await take(other.of(BOB)), DONE))
    assert await bob.try_recv_task_for() is None
    assert (await drain(alice)).task_id == sent.task_id


async def test_what_another_has_revoked_is_refused_at_once(
    both: tuple[OpenMailbox, OpenMailbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = both
    here, there = engine_of(one), engine_of(other)
    grant = Grant(Capability(uid(9), ALICE, "a2a.send.bob@lab", BOB, 1), "")
    await here.run(c.EnrollPeer(None, BOB, Role.PEER, "bob's"))
    await here.run(c.EnrollPeer(None, ALICE, Role.PEER, "alice's", (grant,)))
    monkeypatch.setattr(here, "rung", lambda *rung: None)
    send = c.Call(Caller(ALICE, Role.PEER, "alice's"), c.SendTask(ALICE, plain(one.of(BOB))))
    await here.run(send)
    await there.run(c.RevokeCapability(None, uid(9), "no more"))
    with pytest.raises(CovenantError):
        await here.run(send)


async def test_what_is_due_ends_before_it_is_taken_from_memory() -> None:
    clock = ManualClock()
    async with Mailbox.open(store_url(), clock=clock) as box:
        alice, bob = box.of(ALICE), box.of(BOB)
        await finish(alice, bob, plain(bob))
        await alice.send_task(plain(bob, deadline_ms=clock.now_ms() + 1000))
        clock._now_ms += 2000  # and no timer has fired yet
        assert await bob.try_recv_task_for() is None
        assert (await drain(alice)).result.error_message is not None


async def test_what_another_knows_to_be_due_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Postgres, "is_alone", True)
    url, clock = store_url(), ManualClock()
    async with Mailbox.open(url, clock=clock) as one, Mailbox.open(url, clock=ManualClock()) as other:
        alice, bob = one.of(ALICE), one.of(BOB)
        await finish(alice, bob, plain(bob))
        await other.of(ALICE).send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
        clock.advance(2000)  # of which nobody has told this one
        sent = await alice.send_task(plain(bob))
        newest = await engine_of(one).log_back(None, 2)
        assert [logged.events[0].key for logged in newest] == [sent.task_id, uid(1)]
        assert type(newest[1].events[0]) is not Sent


async def test_of_two_who_want_one_task_the_other_gets_nothing_and_nothing_is_written(box: OpenMailbox) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await finish(alice, bob, plain(bob))
    await alice.send_task(plain(bob))
    taken = await soon(asyncio.gather(*(bob.try_recv_task_for() for _ in range(3))))
    assert len([delivery for delivery in taken if delivery is not None]) == 1


async def test_a_number_does_not_come_behind_one_that_was_told_of() -> None:
    """One lane is slow to send what it has decided; another is faster, and somebody reads the log meanwhile."""
    async with Mailbox.open(f"{store_url()}&lanes=2") as box:
        engine = engine_of(box)
        alice, bob, carol = box.of(ALICE), box.of(BOB), box.of("carol@lab")
        await finish(alice, bob, plain(bob))
        await finish(alice, carol, plain(carol))
        is_held, go_on = asyncio.Event(), asyncio.Event()
        for lane in engine._lanes:
            lane._save_statement = _Slow(lane._save_statement, is_held, go_on)
        first = asyncio.create_task(alice.send_task(plain(bob)))
        await soon(is_held.wait())
        second = await soon(alice.send_task(plain(carol)))
        seen = await engine.log(0, 1000)
        assert seen[-1].events[0].key == second.task_id
        go_on.set()
        sent = await soon(first)
        behind = await engine.log(seen[-1].last, 1000)
        assert [logged.events[0].key for logged in behind] == [sent.task_id]


class _Slow:
    """A statement of which the first that is asked is held back."""

    def __init__(self, statement: Any, is_held: asyncio.Event, go_on: asyncio.Event) -> None:
        self._statement, self._is_held, self._go_on = statement, is_held, go_on

    async def fetch(self, *values: Any) -> Any:
        if not self._is_held.is_set():
            self._is_held.set()
            await self._go_on.wait()
        return await self._statement.fetch(*values)


async def test_what_was_looked_for_in_vain_does_not_arrive_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is cut, and what was said on it comes to the server after all: once it was looked for, and before the
    command is decided again."""
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as box, sql(url) as server:
        engine = engine_of(box)
        alice, bob = box.of(ALICE), box.of(BOB)
        await finish(alice, bob, plain(bob))
        sent = [(await alice.send_task(plain(bob))).task_id for _ in range(2)]
        late: list[Any] = []

        class Cut:
            async def fetch(self, *values: Any) -> None:
                late[:] = values
                raise ConnectionResetError("the line was cut")

        recover = Lane.recover

        async def arrives(lane: Lane, batch: list[Any]) -> int:
            done = await recover(lane, batch)
            with pytest.raises(asyncpg.PostgresError):
                await server.fetch(SAVE, *late)
            return done

        monkeypatch.setattr(Lane, "recover", arrives)
        engine._lanes[0]._save_statement = Cut()
        assert (await take(bob)).task.id == sent[0]
        assert late
        assert (await take(bob)).task.id == sent[1]
        assert await misplaced(engine) == ([], [])


async def test_a_fault_of_ours_after_a_commit_answers_nobody_else() -> None:
    """What is not known of that commit is not taken for the outcome of the next one."""
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        lane = engine_of(box)._lanes[0]
        alice, bob = box.of(ALICE), box.of(BOB)
        await finish(alice, bob, plain(bob))
        save = lane._save_statement

        class Broken:
            async def fetch(self, *values: Any) -> None:
                await save.fetch(*values)
                raise RuntimeError("a fault of ours")

        class Cut:
            async def fetch(self, *values: Any) -> None:
                raise ConnectionResetError("the line was cut")

        lane._save_statement = Broken()
        with pytest.raises(CovenantError):
            await alice.send_task(plain(bob))
        await lane.open()
        lane._save_statement = Cut()
        sent = await alice.send_task(Task(recipient=BOB, intent_text="x", idempotency=Idempotency("idempotent", "k")))
        assert (await alice.get_task(sent.task_id)).task.id == sent.task_id


async def test_a_reader_of_the_log_misses_nothing_and_sees_nothing_twice(
    both: tuple[OpenMailbox, OpenMailbox],
) -> None:
    """While both commit, each in blocks of numbers that it drew before."""
    one, other = both
    seen: list[int] = []
    over = asyncio.Event()

    async def read(box: OpenMailbox) -> None:
        after = 0
        while True:
            is_last = over.is_set()
            for logged in await engine_of(box).log(after, 1000):
                assert logged.seq > after
                seen.append(logged.seq)
                after = logged.last
            if is_last:
                return

    async def work(box: OpenMailbox, number: int) -> None:
        alice, bob = box.of(f"alice{number}@lab"), box.of(f"bob{number}@lab")
        for _ in range(15):
            await finish(alice, bob, plain(bob))

    reading = asyncio.create_task(read(one))
    await soon(asyncio.gather(*(work(box, number) for number, box in enumerate((one, other) * 3))))
    over.set()
    await soon(reading)
    commits = [row["seq"] for row in await engine_of(one)._reader.fetch("select lines, seq from log")]
    assert len(seen) == len(set(seen)) >= len(commits)
    assert len(seen) == 6 * 15 * 4


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[Lane]:
    """The lanes that have drawn numbers for themselves."""
    drawn: list[Lane] = []
    draw_block = Lane._draw_block

    async def noted(lane: Lane, connection: Any) -> None:
        drawn.append(lane)
        await draw_block(lane, connection)

    monkeypatch.setattr(Lane, "_draw_block", noted)
    return drawn


async def test_what_a_reader_of_the_log_has_drawn_is_used_while_it_looks(
    box: OpenMailbox, draws: list[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(box)
    alice, bob = box.of(ALICE), box.of(BOB)
    await finish(alice, bob, plain(bob))
    fetch, looks, go_on = engine._reader.fetch, asyncio.Event(), asyncio.Event()

    async def slow(asked: str, *values: Any) -> Any:
        if "pg_current_snapshot" in asked:
            looks.set()
            await go_on.wait()
        return await fetch(asked, *values)

    monkeypatch.setattr(engine._reader, "fetch", slow)
    reading = asyncio.create_task(engine.log(0, 1000))
    await soon(looks.wait())
    draws.clear()
    await alice.send_task(plain(bob))
    assert draws == []
    go_on.set()
    assert len(await soon(reading)) == 4


async def test_no_numbers_are_drawn_where_nothing_can_be_recalled(box: OpenMailbox, draws: list[Lane]) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    numbers = engine_of(box).recall.numbers
    numbers.lose(numbers.block)
    draws.clear()
    await bob.heartbeat(delivery)
    assert draws == []


async def test_what_two_are_at_is_done_once_whatever_they_remember(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    """Workers of both at one recipient, and drains of both for one sender."""
    count = 60
    done: Counter[str] = Counter()
    drained: Counter[str] = Counter()

    async def send(box: OpenMailbox) -> None:
        for _ in range(count // 2):
            await box.of(ALICE).send_task(plain(box.of(BOB)))

    async def work(box: OpenMailbox) -> None:
        while done.total() < count:
            for delivery in await box.of(BOB).recv_tasks(1, wait_ms=50):
                done[delivery.task.id] += 1
                await box.of(BOB).send_result(Result.ok(delivery, DONE))

    async def collect(box: OpenMailbox) -> None:
        while drained.total() < count:
            for answer in await box.of(ALICE).recv_results(2, wait_ms=50):
                drained[answer.task_id] += 1

    async with asyncio.timeout(60):
        await asyncio.gather(*(job(box) for box in both for job in (send, work, work, collect)))
    assert len(done) == done.total() == len(drained) == drained.total() == count


async def test_memory_is_bounded(box: OpenMailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "RECORDS_MAX", 5)
    monkeypatch.setattr(recall, "SHELVES_MAX", 4)
    monkeypatch.setattr(recall, "STANDING_MAX", 3)
    alice = box.of(ALICE)
    known = engine_of(box).recall
    for number in range(4):
        bob = box.of(f"bob{number}@lab")
        for _ in range(4):
            await alice.send_task(plain(bob))
        await alice.send_task(plain(bob, "x" * recall.RECORD_BYTES_MAX))
    assert len(known._records) <= 5 and len(known._shelves) <= 4 and len(known._unknown) <= 4
    assert all(len(task.intent_text) < 100 for task in (record.task for record, _ in known._records.values()))
    for number in range(4):
        bob = box.of(f"bob{number}@lab")
        assert len([await take(bob) for _ in range(5)]) == 5


async def test_nothing_stays_lent(box: OpenMailbox) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    with pytest.raises(CovenantError):
        await bob.send_result(Result.ok(Delivery(delivery.task, uid(7), 1, 2), DONE))
    await bob.send_result(Result.ok(delivery, DONE))
    with pytest.raises(ResultConflict):
        await bob.send_result(Result.error(delivery, "broken"))
    await drain(alice)
    assert not engine_of(box).recall._lent


async def test_a_lease_takes_what_was_sent_before_it_in_the_same_call(box: OpenMailbox) -> None:
    bob = box.of(BOB)
    first = (await box.of(ALICE).send_task(plain(bob))).task_id
    commands = [c.SendTask(ALICE, plain(bob)), c.LeaseTasks(BOB, BOB, "one", 2)]
    sent, taken = await engine_of(box).run_all(commands)
    assert [one.task.id for one in taken] == [first, sent.task_id]
