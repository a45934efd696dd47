"""Receipts: a receive whose answer may have been lost is asked again, or given back."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant import AgentId, Delivery, Limits, Mailbox, Result, TaskState, Text
from covenant.exchange import receipts
from covenant.exchange.history import story
from covenant.model.command import BeatLease, Command, DrainResults, LeaseTasks
from covenant.model.error import StoreUnavailable, UnknownLease
from covenant.model.peer import Caller
from covenant.store.clock import ManualClock
from tests.conformance.support import plain, refused, uid
from tests.daemons import NAMES, WORKING
from tests.exchange import Site, site
from tests.until import until


class House:
    """A daemon without surfaces, and its peers as they come through the door."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.exchange = site.exchange
        self.callers: dict[str, Caller] = {}

    async def enroll(self) -> None:
        for name in NAMES:
            key = AgentId.named(name).pubkey
            _, token = await self.exchange.enroll(self.site.operator, name, key, WORKING)
            self.callers[name] = self.exchange.authenticate(token)

    async def send(self, to: Mailbox, number: int, **more: Any) -> str:
        sent = await self.site.alice.send_task(plain(to, id=uid(number), **more))
        return sent.task_id

    async def lease(self, who: str, receipt: str, limit: int = 1) -> list[Delivery]:
        caller = self.callers[who]
        return await self.exchange.take(caller, self.exchange.lease(caller, None, None, limit), 0, receipt)

    async def give_back(self, who: str, receipt: str) -> int:
        return await self.exchange.give_back(self.callers[who], receipt)


@pytest.fixture
async def house(clock: ManualClock) -> AsyncIterator[House]:
    async with site(clock) as there:
        house = House(there)
        await house.enroll()
        yield house


# --- giving back -------------------------------------------------------------------------------------------


async def test_a_lease_that_nobody_heard_of_is_as_if_it_had_not_been(house: House) -> None:
    bob = house.site.bob
    task_id = await house.send(bob, 1)
    (first,) = await house.lease("bob@lab", "r")
    assert await house.give_back("bob@lab", "r") == 1
    entry = await house.site.box.get_task(task_id)
    assert (entry.state, entry.attempt) == (TaskState.QUEUED, 0)
    with pytest.raises(UnknownLease):
        await bob.heartbeat(first.lease_id)
    (second,) = await house.lease("bob@lab", "s")
    assert (second.attempt, second.generation) == (1, first.generation + 2)


@pytest.mark.parametrize("sign", ["heartbeat", "partial"])
async def test_a_lease_that_its_holder_acted_under_is_released_and_not_undone(house: House, sign: str) -> None:
    """Contract 2, 4: the next holder has another attempt, and its progress numbers of its own."""
    bob = house.site.bob
    task_id = await house.send(bob, 1)
    (first,) = await house.lease("bob@lab", "r")
    if sign == "heartbeat":
        await house.exchange.run(house.callers["bob@lab"], BeatLease(bob.agent, first.lease_id))
    else:
        await bob.send_result(Result.partial(first, [Text("half")]))
    before = await house.site.box.get_task(task_id)

    assert await house.give_back("bob@lab", "r") == 1
    entry = await house.site.box.get_task(task_id)
    assert (entry.state, entry.attempt, entry.generation) == (TaskState.QUEUED, 1, before.generation + 1)
    with refused("lease_superseded"):
        await bob.send_result(Result.ok(first))
    (second,) = await house.lease("bob@lab", "s")
    assert second.attempt == 2
    assert (await bob.send_result(Result.partial(second, [Text("half")]))).sequence == 1
    assert [row.reason for row in await house.site.rows("requeued")] == ["given back"]


async def test_a_lease_that_was_acted_under_ends_when_a_cancel_was_asked_for(house: House) -> None:
    bob = house.site.bob
    task_id = await house.send(bob, 1)
    (first,) = await house.lease("bob@lab", "r")
    await bob.heartbeat(first)
    await house.site.alice.cancel_task(task_id, graceful=True)
    await house.give_back("bob@lab", "r")
    assert (await house.site.box.get_task(task_id)).outcome == "canceled"


