"""Much at once: what a transaction loads and saves is bounded in bytes, and locks no more than it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from msgspec import Raw, structs

from covenant import AgentId, Json, Mailbox, OpenMailbox, Result, Task, Text
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.error import TaskTerminal, UnknownTask
from covenant.model.limits import Limits
from covenant.model.peer import Capability, Grant, Role
from covenant.model.protocol import State
from covenant.model.record import TaskRecord
from covenant.model.run import EntryDraft, EntryRole, RunCommit
from covenant.store.clock import ManualClock
from covenant.store.postgres import lane as lanes
from covenant.store.postgres import reader as readers
from covenant.store.postgres.connection import borrowed
from covenant.store.postgres.lane import Lane
from covenant.store.postgres.numbers import BLOCK
from covenant.store.postgres.rounds import POLL_S
from covenant.store.postgres.view import Working
from tests.a2a.stage import message
from tests.conformance.support import DONE, soon, take, uid
from tests.postgres import store_url
from tests.postgres.support import engine_of, until

ALICE, BOB = AgentId.named("alice@lab"), AgentId.named("bob@lab")
_BYTES: Final = 20_000
_BOUND: Final = 100_000


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenMailbox]:
    monkeypatch.setattr(lanes, "LOAD_BYTES", _BOUND)
    monkeypatch.setattr(lanes, "SAVE_BYTES", _BOUND)
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        yield box


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of records each transaction held, once it had loaded."""
    held: list[int] = []
    load = Lane._load

    async def noted(lane: Lane, work: Working, mode: int, wanted: Any) -> int | None:
        due = await load(lane, work, mode, wanted)
        tasks = [record for record in work.were.values() if isinstance(record, TaskRecord)]
        held.append(_BYTES * sum(bool(record.task.content) for record in tasks))
        return due

    monkeypatch.setattr(Lane, "_load", noted)
    return held


def large(number: int, kind: str | None = None) -> Task:
    return Task(id=uid(number), recipient=BOB, intent_text="x", content=(Text("x" * _BYTES),), task_kind=kind)


async def saved(box: OpenMailbox) -> list[int]:
    """The bytes of lines that each transaction has saved."""
    engine: Any = box._engine
    return [row["size"] for row in await engine._reader.fetch("select octet_length(lines) as size from log")]


async def test_many_large_sends_at_once_are_parted_into_transactions(box: OpenMailbox) -> None:
    sent = await soon(asyncio.gather(*(box.of(ALICE).send_task(large(number)) for number in range(40))))
    assert [one.task_id for one in sent] == [uid(number) for number in range(40)]
    assert max(await saved(box)) <= _BOUND + 2 * _BYTES
    assert len(await saved(box)) < 40


async def test_a_receive_of_large_tasks_loads_them_in_portions(box: OpenMailbox, held: list[int]) -> None:
    for number in range(0, 40, 4):
        await box.of(ALICE).send_tasks([large(n) for n in range(number, number + 4)])
    bob = box.of(BOB)
    taken = []
    while more := await soon(bob.recv_tasks(1000, wait_ms=0)):
        assert len(more) < 10
        taken += more
    assert [delivery.task.id for delivery in taken] == [uid(number) for number in range(40)]
    assert max(held) <= _BOUND + 2 * _BYTES


async def test_receivers_at_the_same_time_miss_nothing_that_there_was_no_room_for(
    box: OpenMailbox, held: list[int]
) -> None:
    await box.of(ALICE).send_tasks([large(number) for number in range(30)])
    bob = box.of(BOB)
    taken = await soon(asyncio.gather(*(bob.recv_tasks(1, wait_ms=0) for _ in range(30))))
    assert [[delivery.task.id for delivery in one] for one in taken] == [[uid(number)] for number in range(30)]
    assert max(held) <= _BOUND + 2 * _BYTES


@asynccontextmanager
async def one_looks_while_another_saves(
    monkeypatch: pytest.MonkeyPatch, engine: Any, beside: Any, taking: Any, looking: Any
) -> AsyncIterator[tuple[asyncio.Task[Any], asyncio.Task[Any]]]:
    """Who takes has locked what it found; who looks then finds nothing, and waits. Both must end before a slow look."""
    has_locked, may_save, has_looked = asyncio.Event(), asyncio.Event(), asyncio.Event()
    save, committed = Lane._save, beside.committed

    async def held_up(lane: Lane, *args: Any) -> None:
        if lane is engine._lanes[0]:
            has_locked.set()
            await may_save.wait()
        await save(lane, *args)

    def noted(*args: Any) -> None:
        committed(*args)
        has_looked.set()

    monkeypatch.setattr(Lane, "_save", held_up)
    beside.committed = noted
    first = asyncio.create_task(taking)
    await soon(has_locked.wait())
    second = asyncio.create_task(looking)
    await soon(has_looked.wait())
    assert not second.done()
    may_save.set()
    async with asyncio.timeout(POLL_S / 2):
        yield first, second


