"""One holder at a time, for as long as the holder needs."""

from __future__ import annotations

import asyncio

from covenant import Mailbox, OpenMailbox, Result, TaskState
from covenant.model.limits import LEASES_REMEMBERED_MAX
from covenant.store.clock import ManualClock

from .support import DONE, YEAR_MS, Reopen, drain, nothing_for, plain, refused, requeue, soon, take, turn, uid


async def test_a_leased_task_is_not_delivered_again(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: one holder at a time, whoever asks and however."""
    await alice.send_task(plain(bob))
    await take(bob)
    assert await nothing_for(bob)
    assert await nothing_for(box.of("bob@lab", incarnation="another"))
    assert await nothing_for(box)
    assert await box.recv_tasks(10, wait_ms=0) == []


async def test_two_receivers_at_once_get_different_tasks(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: no task is handed to two of many receivers."""
    await alice.send_tasks([plain(bob, id=uid(number)) for number in range(1, 21)])
    taken = await asyncio.gather(*(take(bob) for _ in range(20)))
    assert sorted(delivery.task.id for delivery in taken) == [uid(number) for number in range(1, 21)]
    assert len({delivery.lease_id for delivery in taken}) == 20


async def test_a_lease_is_shown_as_it_was_handed_over(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 2: lease_id and attempt come back with the task."""
    await alice.send_task(plain(bob))
    clock.advance(5)
    delivery = await take(bob)
    entry = await alice.get_task(delivery.task.id)
    assert (entry.state, entry.lease_id, entry.attempt) == (TaskState.IN_FLIGHT, delivery.lease_id, 1)
    assert (entry.leased_to, entry.leased_at_ms) == (bob.agent, clock.now_ms())
    assert delivery.generation == entry.generation


async def test_a_stale_lease_is_only_shown(box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 2: staleness is reported, never acted upon."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    clock.advance(YEAR_MS)
    assert await nothing_for(bob)
    (entry,) = (await box.task_queue(state="in_flight", min_lease_age_ms=YEAR_MS)).tasks
    assert (entry.lease_id, entry.attempt, entry.generation) == (delivery.lease_id, 1, delivery.generation)
    await bob.send_result(Result.ok(delivery, DONE))
    assert (await drain(alice)).status == "ok"


async def test_a_lease_survives_a_restart_and_is_not_redelivered(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 2: a restart neither ends a lease nor delivers its task again."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    box = await reopen()
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    assert await nothing_for(bob)
    entry = await bob.get_task(delivery.task.id)
    assert (entry.state, entry.lease_id, entry.attempt) == (TaskState.IN_FLIGHT, delivery.lease_id, 1)
    await bob.heartbeat(delivery)
    await bob.send_result(Result.ok(delivery, DONE))
    assert (await drain(alice)).attempt == 1


async def test_a_heartbeat_renews_the_sign_of_life(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 2: a holder may heartbeat; the lease stays the same."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    leased_ms = clock.now_ms()
    clock.advance(1000)
    status = await bob.heartbeat(delivery)
    assert (status.lease_id, status.attempt, status.cancel_requested) == (delivery.lease_id, 1, False)
    entry = await bob.get_task(delivery.task.id)
    assert (entry.leased_at_ms, entry.heartbeat_ms) == (leased_ms, leased_ms + 1000)
    assert (await bob.task_queue(state="in_flight", min_lease_age_ms=1)).tasks == []


async def test_a_heartbeat_survives_a_restart(alice: Mailbox, bob: Mailbox, clock: ManualClock, reopen: Reopen) -> None:
    """Contract 2: a lease that was renewed is not stale after a restart."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    clock.advance(1000)
    await bob.heartbeat(delivery.lease_id)
    bob = (await reopen()).of("bob@lab")
    assert (await bob.get_task(delivery.task.id)).heartbeat_ms == clock.now_ms()


async def test_only_the_holder_renews_or_releases(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 2: a lease is of no use to anyone else."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    for other in (alice, carol):
        with refused("unknown_lease"):
            await other.heartbeat(delivery)
        with refused("unknown_lease"):
            await other.release(delivery)
    with refused("unknown_lease"):
        await bob.heartbeat(uid(9))
    assert (await bob.get_task(delivery.task.id)).lease_id == delivery.lease_id


async def test_a_superseded_lease_can_neither_renew_nor_release(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: after a requeue the old holder is told so, before and after the next lease."""
    await alice.send_task(plain(bob))
    old = await take(bob)
    await requeue(box, old.task.id)
    with refused("lease_superseded"):
        await bob.heartbeat(old)
    new = await take(bob)
    with refused("lease_superseded"):
        await bob.heartbeat(old)
    with refused("lease_superseded"):
        await bob.release(old)
    assert (await bob.get_task(old.task.id)).lease_id == new.lease_id


async def test_a_lease_of_a_finished_task_is_over(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: after the end there is nothing to renew or to release."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    await bob.send_result(Result.ok(delivery, DONE))
    with refused("task_terminal"):
        await bob.heartbeat(delivery)
    with refused("task_terminal"):
        await bob.release(delivery)
    assert await nothing_for(bob)


async def test_a_released_task_is_the_same_task_at_its_next_attempt(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: release gives back the same id for the next attempt, under a new lease."""
    await alice.send_task(plain(bob, id=uid(1)))
    first = await take(bob)
    released = await bob.release(first, reason="no capacity")
    entry = await bob.get_task(uid(1))
    assert (entry.state, entry.attempt, entry.lease_id) == (TaskState.QUEUED, 1, None)
    assert released.generation == entry.generation
    second = await take(bob)
    assert (second.task, second.attempt) == (first.task, 2)
    assert second.lease_id != first.lease_id


async def test_a_released_task_goes_to_the_back_of_the_queue(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: what was given back does not stand in the way of what waits."""
    await alice.send_tasks([plain(bob, id=uid(number)) for number in (1, 2, 3)])
    await bob.release(await take(bob))
    assert [(await take(bob)).task.id for _ in range(3)] == [uid(2), uid(3), uid(1)]


async def test_a_lease_cannot_be_released_twice(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: the second release finds the lease gone and changes nothing."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    released = await bob.release(delivery)
    with refused("lease_superseded"):
        await bob.release(delivery)
    assert (await bob.get_task(delivery.task.id)).generation == released.generation


async def test_a_release_may_delay_the_next_attempt(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 2: `not_before_ms` holds the task back, and its time wakes who waits."""
    await alice.send_task(plain(bob, id=uid(1)))
    await bob.release(await take(bob), not_before_ms=clock.now_ms() + 1000)
    assert await nothing_for(bob)
    waiting = asyncio.create_task(take(bob))
    await turn()
    clock.advance(999)
    await turn()
    assert not waiting.done()
    clock.advance(1)
    delivery = await soon(waiting)
    assert (delivery.task.id, delivery.attempt) == (uid(1), 2)


async def test_a_delay_survives_a_restart(alice: Mailbox, bob: Mailbox, clock: ManualClock, reopen: Reopen) -> None:
    """Contract 2: a task that was held back is neither early nor forgotten after a restart."""
    await alice.send_task(plain(bob, id=uid(1)))
    await bob.release(await take(bob), not_before_ms=clock.now_ms() + 1000)
    bob = (await reopen()).of("bob@lab")
    assert await nothing_for(bob)
    clock.advance(1000)
    assert (await take(bob)).attempt == 2


async def test_a_lease_belongs_to_an_incarnation(box: OpenMailbox, alice: Mailbox) -> None:
    """Contract 2: another incarnation of the worker does not hold what this one took."""
    one, two = box.of("bob@lab", incarnation="one"), box.of("bob@lab", incarnation="two")
    await alice.send_task(plain(one, id=uid(1)))
    delivery = await take(one)
    with refused("lease_required"):
        await two.send_result(Result(uid(1), "ok", DONE))
    assert (await one.get_task(uid(1))).lease_id == delivery.lease_id
    await one.send_result(Result(uid(1), "ok", DONE))
    assert (await drain(alice)).status == "ok"


async def test_a_restarted_worker_is_another_incarnation(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 2: after a restart a result has to name its lease."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    bob = (await reopen()).of("bob@lab")
    with refused("lease_required"):
        await bob.send_result(Result(uid(1), "ok", DONE))
    assert not (await bob.send_result(Result.ok(delivery, DONE))).duplicate


async def test_only_the_last_of_many_attempts_holds_the_task(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 2: attempts are counted without a bound of their own."""
    await alice.send_task(plain(bob, id=uid(1)))
    last = await take(bob)
    former = []
    for _ in range(70):
        former.append(last)
        await requeue(box, uid(1))
        last = await take(bob)
    assert last.attempt == 71
    with refused("lease_superseded"):
        await bob.send_result(Result.ok(former[-1], DONE))
    for delivery in former[-LEASES_REMEMBERED_MAX:]:
        with refused("lease_superseded"):
            await bob.heartbeat(delivery)
    with refused("unknown_lease"):
        await bob.heartbeat(former[-LEASES_REMEMBERED_MAX - 1])
    await bob.send_result(Result.ok(last, DONE))
    assert (await drain(alice)).attempt == 71
