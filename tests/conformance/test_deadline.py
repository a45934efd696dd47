"""A deadline is kept by the clock, not by whoever happens to look."""

from __future__ import annotations

import asyncio

from covenant import Mailbox, OpenMailbox, Outcome, Result, TaskState
from covenant.store.clock import ManualClock

from .support import (
    DONE,
    Reopen,
    drain,
    drain_many,
    keyed,
    nothing_back_for,
    nothing_for,
    plain,
    requeue,
    soon,
    take,
    turn,
    uid,
)


def jump(clock: ManualClock, by_ms: int) -> None:
    """Move the time without waking anyone, as when a machine sleeps."""
    clock._now_ms += by_ms


async def test_a_queued_task_is_answered_when_its_deadline_passes(
    alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 6: the sender gets an error result `deadline_exceeded`, and the work is not done."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    clock.advance(999)
    assert (await alice.get_task(uid(1))).state == TaskState.QUEUED
    assert await nothing_back_for(alice)
    clock.advance(2)
    answer = await drain(alice)
    assert (answer.task_id, answer.status, answer.is_final) == (uid(1), "error", True)
    assert answer.error_message is not None
    assert answer.error_message.startswith("deadline_exceeded")
    assert (await alice.get_task(uid(1))).outcome == Outcome.DEADLINE_EXCEEDED
    assert await nothing_for(bob)


async def test_a_sender_who_waits_is_woken_by_the_deadline(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 6: nobody has to touch the task for its deadline to pass."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    waiting = asyncio.create_task(alice.recv_result())
    await turn()
    clock.advance(1001)
    assert (await soon(waiting)).task_id == uid(1)


async def test_a_read_does_not_end_a_task(box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 6: an overdue task is shown as it is until the timed command has come."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    jump(clock, 2000)
    for _ in range(2):
        entry = await alice.get_task(uid(1))
        assert (entry.state, entry.generation, entry.overdue) == (TaskState.QUEUED, 1, True)
        assert [entry.task.id for entry in (await box.task_queue()).tasks] == [uid(1)]


async def test_an_overdue_task_is_not_leased_even_when_the_timer_is_late(
    alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 6: who asks for work after the deadline does not get this task."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    jump(clock, 2000)
    assert await nothing_for(bob)
    assert (await drain(alice)).status == "error"


async def test_a_deadline_that_passes_in_flight_is_only_shown(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 6: the holder keeps its lease, and its late result is accepted."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    delivery = await take(bob)
    clock.advance(5000)
    entry = await alice.get_task(uid(1))
    assert (entry.state, entry.overdue, entry.generation) == (TaskState.IN_FLIGHT, True, 2)
    assert await nothing_back_for(alice)
    await bob.send_result(Result.ok(delivery, DONE))
    answer = await drain(alice)
    assert (answer.status, answer.content) == ("ok", DONE)
    assert await nothing_back_for(alice)


async def test_an_overdue_task_is_answered_when_it_is_requeued(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 6: once it is no longer in flight, its deadline counts again."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    await take(bob)
    clock.advance(5000)
    await requeue(box, uid(1))
    assert await nothing_for(bob)
    assert (await drain(alice)).status == "error"
    assert (await alice.get_task(uid(1))).outcome == Outcome.DEADLINE_EXCEEDED


async def test_a_requeued_task_keeps_its_deadline(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 6: an attempt that was given back does not lift the deadline."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    await bob.release(await take(bob))
    clock.advance(1001)
    assert (await drain(alice)).status == "error"
    assert await nothing_for(bob)


async def test_a_task_sent_too_late_is_answered_and_not_delivered(
    alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 6: a deadline in the past is passed."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() - 1))
    assert await nothing_for(bob)
    assert (await drain(alice)).task_id == uid(1)


async def test_a_delayed_task_whose_deadline_comes_first_is_answered(
    alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 6: a task that waits for its time is not in flight either."""
    now = clock.now_ms()
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=now + 1000, not_before_ms=now + 5000))
    await alice.send_task(plain(bob, id=uid(2), deadline_ms=now + 9000, not_before_ms=now + 5000))
    clock.advance(1001)
    assert (await drain(alice)).task_id == uid(1)
    clock.advance(4000)
    delivery = await take(bob)
    assert delivery.task.id == uid(2)
    await bob.release(delivery)
    clock.advance(5000)
    assert (await drain(alice)).task_id == uid(2)


async def test_many_deadlines_at_once_are_all_kept(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 6: more tasks than one step takes end at the same moment."""
    deadline_ms = clock.now_ms() + 1000
    await alice.send_tasks([plain(bob, id=uid(number), deadline_ms=deadline_ms) for number in range(250)])
    clock.advance(1001)
    answers = await drain_many(alice, 250)
    assert {answer.task_id for answer in answers} == {uid(number) for number in range(250)}
    assert await nothing_for(bob)
    assert await nothing_back_for(alice)


async def test_a_leader_and_all_its_followers_keep_one_deadline(
    alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 6: tasks of one key that end at the same moment each end once."""
    deadline_ms = clock.now_ms() + 1000
    await alice.send_tasks([keyed(bob, id=uid(number), deadline_ms=deadline_ms) for number in range(120)])
    clock.advance(1001)
    answers = await drain_many(alice, 120)
    assert {answer.task_id for answer in answers} == {uid(number) for number in range(120)}
    assert await nothing_for(bob)
    assert not (await alice.send_task(keyed(bob))).replayed


async def test_a_deadline_that_passes_while_the_store_is_closed_is_kept(
    alice: Mailbox, bob: Mailbox, clock: ManualClock, reopen: Reopen
) -> None:
    """Contract 6: after a restart the sender has its answer, and nobody gets the task."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    jump(clock, 2000)
    box = await reopen()
    assert await nothing_for(box.of("bob@lab"))
    assert (await drain(box.of("alice@lab"))).task_id == uid(1)


async def test_a_deadline_is_kept_after_a_restart(
    alice: Mailbox, bob: Mailbox, clock: ManualClock, reopen: Reopen
) -> None:
    """Contract 6: a deadline in the future is found again."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    alice = (await reopen()).of("alice@lab")
    waiting = asyncio.create_task(alice.recv_result())
    await turn()
    clock.advance(1001)
    assert (await soon(waiting)).task_id == uid(1)


async def test_a_clock_set_back_does_not_bring_a_deadline_forward(
    alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 6: a deadline is a moment of the clock, whichever way it comes there."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    clock.advance(-60_000)
    assert (await alice.get_task(uid(1))).state == TaskState.QUEUED
    clock.advance(60_500)
    assert (await alice.get_task(uid(1))).state == TaskState.QUEUED
    clock.advance(501)
    assert (await drain(alice)).task_id == uid(1)