async def test_a_result_that_is_given_back_waits_where_it_waited(house: House) -> None:
    """Contract 4, 8: before those that came after it; and its story tells that it was given back."""
    alice = house.callers["alice@lab"]

    async def drain(receipt: str | None) -> list[str]:
        answers = await house.exchange.take(alice, DrainResults(alice.agent, alice.agent), 0, receipt)
        return [answer.task_id for answer in answers]

    for number in (1, 2, 3):
        await house.send(house.site.bob, number)
        (delivery,) = await house.lease("bob@lab", f"{number}")
        await house.site.bob.send_result(Result.ok(delivery, [Text("done")]))
    assert await drain("first") == [uid(1)]
    assert await drain("second") == [uid(2)]
    assert await house.give_back("alice@lab", "second") == 1
    assert await house.give_back("alice@lab", "first") == 1
    assert [await drain(None) for _ in range(4)] == [[uid(1)], [uid(2)], [uid(3)], []]
    _, rows, is_whole = await story(house.exchange, house.site.operator, uid(1))
    told = [row.kind for row in rows if row.kind != "capability_check"]
    assert told == ["sent", "leased", "answered", "drained", "undrained", "drained"]
    assert is_whole


# --- who it was --------------------------------------------------------------------------------------------


async def test_what_is_given_back_is_written_down_as_its_receivers_deed(house: House) -> None:
    task_id = await house.send(house.site.bob, 1)
    await house.lease("bob@lab", "r")
    await house.give_back("bob@lab", "r")
    (leased,) = await house.lease("bob@lab", "s")
    await house.site.bob.heartbeat(leased)
    await house.give_back("bob@lab", "s")
    rows = [row for row in await house.site.box.recent_audit(100) if row.task_id == task_id and row.kind != "sent"]
    assert [(row.kind, row.actor) for row in rows] == [
        ("leased", "bob@lab"),
        ("unleased", "bob@lab"),
        ("leased", "bob@lab"),
        ("requeued", "bob@lab"),
    ]


async def test_what_the_operator_gives_back_is_the_operators_deed(house: House) -> None:
    operator = house.site.operator
    await house.send(house.site.bob, 1)
    await house.exchange.take(operator, house.exchange.lease(operator, None, None), 0, "r")
    await house.exchange.give_back(operator, "r")
    assert [row.actor for row in await house.site.rows("unleased")] == ["operator"]


@pytest.mark.parametrize("wait_ms", [0, 20_000])
async def test_what_is_undone_for_a_receiver_that_went_away_is_its_deed(
    clock: ManualClock, folder: Path, wait_ms: int
) -> None:
    """At whatever moment it goes."""
    async with site(clock, f"file:{folder}", limits=Limits(inline_sync_us_max=0)) as there:
        house = House(there)
        await house.enroll()
        await house.send(there.bob, 1)
        bob = house.callers["bob@lab"]
        for turns in range(1, 8):
            receive = house.exchange.take(bob, house.exchange.lease(bob, None, None), wait_ms)
            receiving = asyncio.create_task(receive)
            for _ in range(turns):
                await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.wait([receiving])
            if not receiving.cancelled():
                break
        rows = await there.rows("unleased")
        assert rows and {row.actor for row in rows} == {"bob@lab"}


# --- how much is kept --------------------------------------------------------------------------------------


async def test_the_same_receive_again_gets_the_same_answer(house: House) -> None:
    for number in (1, 2):
        await house.send(house.site.bob, number)
    first = await house.lease("bob@lab", "r")
    assert await house.lease("bob@lab", "r") == first
    assert (await house.lease("bob@lab", "s"))[0].task.id == uid(2)


async def test_receipts_of_one_peer_do_not_push_out_those_of_another(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "PEER_BYTES_MAX", 10 * receipts.SLOT_BYTES)
    monkeypatch.setattr(receipts, "BYTES_MAX", 15 * receipts.SLOT_BYTES)
    await house.send(house.site.bob, 1)
    first = await house.lease("bob@lab", "r")
    for number in range(100):
        await house.give_back("alice@lab", str(number))
        await house.give_back("carol@lab", str(number))
    assert house.exchange._receipts.bytes <= 15 * receipts.SLOT_BYTES
    assert await house.lease("bob@lab", "r") == first


