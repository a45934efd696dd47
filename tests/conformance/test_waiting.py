"""Waiting: for work, for results, for a change; in order, and without taking what nobody gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covenant import Limits, Mailbox, OpenMailbox, Outcome, Result, Task, TaskState, Text
from covenant.model.command import GiveBack, SendTask
from covenant.store.clock import ManualClock

from .support import (
    DONE,
    answer_next,
    drain,
    finish,
    nothing_back_for,
    nothing_for,
    plain,
    refused,
    requeue,
    soon,
    take,
    turn,
    uid,
)


async def test_a_receiver_waits_for_its_task(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 2: it is woken by a task for itself, and by no other."""
    waiting = asyncio.create_task(bob.recv_task())
    await turn()
    await alice.send_task(plain(carol))
    await turn()
    assert not waiting.done()
    await alice.send_task(plain(bob, id=uid(1)))
    assert (await soon(waiting)).task.id == uid(1)


async def test_a_sender_waits_for_its_result(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 3: it is woken by a result of its own, a partial one too."""
    await carol.send_task(plain(bob, id=uid(1)))
    await alice.send_task(plain(bob, id=uid(2)))
    waiting = asyncio.create_task(alice.recv_result())
    await turn()
    await answer_next(bob)
    await turn()
    assert not waiting.done()
    await bob.send_result(Result.partial(await take(bob), [Text("half")]))
    assert (await soon(waiting)).task_id == uid(2)


async def test_tasks_of_one_recipient_come_in_order(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 2: first sent, first leased, whoever sent it."""
    for number in range(10):
        await (alice if number % 2 else carol).send_task(plain(bob, id=uid(number)))
    one_by_one = [(await take(bob)).task.id for _ in range(4)]
    at_once = [delivery.task.id for delivery in await bob.recv_tasks(100)]
    assert one_by_one + at_once == [uid(number) for number in range(10)]


async def test_the_operator_receives_for_all_in_order(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 2: the global receive is first in, first out over all recipients."""
    for number in range(6):
        await alice.send_task(plain(bob if number % 2 else carol, id=uid(number)))
    assert (await take(bob)).task.id == uid(1)
    assert [(await take(box)).task.id for _ in range(5)] == [uid(number) for number in (0, 2, 3, 4, 5)]
    assert await nothing_for(carol)


async def test_the_operator_drains_for_all_in_order(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 3: the global drain is first in, first out over all senders."""
    for number in range(4):
        await (alice if number % 2 else carol).send_task(plain(bob, id=uid(number)))
        await answer_next(bob)
    assert [(await drain(box)).task_id for _ in range(2)] == [uid(0), uid(1)]
    for_alice = await box.try_recv_result_for(alice.agent)
    assert for_alice is not None
    assert for_alice.task_id == uid(3)
    assert (await drain(carol)).task_id == uid(2)
    assert await nothing_back_for(box)
    with refused("not_permitted"):
        await carol.try_recv_result_for(alice.agent)


async def test_a_receiver_for_all_is_woken(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: by a task for anyone."""
    waiting = asyncio.create_task(box.recv_task())
    await turn()
    await alice.send_task(plain(bob, id=uid(1)))
    assert (await soon(waiting)).task.id == uid(1)
    results = asyncio.create_task(box.recv_result())
    await turn()
    await bob.send_result(Result(uid(1), "ok", DONE))
    assert (await soon(results)).task_id == uid(1)


async def test_each_of_many_receivers_gets_one(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: as many are woken as there is work, and none twice."""
    waiting = [asyncio.create_task(bob.recv_task()) for _ in range(10)]
    await turn()
    await alice.send_tasks([plain(bob, id=uid(number)) for number in range(9)])
    done, pending = await asyncio.wait(waiting, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    while len(done) < 9 and pending:
        more, pending = await asyncio.wait(pending, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert more, f"only {len(done)} were woken"
        done |= more
    assert sorted(task.result().task.id for task in done) == [uid(number) for number in range(9)]
    await alice.send_task(plain(bob, id=uid(9)))
    assert (await soon(pending.pop())).task.id == uid(9)


async def test_who_waited_longest_is_served_first(alice: Mailbox, bob: Mailbox, in_process: None) -> None:
    """Contract 2: receivers, too, stand in line. (Over a network, in the order in which they arrive.)"""
    order: list[int] = []

    async def receive(number: int) -> None:
        await bob.recv_task()
        order.append(number)

    waiting = []
    for number in range(4):
        waiting.append(asyncio.create_task(receive(number)))
        await turn()
    for count in range(4):
        await alice.send_task(plain(bob))
        await soon(waiting[count])
    assert order == [0, 1, 2, 3]


async def test_a_receive_that_gives_up_takes_nothing(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: a cancelled wait leaves no lease behind, and the next receiver gets the task."""
    waiting = asyncio.create_task(bob.recv_task())
    await turn()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await alice.send_task(plain(bob, id=uid(1)))
    assert (await alice.get_task(uid(1))).state == TaskState.QUEUED
    assert (await take(bob)).attempt == 1


async def test_a_receiver_cancelled_as_it_is_woken_passes_the_task_on(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: of two that wait, the other one is served."""
    first, second = asyncio.create_task(bob.recv_task()), asyncio.create_task(bob.recv_task())
    await turn()
    sending = asyncio.create_task(alice.send_task(plain(bob, id=uid(1))))
    await asyncio.sleep(0)
    first.cancel()
    await sending
    assert (await soon(second)).task.id == uid(1)
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_receiver_cancelled_as_it_is_woken_passes_the_task_on_to_who_receives_for_all(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """Contract 2: also when the other one does not wait under the same name."""
    mine, anyone = asyncio.create_task(bob.recv_task()), asyncio.create_task(box.recv_task())
    await turn()
    sending = asyncio.create_task(alice.send_task(plain(bob, id=uid(1))))
    await asyncio.sleep(0)
    mine.cancel()
    await sending
    assert (await soon(anyone)).task.id == uid(1)
    with pytest.raises(asyncio.CancelledError):
        await mine


async def test_a_drain_cancelled_as_it_is_woken_passes_the_result_on_to_who_drains_for_all(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """Contract 3: a result, too, wakes another in the place of who went away."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    mine, anyone = asyncio.create_task(alice.recv_result()), asyncio.create_task(box.recv_result())
    await turn()
    posting = asyncio.create_task(bob.send_result(Result.ok(delivery, DONE)))
    await asyncio.sleep(0)
    mine.cancel()
    await posting
    assert (await soon(anyone)).task_id == uid(1)
    with pytest.raises(asyncio.CancelledError):
        await mine


RECEIVES: dict[str, Any] = {
    "recv_task": lambda bob: bob.recv_task(),
    "recv_tasks": lambda bob: bob.recv_tasks(1),
    "recv_tasks at once": lambda bob: bob.recv_tasks(1, wait_ms=0),
    "try_recv_task_for": lambda bob: bob.try_recv_task_for(),
}


async def went_away(going: asyncio.Task[Any], turns: int) -> bool:
    """Cancel the call after so many turns of the loop; False if it had its answer by then."""
    for _ in range(turns):
        await asyncio.sleep(0)
    if going.done():
        assert going.result(), "it came back with empty hands"
        return False
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    return True


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("receive", RECEIVES)
async def test_a_receive_cancelled_half_way_leaves_no_lease(
    alice: Mailbox, bob: Mailbox, receive: str, turns: int
) -> None:
    """Contract 2: who goes away before the answer has taken nothing, and the queue is in its order."""
    await alice.send_tasks([plain(bob, id=uid(1)), plain(bob, id=uid(2))])
    if await went_away(asyncio.create_task(RECEIVES[receive](bob)), turns):
        assert (await alice.get_task(uid(1))).state == TaskState.QUEUED
        assert (await take(bob)).task.id == uid(1)
    assert (await take(bob)).task.id == uid(2)


DRAINS: dict[str, Any] = {
    "recv_result": lambda alice: alice.recv_result(),
    "recv_results at once": lambda alice: alice.recv_results(1, wait_ms=0),
    "try_recv_result_for": lambda alice: alice.try_recv_result_for(),
}


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("receive", DRAINS)
async def test_a_drain_cancelled_half_way_loses_no_result(
    alice: Mailbox, bob: Mailbox, receive: str, turns: int
) -> None:
    """Contract 8: who goes away before the answer finds the result where it was, in its order."""
    for number in (1, 2):
        await alice.send_task(plain(bob, id=uid(number)))
        await answer_next(bob)
    if await went_away(asyncio.create_task(DRAINS[receive](alice)), turns):
        assert (await drain(alice)).task_id == uid(1)
    assert (await drain(alice)).task_id == uid(2)


async def test_a_wait_with_an_end_returns_nothing(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: after `wait_ms` the receiver goes on with empty hands, and takes nothing later."""
    assert await bob.recv_tasks(5, wait_ms=1) == []
    assert await alice.recv_results(5, wait_ms=1) == []
    assert await bob.recv_tasks(5, wait_ms=0) == []
    await alice.send_task(plain(bob, id=uid(1)))
    assert (await alice.get_task(uid(1))).state == TaskState.QUEUED
    for wrong in (-1, 1.5, "1"):
        with refused("malformed"):
            await bob.recv_tasks(5, wait_ms=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["requeued", "released", "due"])
async def test_work_that_comes_back_wakes_a_receiver(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock, how: str
) -> None:
    """Contract 2: not only a send makes work."""
    delay = clock.now_ms() + 1000 if how == "due" else None
    await alice.send_task(plain(bob, id=uid(1), not_before_ms=delay))
    delivery = None if delay else await take(bob)
    waiting = asyncio.create_task(bob.recv_task())
    await turn()
    if delivery is None:
        clock.advance(1000)
    elif how == "requeued":
        await requeue(box, uid(1))
    else:
        await bob.release(delivery)
    assert (await soon(waiting)).task.id == uid(1)


async def test_who_waits_is_told_when_the_store_is_closed(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 1: nobody waits for a store that is gone."""
    await alice.send_task(plain(alice, id=uid(1)))
    waiting = [
        asyncio.create_task(bob.recv_task()),
        asyncio.create_task(bob.recv_result()),
        asyncio.create_task(alice.wait_generation(uid(1), 1)),
    ]
    await turn()
    await box.close()
    for one in waiting:
        with refused("store_closed"):
            await soon(one)
    with refused("store_closed"):
        await alice.send_task(plain(bob))
    with refused("store_closed"):
        await alice.recent_tasks()


@pytest.mark.parametrize("limits", [Limits(waiters_max=2)], ids=["two"])
async def test_waiters_are_bounded(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: one too many is refused; those who wait are served."""
    waiting = [asyncio.create_task(bob.recv_task()) for _ in range(2)]
    await turn()
    with refused("too_many_waiters"):
        await soon(bob.recv_task())
    await alice.send_task(plain(bob))
    assert (await soon(waiting[0])).attempt == 1
    third = asyncio.create_task(bob.recv_task())
    await turn()
    await alice.send_tasks([plain(bob), plain(bob)])
    assert {(await soon(one)).attempt for one in (waiting[1], third)} == {1}


# --- of some kinds -----------------------------------------------------------------------------------------


async def test_a_receiver_of_some_kinds_gets_those_in_their_order(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: what it cannot do stays where it is, at its first attempt; no kind is a kind, too."""
    kinds = ("dig", None, "saw", "dig", "saw", None)
    await alice.send_tasks([plain(bob, id=uid(n), task_kind=kind) for n, kind in enumerate(kinds)])
    sawn = [(await bob.recv_tasks(1, wait_ms=0, kinds=["saw", "nail"]))[0].task.id for _ in range(2)]
    assert sawn == [uid(2), uid(4)]
    assert await bob.recv_tasks(9, wait_ms=0, kinds=["saw"]) == []
    assert [taken.task.id for taken in await bob.recv_tasks(9, wait_ms=0, kinds=[""])] == [uid(1), uid(5)]
    left = await bob.recv_tasks(9, wait_ms=0)
    assert [(taken.task.id, taken.attempt) for taken in left] == [(uid(0), 1), (uid(3), 1)]


async def test_a_receiver_is_woken_by_the_kinds_that_it_waits_for(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: each goes to one who can do it, whoever waited first."""
    digging = asyncio.create_task(bob.recv_tasks(1, kinds=["dig"]))
    await turn()
    sawing = asyncio.create_task(bob.recv_tasks(1, kinds=["saw"]))
    await turn()
    await alice.send_task(plain(bob, id=uid(1), task_kind="saw"))
    assert (await soon(sawing))[0].task.id == uid(1)
    assert not digging.done()
    await alice.send_task(plain(bob, id=uid(2), task_kind="dig"))
    assert (await soon(digging))[0].task.id == uid(2)


async def test_what_another_took_instead_wakes_the_next(alice: Mailbox, bob: Mailbox, in_process: None) -> None:
    """Contract 2: nobody waits beside work of its own because one who can do both was quicker."""
    await alice.send_task(plain(bob, id=uid(1), task_kind="dig"))
    (taken,) = await bob.recv_tasks(1, wait_ms=0)
    waiting = [asyncio.create_task(bob.recv_tasks(1, kinds=kinds)) for kinds in (["dig", "saw"], ["dig"], ["saw"])]
    await turn()
    sawing = plain(bob, id=uid(2), task_kind="saw")
    await bob._engine.run_all([SendTask(alice.agent, sawing), GiveBack(None, (taken.lease_id,), ())])
    assert (await soon(waiting[0]))[0].task.id == uid(1)  # woken by the other; this one is older
    assert (await soon(waiting[2]))[0].task.id == uid(2)
    waiting[1].cancel()


async def test_a_receiver_that_goes_away_leaves_its_work_to_one_who_can_do_it(
    alice: Mailbox, bob: Mailbox, in_process: None
) -> None:
    """Contract 2: one that was woken and is gone wakes the next of the same kind."""
    waiting = [asyncio.create_task(bob.recv_tasks(1, kinds=[kind])) for kind in ("saw", "dig", "saw")]
    await turn()
    sending = asyncio.create_task(alice.send_task(plain(bob, task_kind="saw")))
    await asyncio.sleep(0)
    waiting[0].cancel()
    await sending
    assert (await soon(waiting[2]))[0].task.task_kind == "saw"
    assert not waiting[1].done()
    waiting[1].cancel()


@pytest.mark.parametrize("limits", [Limits(scan_max=4)], ids=["four"])
async def test_others_do_not_hide_what_stands_behind_them(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: who does some kinds is not held up by those that nobody does."""
    await alice.send_tasks([plain(bob, task_kind="dig" if number % 2 else None) for number in range(20)])
    await alice.send_tasks([plain(bob, id=uid(number), task_kind="saw") for number in (1, 2)])
    assert [taken.task.id for taken in await bob.recv_tasks(1, wait_ms=0, kinds=["saw"])] == [uid(1)]
    sawing = asyncio.create_task(bob.recv_tasks(1, kinds=["saw"]))
    assert (await soon(sawing))[0].task.id == uid(2)
    assert len(await bob.recv_tasks(30, wait_ms=0, kinds=["dig", ""])) == 20


async def test_kinds_are_told_apart_whatever_their_names_are(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: the oldest of all that a receiver can do comes first."""
    names = ["a", "a/b", "/", 'say "hello"', "it's", "two\nlines", "a", "\\", "*", "ä", "a\0b", "\\0"]
    await alice.send_tasks([plain(bob, id=uid(n), task_kind=kind) for n, kind in enumerate(names)])
    assert [t.task.id for t in await bob.recv_tasks(9, wait_ms=0, kinds=["a", "*", "/"])] == [
        uid(0),
        uid(2),
        uid(6),
        uid(8),
    ]
    for name in ("a/b", 'say "hello"', "it's", "two\nlines", "\\", "ä", "a\0b", "\\0"):
        assert [t.task.id for t in await bob.recv_tasks(9, wait_ms=0, kinds=[name])] == [uid(names.index(name))]
    assert await bob.recv_tasks(9, wait_ms=0) == []


async def test_the_operator_receives_some_kinds_for_all(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 2: of everybody's, and no others."""
    for number in range(6):
        await alice.send_task(
            plain(bob if number % 2 else carol, id=uid(number), task_kind="saw" if number > 2 else "dig")
        )
    assert [t.task.id for t in await box.recv_tasks(9, wait_ms=0, kinds=["saw"])] == [uid(n) for n in (3, 4, 5)]
    assert [t.task.id for t in await bob.recv_tasks(9, wait_ms=0, kinds=["dig", "saw"])] == [uid(1)]
    assert [t.task.id for t in await box.recv_tasks(9, wait_ms=0, kinds=["dig"])] == [uid(0), uid(2)]


async def test_what_was_given_back_is_found_by_its_kind_again(alice: Mailbox, bob: Mailbox) -> None:
    await alice.send_tasks([plain(bob, id=uid(n), task_kind="saw") for n in (1, 2)])
    (first,) = await bob.recv_tasks(1, wait_ms=0, kinds=["saw"])
    await bob.release(first)
    assert [t.task.id for t in await bob.recv_tasks(2, wait_ms=0, kinds=["saw"])] == [uid(2), uid(1)]
    assert await bob.recv_tasks(2, wait_ms=0, kinds=["saw"]) == []


@pytest.mark.parametrize("kinds", [[], "saw", ["x" * 1000], [7]], ids=["none", "text", "long", "number"])
async def test_kinds_are_names(bob: Mailbox, kinds: Any) -> None:
    """Contract 2: a receiver of nothing would wait for ever."""
    with refused("invalid_input"):
        await bob.recv_tasks(1, wait_ms=0, kinds=kinds)


# --- waiting for a generation -------------------------------------------------------------------------------


async def test_a_wait_for_a_generation_ends_with_the_next_event(alice: Mailbox, bob: Mailbox) -> None:
    """Generation: the task is returned once its generation is higher."""
    await alice.send_task(plain(bob, id=uid(1)))
    waiting = asyncio.create_task(alice.wait_generation(uid(1), 1))
    await turn()
    assert not waiting.done()
    delivery = await take(bob)
    entry = await soon(waiting)
    assert (entry.state, entry.generation) == (TaskState.IN_FLIGHT, 2)
    waiting = asyncio.create_task(alice.wait_generation(uid(1), 2))
    await turn()
    await bob.heartbeat(delivery)
    await turn()
    assert not waiting.done()
    await bob.send_result(Result.partial(delivery, [Text("half")]))
    assert (await soon(waiting)).generation == 3


async def test_a_wait_for_a_past_generation_returns_at_once(alice: Mailbox, bob: Mailbox) -> None:
    """Generation: there is nothing to wait for."""
    await alice.send_task(plain(bob, id=uid(1)))
    await take(bob)
    assert (await soon(alice.wait_generation(uid(1), 0))).generation == 2
    assert (await soon(alice.wait_generation(uid(1), 1))).generation == 2


async def test_a_wait_for_a_generation_ends_with_its_time(alice: Mailbox, bob: Mailbox) -> None:
    """Generation: the current task is returned when the wait ends."""
    await alice.send_task(plain(bob, id=uid(1)))
    assert (await alice.wait_generation(uid(1), 1, wait_ms=1)).generation == 1
    assert (await alice.wait_generation(uid(1), 99, wait_ms=0)).generation == 1


async def test_a_wait_on_a_finished_task_returns_at_once(alice: Mailbox, bob: Mailbox) -> None:
    """Generation: what has ended does not move any more."""
    await finish(alice, bob, plain(bob, id=uid(1)))
    entry = await soon(alice.wait_generation(uid(1), 99))
    assert (entry.outcome, entry.generation) == (Outcome.ANSWERED, 4)


async def test_many_wait_for_one_generation(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Generation: all of them are woken."""
    await alice.send_task(plain(bob, id=uid(1)))
    waiting = [asyncio.create_task(one.wait_generation(uid(1), 1)) for one in (alice, bob, box) for _ in range(5)]
    await turn()
    await take(bob)
    assert {(await soon(one)).generation for one in waiting} == {2}


async def test_a_wait_is_woken_by_an_event_that_comes_as_it_begins(alice: Mailbox, bob: Mailbox) -> None:
    """Generation: no wake-up is lost between the look and the wait."""
    await alice.send_task(plain(bob, id=uid(1)))
    for after in range(1, 20):
        busy = asyncio.create_task(alice.send_task(plain(alice)))
        waiting = asyncio.create_task(alice.wait_generation(uid(1), after))
        moving: asyncio.Task[Any]
        if after % 2:
            moving = asyncio.create_task(bob.recv_task())
        else:
            entry = await alice.get_task(uid(1))
            assert entry.lease_id is not None
            moving = asyncio.create_task(bob.release(entry.lease_id))
        assert (await soon(waiting)).generation > after
        await asyncio.gather(busy, moving)


async def test_a_wait_takes_an_id_in_capitals(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: an id has one canonical form, also for who waits."""
    await alice.send_task(plain(bob, id=uid(0xABC)))
    waiting = asyncio.create_task(alice.wait_generation(uid(0xABC).upper(), 1))
    await turn()
    await take(bob)
    assert (await soon(waiting)).generation == 2


async def test_a_wait_for_what_is_no_generation_is_refused(alice: Mailbox, bob: Mailbox) -> None:
    """Generation: a number, of a task that the caller sees."""
    await alice.send_task(plain(bob, id=uid(1)))
    for wrong in ("1", None, 1.0, True):
        with refused("malformed"):
            await alice.wait_generation(uid(1), wrong)  # type: ignore[arg-type]
    with refused("unknown_task"):
        await alice.wait_generation(uid(2), 0)


async def test_a_pipeline_and_a_fan_out_run_to_their_end(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 1: many tasks through two workers that pass them on, each answered once and none lost."""

    async def pass_on(count: int) -> None:
        for _ in range(count):
            delivery = await bob.recv_task()
            child = Task(recipient=carol.agent, intent_text="part", parent=delivery.task.id)
            await bob.send_task(child)
            answer = await bob.recv_result()
            await bob.send_result(Result.ok(delivery, answer.content))

    async def work(count: int) -> None:
        for _ in range(count):
            delivery = await carol.recv_task()
            await carol.send_result(Result.ok(delivery, DONE))

    helpers = [asyncio.create_task(pass_on(30)), asyncio.create_task(work(10)), asyncio.create_task(work(20))]
    sent = await asyncio.gather(*(alice.send_task(plain(bob)) for _ in range(30)))
    answers = [await drain(alice) for _ in range(30)]
    await soon(asyncio.gather(*helpers))
    assert {answer.task_id for answer in answers} == {reply.task_id for reply in sent}
    assert {answer.content for answer in answers} == {DONE}
    for box in (alice, bob, carol):
        assert await nothing_back_for(box)
        assert await nothing_for(box)