async def test_who_looks_while_more_is_locked_than_there_was_room_for_is_told_of_it(
    box: OpenMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = box._engine
    await box.of(ALICE).send_tasks([large(number) for number in range(10)])
    async with Mailbox.open(f"{engine.where.dsn}&schema={engine.where.schema}&lanes=1") as other:
        beside: Any = other._engine
        async with one_looks_while_another_saves(
            monkeypatch, engine, beside, box.of(BOB).recv_tasks(1000), other.of(BOB).recv_tasks(1000)
        ) as (first, second):
            taken = [*await first, *await second]
        assert [delivery.task.id for delivery in taken] == [uid(number) for number in range(len(taken))]


@pytest.mark.parametrize("what", ["tasks", "results"])
async def test_who_looks_while_more_is_locked_than_an_answer_carries_is_told_of_it(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{store_url()}&lanes=1"
    limits = Limits(page_bytes_max=_BOUND)
    async with Mailbox.open(url, limits=limits) as box, Mailbox.open(url, limits=limits) as other:
        engine: Any = box._engine
        beside: Any = other._engine
        await box.of(ALICE).send_tasks([large(number) for number in range(8)])
        if what == "results":
            while taken := await box.of(BOB).recv_tasks(10, wait_ms=0):
                for delivery in taken:
                    await box.of(BOB).send_result(Result.ok(delivery, (Text("y" * _BYTES),)))

        def take(of: OpenMailbox) -> Any:
            return of.of(BOB).recv_tasks(100) if what == "tasks" else of.of(ALICE).recv_results(100)

        async with one_looks_while_another_saves(monkeypatch, engine, beside, take(box), take(other)) as (
            first,
            second,
        ):
            assert len(await first) + len(await second) == 8


async def test_who_looks_while_a_task_is_locked_by_who_does_not_take_it_is_told_of_it(
    box: OpenMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = box._engine
    await box.of(ALICE).send_task(Task(id=uid(1), recipient=BOB, intent_text="x"))
    async with Mailbox.open(f"{engine.where.dsn}&schema={engine.where.schema}&lanes=1") as other:
        beside: Any = other._engine
        has_locked, may_go_on, has_looked = asyncio.Event(), asyncio.Event(), asyncio.Event()
        load, committed = Lane._load, beside.committed

        async def held_up(lane: Lane, *args: Any) -> Any:
            due = await load(lane, *args)
            if lane is engine._lanes[0]:
                has_locked.set()
                await may_go_on.wait()
            return due

        def noted(*args: Any) -> None:
            committed(*args)
            has_looked.set()

        monkeypatch.setattr(Lane, "_load", held_up)
        beside.committed = noted
        refused = asyncio.create_task(box.of("eve@lab").cancel_task(uid(1)))
        await soon(has_locked.wait())
        waiting = asyncio.create_task(other.of(BOB).recv_task())
        await soon(has_looked.wait())
        may_go_on.set()
        with pytest.raises(UnknownTask):
            await soon(refused)
        async with asyncio.timeout(POLL_S / 2):
            assert (await waiting).task.id == uid(1)


async def test_results_of_large_tasks_at_the_same_time_all_find_their_task(box: OpenMailbox, held: list[int]) -> None:
    await box.of(ALICE).send_tasks([large(number) for number in range(30)])
    bob = box.of(BOB)
    taken = await soon(asyncio.gather(*(bob.recv_tasks(1, wait_ms=0) for _ in range(30))))
    posted = await soon(asyncio.gather(*(bob.send_result(Result.ok(one[0], DONE)) for one in reversed(taken))))
    assert [reply.duplicate for reply in posted] == [False] * 30
    drained = [result.task_id for result in await soon(box.of(ALICE).recv_results(1000, wait_ms=0))]
    while len(drained) < 30:
        drained += [result.task_id for result in await soon(box.of(ALICE).recv_results(1000, wait_ms=0))]
    assert sorted(drained) == [uid(number) for number in range(30)]
    assert max(held) <= _BOUND + 2 * _BYTES


@pytest.mark.parametrize("is_timer", [True, False], ids=["timer", "command"])
async def test_many_large_tasks_whose_deadline_passes_at_once_are_loaded_in_portions(
    is_timer: bool, monkeypatch: pytest.MonkeyPatch, held: list[int]
) -> None:
    monkeypatch.setattr(lanes, "LOAD_BYTES", _BOUND)
    clock = ManualClock()
    async with Mailbox.open(f"{store_url()}&lanes=1", clock=clock) as box:
        alice = box.of(ALICE)
        for number in range(60):
            await alice.send_task(structs.replace(large(number), deadline_ms=clock.now_ms() + 1000))
        held.clear()
        if is_timer:
            clock.advance(2000)
            await until(lambda: not engine_of(box).replies.under_way)
        else:
            clock._now_ms += 2000  # and nobody is woken
            with pytest.raises(TaskTerminal):  # all that is due comes before it, portion by portion
                await soon(alice.cancel_task(uid(59)))
        assert max(held) <= _BOUND + 2 * _BYTES
        ended: list[str] = []
        while len(ended) < 60:
            ended += [answer.task_id for answer in await soon(alice.recv_results(100))]
        assert sorted(ended) == [uid(number) for number in range(60)]


async def test_a_receive_of_some_kinds_locks_what_it_takes_and_nothing_else(
    box: OpenMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    quote = '"task_kind":"wanted"'
    tasks = [Task(id=uid(n), recipient=BOB, intent_text=quote, task_kind="other") for n in range(50)]
    tasks += [Task(id=uid(n), recipient=BOB, intent_text="x", task_kind="wanted") for n in range(50, 53)]
    await alice.send_tasks(tasks)
    loaded: set[str] = set()
    take_in = Working.take_in

    def noted(work: Working, key: str, kind: bytes, body: bytes) -> None:
        loaded.add(key)
        take_in(work, key, kind, body)

    monkeypatch.setattr(Working, "take_in", noted)
    taken = await soon(bob.recv_tasks(2, wait_ms=0, kinds={"wanted"}))
    assert [delivery.task.id for delivery in taken] == [uid(50), uid(51)]
    assert loaded == {uid(50), uid(51)}
    taken = await soon(asyncio.gather(*(bob.recv_tasks(1, wait_ms=0, kinds={"wanted"}) for _ in range(2))))
    assert [[delivery.task.id for delivery in one] for one in taken] == [[uid(52)], []]
    assert loaded == {uid(50), uid(51), uid(52)}
    assert not await soon(bob.recv_tasks(1, wait_ms=0, kinds={"nothing"}))
    assert len(await soon(bob.recv_tasks(100, wait_ms=0, kinds={"", "other"}))) == 50


@pytest.mark.parametrize("is_for_all", [False, True], ids=["his", "anybodys"])
@pytest.mark.parametrize("kinds", [None, {"a"}, {"a", "b"}], ids=["all", "one", "two"])
async def test_what_others_have_locked_does_not_hide_what_stands_behind_it(
    box: OpenMailbox, kinds: set[str] | None, is_for_all: bool
) -> None:
    tasks = [Task(id=uid(n), recipient=BOB, intent_text="x", task_kind="ab"[n % 2]) for n in range(400)]
    await box.of(ALICE).send_tasks(tasks)
    engine: Any = box._engine
    async with borrowed(engine.where) as other, other.transaction():
        await other.execute("select from record where key = any($1) for update", [uid(n) for n in range(300)])
        receiver = box if is_for_all else box.of(BOB)
        taken = await soon(receiver.recv_tasks(2, wait_ms=0, kinds=kinds))
        expected = (300, 302) if kinds == {"a"} else (300, 301)
        assert [delivery.task.id for delivery in taken] == [uid(n) for n in expected]


@pytest.mark.parametrize("name", [BOB.pubkey, "*"], ids=["his", "anybodys"])
@pytest.mark.parametrize("kinds", ['["a"]', '["a","b"]'], ids=["one", "two"])
async def test_work_of_other_kinds_is_not_read_to_find_that_of_one(box: OpenMailbox, kinds: str, name: str) -> None:
    """Whatever the statistics say of kinds that are seldom there."""
    for _ in range(3):
        await box.of(ALICE).send_tasks([Task(recipient=BOB, intent_text="x", task_kind="other") for _ in range(1000)])
    engine: Any = box._engine
    async with borrowed(engine.where) as other:
        await other.execute("analyze place")
        async with other.transaction():
            sql = "select what from load(0, $1, '{}', '{}', '{}', '{}', '{}', '{0}', '{R}', $2, '{1}', $3, 100000)"
            found = await other.fetch(sql, engine.space, [name], [kinds])
            assert not [row for row in found if row["what"] >= 0]
            read = "select idx_tup_fetch from pg_stat_xact_user_tables where relid = 'place'::regclass"
            assert await other.fetchval(read) < 10


async def test_what_looks_like_the_kind_in_what_a_task_carries_is_not_taken_for_it(box: OpenMailbox) -> None:
    alice, bob = box.of(ALICE), box.of(BOB)
    decoys = [
        Task(recipient=BOB, intent_text="x", content=(Json({"task_kind": "a"}),), task_kind="b") for _ in range(5)
    ]
    await alice.send_tasks([*decoys, Task(id=uid(1), recipient=BOB, intent_text="x", task_kind="a")])
    taken = await soon(bob.recv_tasks(1, wait_ms=0, kinds={"a"}))
    assert [delivery.task.id for delivery in taken] == [uid(1)]


async def test_listings_for_many_at_once_hold_no_more_than_a_batch_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "READ_BYTES", _BOUND)
    monkeypatch.setattr(readers, "AT_ONCE_BYTES", 2 * _BOUND)
    held: list[int] = []
    take_in = readers.Reader._take_in

    def noted(reader: readers.Reader, *args: Any) -> None:
        take_in(reader, *args)
        held.append(reader._held)

    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        peers = [box.of(f"peer{number}@lab") for number in range(12)]
        for at, peer in enumerate(peers):
            await peer.send_tasks([large(6 * at + number) for number in range(6)])
        monkeypatch.setattr(readers.Reader, "_take_in", noted)
        pages = await soon(asyncio.gather(*(peer.task_queue(1000) for peer in peers)))
    shown = [[entry.task.id for entry in page.tasks] for page in pages]
    assert shown == [[uid(6 * at + number) for number in range(6)] for at in range(12)]
    assert max(held) <= 2 * _BOUND + _BOUND + _BYTES


@pytest.mark.parametrize("ask", ["queue", "recent", "pending", "tree"])
async def test_a_listing_of_large_tasks_loads_as_many_as_an_answer_carries(
    ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "READ_BYTES", _BOUND)
    async with Mailbox.open(f"{store_url()}&lanes=1", limits=Limits(page_bytes_max=2 * _BOUND)) as box:
        alice, bob = box.of(ALICE), box.of(BOB)
        await alice.send_task(Task(id=uid(99), recipient=BOB, intent_text="x"))
        for number in range(0, 40, 4):
            children = [large(n) for n in range(number, number + 4)]
            await alice.send_tasks([structs.replace(task, parent=uid(99)) for task in children])
        if ask == "pending":
            for delivery in await bob.recv_tasks(50, wait_ms=0):
                await bob.send_result(Result.ok(delivery, (Text("y" * _BYTES),)))
        loaded: list[int] = []
        take_in = Working.take_in

        def noted(work: Working, key: str, kind: bytes, body: bytes) -> None:
            loaded.append(len(body))
            take_in(work, key, kind, body)

        monkeypatch.setattr(Working, "take_in", noted)
        if ask == "queue":
            shown = [entry.task.id for entry in (await soon(alice.task_queue(1000))).tasks]
            assert shown == [uid(99), *(uid(number) for number in range(len(shown) - 1))]
        elif ask == "recent":
            shown = [task.id for task in await soon(alice.recent_tasks(1000))]
            assert shown == [uid(39 - number) for number in range(len(shown))]
        elif ask == "pending":
            page = await soon(alice.task_queue(1000, state="result_pending"))
            shown = [answer.result.task_id for answer in page.results]
            assert page.cursor is not None
        else:
            tree = await soon(alice.task_tree(uid(99)))
            shown = [node.id for node in tree.root.children]
            assert tree.truncated
        assert 8 <= len(shown) < 12
        assert sum(loaded) <= 2 * (3 * _BOUND + 2 * _BYTES)  # a finished task has its result beside it


@pytest.fixture
async def narrow(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenMailbox]:
    """Sixty large tasks of which one is like no other, and a reader that holds a few of them at once."""
    monkeypatch.setattr(readers, "READ_BYTES", _BOUND)
    monkeypatch.setattr(readers, "AT_ONCE_BYTES", 2 * _BOUND)
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        deadline_ms = 2**50
        for number in range(60):
            task = large(number)
            task = structs.replace(task, deadline_ms=deadline_ms if number == 50 else None)
            await box.of(ALICE).send_task(task)
        yield box


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch, narrow: OpenMailbox) -> list[int]:
    """The bytes that the reader held at the end of each look."""
    seen: list[int] = []
    take_in = readers.Reader._take_in

    def noted(reader: readers.Reader, *args: Any) -> None:
        take_in(reader, *args)
        seen.append(reader._held)

    monkeypatch.setattr(readers.Reader, "_take_in", noted)
    return seen


async def test_large_tasks_that_moved_while_they_were_listed_are_held_few_at_once(
    narrow: OpenMailbox, pages: list[int]
) -> None:
    """A page of those ends early with a cursor, too; none is missed."""
    engine = engine_of(narrow)
    for number in range(100, 140):
        task = structs.replace(large(number), content=(), message=message("x" * _BYTES), task_kind="dialog")
        await engine.run(c.SendTask(ALICE, task, True, True))

    async def ask(cursor: str | None) -> Any:
        return await soon(engine.ask(q.ListDialogs(ALICE, BOB.pubkey, 100, cursor, history=0)))

    page = await ask(None)
    seen = {task.id for task in page.tasks}
    command = c.LeaseTasks(BOB, BOB, "one", 40, frozenset(("dialog",)))
    while await engine.run(command):  # all of them move
        pass
    pages.clear()
    for _ in range(40):
        if page.cursor is None:
            break
        page = await ask(page.cursor)
        seen |= {task.id for task in page.tasks}
    assert page.cursor is None
    assert seen == {uid(number) for number in range(100, 140)}
    assert max(pages) <= 2 * _BOUND + _BOUND + _BYTES


async def test_a_way_of_large_entries_is_held_in_parts(narrow: OpenMailbox, pages: list[int]) -> None:
    """Also by who sees none of them: the sender sees what was said."""
    alice, bob = narrow.of(ALICE), narrow.of(BOB)
    task_id = (await take(bob)).task.id
    delivery = await narrow.get_task(task_id)
    lease = str(delivery.lease_id)
    entries = [EntryDraft(uid(200 + n), EntryRole.SYSTEM, Raw(b'"%b"' % (b"x" * _BYTES)), parent=n) for n in range(60)]
    await bob.commit_run(lease, RunCommit(number=1, entries=tuple(entries), leaf=60))
    narrow_limits = Limits(page_bytes_max=_BOUND)
    engine_of(narrow).context.limits = narrow_limits
    for who, shown in ((bob, 60), (alice, 0)):
        pages.clear()
        found, before, count = 0, None, 0
        while count == 0 or before is not None:
            page = await soon(who.run_entries(task_id, 1000, before=before))
            found, before, count = found + len(page.entries), page.before, count + 1
        assert found == shown
        assert max(pages) <= 8 * _BOUND + 16 * _BYTES + _BOUND


@pytest.mark.parametrize("by", ["operator", "peer"])
@pytest.mark.parametrize("ask", ["deadline", "state", "lease age", "leases"])
async def test_a_filter_that_passes_few_of_many_large_tasks_holds_few_of_them_at_once(
    ask: str, by: str, narrow: OpenMailbox, pages: list[int]
) -> None:
    """A page ends early with a cursor, as behind `scan_max` tasks, and the next one goes on there."""
    box = narrow if by == "operator" else narrow.of(BOB)
    filters: dict[str, Any] = {"deadline_within_ms": 2**50}
    if ask != "deadline":
        for delivery in [await take(narrow.of(BOB)) for _ in range(51)][:50]:
            if ask == "state":
                await narrow.of(BOB).send_result(Result.ok(delivery, DONE))
        filters = {"state": "in_flight"} if ask == "state" else {"deadline_within_ms": 2**50, "min_lease_age_ms": 0}
        if ask == "leases":
            filters["state"] = "in_flight"
    found, cursor, count = [], None, 0
    while True:
        page = await soon(box.task_queue(100, cursor=cursor, **filters))
        assert not page.results or by == "operator"
        found += [entry.task.id for entry in page.tasks]
        count, cursor = count + 1, page.cursor
        if cursor is None:
            break
    assert found == [uid(50)]
    assert max(pages) <= 2 * _BOUND + _BOUND + 2 * _BYTES
    assert count > 3 or ask == "state"


async def test_a_look_for_the_newest_results_ends_where_it_would_hold_too_much(
    narrow: OpenMailbox, pages: list[int]
) -> None:
    """As it does behind `scan_max` tasks."""
    await narrow.of(BOB).send_result(Result.ok(await take(narrow.of(BOB)), DONE))
    assert await soon(narrow.of(ALICE).recent_results(10)) == []
    assert max(pages) <= 2 * _BOUND + _BOUND + 2 * _BYTES


async def test_a_listing_of_runs_goes_past_many_large_tasks_in_pages(narrow: OpenMailbox, pages: list[int]) -> None:
    engine: Any = narrow._engine
    cursor, count = None, 0
    while True:
        page = await soon(engine.ask(q.ListRuns(None, 100, None, cursor)))
        assert page.runs == []
        count, cursor = count + 1, page.cursor
        if cursor is None:
            break
    assert count > 3
    assert max(pages) <= 2 * _BOUND + _BOUND + 2 * _BYTES


async def test_a_listing_of_the_protocol_goes_past_many_large_tasks_in_pages(
    narrow: OpenMailbox, pages: list[int]
) -> None:
    engine: Any = narrow._engine
    dan = AgentId.named("dan@lab")
    for number in range(100, 160):
        task = structs.replace(large(number), recipient=dan, message=message())
        await engine.run(c.SendTask(ALICE, task, True, True))
    for _ in range(59):
        await take(narrow.of(dan))
    pages.clear()
    found, cursor, count = [], None, 0
    while True:
        page = await soon(engine.ask(q.ListDialogs(ALICE, dan.pubkey, 50, cursor, state=State.SUBMITTED)))
        found += [task.id for task in page.tasks]
        count, cursor = count + 1, page.cursor
        if cursor is None:
            break
    assert found == [uid(159)] and count > 3
    assert max(pages) <= 2 * _BOUND + _BOUND + 2 * _BYTES


async def test_leases_of_others_that_look_like_ones_own_do_not_end_a_listing(
    narrow: OpenMailbox, pages: list[int]
) -> None:
    eve = AgentId.named("eve@lab")
    decoy = (Json({"sender": eve.pubkey, "x": "x" * _BYTES}),)
    mallory = narrow.of("mallory@lab")
    for _ in range(60):
        await narrow.of(ALICE).send_task(Task(recipient=mallory.agent, intent_text="x", content=decoy))
    await mallory.recv_tasks(60, wait_ms=0)
    own = await narrow.of(eve).send_task(Task(recipient=BOB, intent_text="x"))
    while (await take(narrow.of(BOB))).task.id != own.task_id:
        pass
    page = await soon(narrow.of(eve).task_queue(100, state="in_flight"))
    assert [entry.task.id for entry in page.tasks] == [own.task_id] and page.cursor is None


async def test_a_commit_may_have_more_events_than_a_block_of_numbers(box: OpenMailbox) -> None:
    engine: Any = box._engine
    action = "a2a.send.bob@lab"
    grants = tuple(Grant(Capability(uid(number), ALICE, action, BOB, 1), "") for number in range(2 * BLOCK))
    await box.of(ALICE).send_task(large(0))
    await soon(engine.run(c.EnrollPeer(None, ALICE, Role.PEER, "token", grants)))
    await box.of(ALICE).send_task(large(1))
    everything = await engine.log(0, 100)
    assert [len(logged.events) for logged in everything] == [1, 1 + len(grants), 1]
    enrolled = everything[1]
    assert enrolled.last - enrolled.seq == len(grants)
    for within in (enrolled.seq, enrolled.seq + BLOCK + 5, enrolled.last - 1):
        assert [logged.seq for logged in await engine.log(within, 100)] == [enrolled.seq, everything[2].seq]
    assert [logged.seq for logged in await engine.log(enrolled.last, 100)] == [everything[2].seq]


async def test_numbers_that_others_draw_between_two_blocks_are_passed_over(box: OpenMailbox) -> None:
    engine: Any = box._engine
    lane = engine._lanes[0]
    work = Working(engine.trust, engine.depths.of)

    class Crowded:
        """Somebody else draws a number before the second block, once."""

        numbers = iter((4096, 12288, 16384, 20480))

        async def fetch(self, sql: str, count: int) -> list[dict[str, int]]:
            return [{"number": next(self.numbers)} for _ in range(count)]

    connection, lane._connection = lane._connection, Crowded()
    try:
        await lane._draw(work, 2 * BLOCK)
    finally:
        lane._connection = connection
    assert (work.order, lane._block_end) == (12288, 20480 + BLOCK)