async def test_the_oldest_receipts_of_a_peer_make_room_for_its_new_ones(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "PEER_BYTES_MAX", 5 * receipts.SLOT_BYTES)
    for number in range(4):
        await house.send(house.site.bob, number, content=[Text("x" * receipts.SLOT_BYTES)])
        await house.lease("bob@lab", f"r{number}")
    assert house.exchange._receipts.bytes <= 5 * receipts.SLOT_BYTES
    assert [await house.give_back("bob@lab", f"r{number}") for number in (0, 3)] == [0, 1]


async def test_an_answer_too_large_to_keep_can_still_be_given_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "PEER_BYTES_MAX", 5 * receipts.SLOT_BYTES)
    task_id = await house.send(house.site.bob, 1, content=[Text("x" * 10 * receipts.SLOT_BYTES)])
    await house.lease("bob@lab", "r")
    assert house.exchange._receipts.bytes == receipts.SLOT_BYTES
    with refused("too_large"):
        await house.lease("bob@lab", "r")
    assert await house.give_back("bob@lab", "r") == 1
    assert (await house.site.box.get_task(task_id)).state is TaskState.QUEUED


async def test_a_receipt_is_worth_nothing_after_its_time(house: House, clock: ManualClock) -> None:
    """Also when nothing came after it that would have taken its place."""
    for number in (1, 2):
        await house.send(house.site.bob, number)
    (first,) = await house.lease("bob@lab", "r")
    clock.advance(receipts.KEPT_MS)
    assert await house.lease("bob@lab", "r") == [first]
    clock.advance(1)
    assert (await house.lease("bob@lab", "r"))[0].task.id == uid(2)
    clock.advance(receipts.KEPT_MS + 1)
    assert await house.give_back("bob@lab", "r") == 0
    assert (await house.site.box.get_task(uid(2))).state is TaskState.IN_FLIGHT


async def test_what_is_past_its_time_costs_nothing_any_more(house: House, clock: ManualClock) -> None:
    for number in range(10):
        await house.send(house.site.bob, number)
        await house.lease("bob@lab", str(number))
    clock.advance(receipts.KEPT_MS + 1)
    await house.give_back("carol@lab", "none")
    assert house.exchange._receipts.bytes == receipts.SLOT_BYTES


# --- a store that is away ----------------------------------------------------------------------------------


async def test_what_could_not_be_given_back_is_given_back_when_it_is_said_again(
    tmp_path: Path, clock: ManualClock
) -> None:
    """Else the second answer would say that there was nothing to give back, and the lease would be nobody's."""
    async with site(clock, f"file:{tmp_path}/data") as there:
        house = House(there)
        await house.enroll()
        task_id = await house.send(there.bob, 1)
        await house.lease("bob@lab", "r")
        store: Any = there.exchange.store
        store._fail(OSError(errno.EIO, "it is gone"))
        with refused("store_unavailable"):
            await house.give_back("bob@lab", "r")
        clock.advance(store.limits.reopen_delay_ms)
        await until(lambda: store.is_up)
        assert await house.give_back("bob@lab", "r") == 1
        assert (await there.box.get_task(task_id)).state == TaskState.QUEUED
        assert await house.give_back("bob@lab", "r") == 0


@pytest.mark.usefixtures("short_waits")
async def test_what_was_not_given_back_yet_when_its_caller_went_away_is_given_back_when_it_is_said_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = await house.send(house.site.bob, 1)
    await house.lease("bob@lab", "r")
    begun = asyncio.Event()

    async def hang(command: Command) -> None:
        begun.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as slow:
        slow.setattr(house.exchange.store, "run", hang)
        giving = asyncio.ensure_future(house.give_back("bob@lab", "r"))
        await begun.wait()
        giving.cancel()
        await asyncio.wait([giving])
    assert await house.give_back("bob@lab", "r") == 1
    assert (await house.site.box.get_task(task_id)).state == TaskState.QUEUED


async def test_what_was_given_back_while_its_caller_went_away_is_not_given_back_again(
    tmp_path: Path, clock: ManualClock
) -> None:
    """Another worker may have received it by then."""
    async with site(clock, f"file:{tmp_path}/data") as there:
        house = House(there)
        await house.enroll()
        await house.send(there.bob, 1)
        (delivery,) = await house.lease("bob@lab", "r")
        await there.bob.send_result(Result(delivery.task.id, "ok", lease_id=delivery.lease_id))
        alice = house.callers["alice@lab"]
        drain = DrainResults(alice.agent, alice.agent, 1)
        assert len(await house.exchange.take(alice, drain, 0, "lost")) == 1
        giving = asyncio.ensure_future(house.give_back("alice@lab", "lost"))
        await asyncio.sleep(0)  # it is decided, and not durable yet
        giving.cancel()
        await asyncio.wait([giving])
        assert len(await house.exchange.take(alice, drain, 0, "heard")) == 1
        assert await house.give_back("alice@lab", "lost") == 0
        assert await house.exchange.take(alice, drain, 0, "later") == []


async def answered(house: House) -> DrainResults:
    """A result that waits for alice; and how she receives it."""
    await house.send(house.site.bob, 1)
    (delivery,) = await house.lease("bob@lab", "r")
    await house.site.bob.send_result(Result(delivery.task.id, "ok", lease_id=delivery.lease_id))
    alice = house.site.alice.agent
    return DrainResults(alice, alice, 1)


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "not stored"])
@pytest.mark.parametrize("is_partial", [True, False], ids=["partial", "final"])
async def test_a_result_that_was_given_back_with_an_unknown_outcome_comes_once(
    house: House, monkeypatch: pytest.MonkeyPatch, is_stored: bool, is_partial: bool
) -> None:
    """Whether it was given back or not: said again, it is neither lost nor taken from who received it meanwhile."""
    site, alice = house.site, house.callers["alice@lab"]
    if is_partial:
        await house.send(site.bob, 1)
        (delivery,) = await house.lease("bob@lab", "r")
        await site.bob.send_result(Result.partial(delivery, [Text("half")]))
        drain = DrainResults(alice.agent, alice.agent, 1)
    else:
        drain = await answered(house)
    assert len(await house.exchange.take(alice, drain, 0, "lost")) == 1
    run = house.exchange.store.run

    async def run_and_lose_the_answer(command: Command) -> None:
        if is_stored:
            await run(command)
        raise StoreUnavailable("the line broke in the middle of the commit", outcome="unknown")

    with monkeypatch.context() as fault:
        fault.setattr(house.exchange.store, "run", run_and_lose_the_answer)
        with refused("store_unavailable"):
            await house.give_back("alice@lab", "lost")
    meanwhile = await house.exchange.take(alice, drain, 0, "heard")
    assert len(meanwhile) == int(is_stored)
    await house.give_back("alice@lab", "lost")
    later = await house.exchange.take(alice, drain, 0, "later")
    assert len(meanwhile) + len(later) == 1
    await house.give_back("alice@lab", "later" if later else "heard")
    assert len(await house.exchange.take(alice, drain, 0, "at last")) == 1  # as often as it is lost


@pytest.mark.parametrize("what", ["result", "task"])
async def test_what_a_receiver_that_went_away_had_taken_is_given_back_also_when_the_disk_fails_meanwhile(
    clock: ManualClock, folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The take is durable, and what undid it is not: nobody would have it, and nobody would know."""
    async with site(clock, f"file:{folder}", limits=Limits(inline_sync_us_max=0)) as there:
        house = House(there)
        await house.enroll()
        take: DrainResults | LeaseTasks
        if what == "result":
            who, take = house.callers["alice@lab"], await answered(house)
        else:
            await house.send(there.bob, 1)
            who = house.callers["bob@lab"]
            take = house.exchange.lease(who, None, None)
        store: Any = there.exchange.store
        await store.write_out()
        write, may_go_on, writes = store._writer.write, threading.Event(), []

        def write_once(batch: Any) -> None:
            writes.append(batch)
            assert may_go_on.wait(20)
            if len(writes) > 1:
                raise OSError(errno.EIO, "it is gone")
            write(batch)

        with monkeypatch.context() as fault:
            fault.setattr(store._writer, "write", write_once)
            taking = asyncio.ensure_future(house.exchange.take(who, take, 0))
            await until(lambda: len(writes) == 1)
            taking.cancel()
            may_go_on.set()
            await asyncio.wait([taking])
            await until(lambda: not store.is_up)
        clock.advance(store.limits.reopen_delay_ms)
        await until(lambda: store.is_up)
        assert len(await house.exchange.take(who, take, 0)) == 1
        assert await house.exchange.take(who, take, 0) == []
