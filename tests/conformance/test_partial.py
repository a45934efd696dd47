"""Progress on the way to one final result."""

from __future__ import annotations

import pytest

from covenant import Mailbox, OpenMailbox, Result, TaskState, Text
from covenant.mailbox import said

from .support import (
    DONE,
    Reopen,
    answer_next,
    drain,
    drain_many,
    keyed,
    nothing_back_for,
    plain,
    refused,
    requeue,
    take,
    uid,
)


async def test_a_partial_result_does_not_end_the_lease(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 4: `partial` is progress; the holder goes on."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await bob.send_result(Result.partial(delivery, [Text("half")]))
    entry = await bob.get_task(uid(1))
    assert (entry.state, entry.lease_id, entry.attempt) == (TaskState.IN_FLIGHT, delivery.lease_id, 1)
    assert (await bob.heartbeat(delivery)).lease_id == delivery.lease_id
    assert await alice.get_result(uid(1)) is None


async def test_a_partial_result_says_what_it_was_posted_with(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 4: nothing of it is left out, and with another message it is another one."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    half = Result(delivery.task.id, "partial", (Text("half"),), None, delivery.lease_id, 1, said("half-way"))
    await bob.send_result(half)
    assert (await bob.send_result(half)).duplicate
    with refused("result_conflict"):
        await bob.send_result(Result.partial(delivery, half.content, 1))
    assert (await drain(alice)).result == half


async def test_partials_are_delivered_in_order_and_then_the_final_result(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 4: numbered from 1, in order, then one final result."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    for number in (1, 2, 3):
        posted = await bob.send_result(Result.partial(delivery, [Text(f"part {number}")]))
        assert posted.sequence == number
    await bob.send_result(Result.ok(delivery, DONE))
    answers = await drain_many(alice, 4)
    assert [answer.result.sequence for answer in answers] == [1, 2, 3, None]
    assert [answer.is_final for answer in answers] == [False, False, False, True]
    assert [answer.content for answer in answers[:3]] == [(Text(f"part {number}"),) for number in (1, 2, 3)]
    assert await nothing_back_for(alice)


@pytest.mark.parametrize("is_named", [True, False], ids=["lease named", "lease not named"])
async def test_a_final_result_has_no_number(alice: Mailbox, bob: Mailbox, is_named: bool) -> None:
    """Contract 4: it is the one after the last, whatever number its poster gives it; and it names its lease."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await bob.send_result(Result(uid(1), "ok", DONE, None, delivery.lease_id if is_named else None, 7))
    result = (await drain(alice)).result
    assert (result.sequence, result.lease_id) == (None, delivery.lease_id)


async def test_draining_a_partial_leaves_the_task_in_flight(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 4: a sender may follow the work while it is done."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    for number in (1, 2):
        await bob.send_result(Result.partial(delivery, [Text(str(number))]))
        assert (await drain(alice)).result.sequence == number
        assert (await alice.get_task(uid(1))).state == TaskState.IN_FLIGHT


async def test_partials_are_numbered_anew_for_each_lease(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 4: the numbers belong to the lease, and the attempt tells them apart."""
    await alice.send_task(plain(bob, id=uid(1)))
    first = await take(bob)
    await bob.send_result(Result.partial(first, [Text("a")], 1))
    await bob.send_result(Result.partial(first, [Text("b")], 2))
    await requeue(box, uid(1))
    second = await take(bob)
    assert (await bob.send_result(Result.partial(second, [Text("c")], 1))).sequence == 1
    await bob.send_result(Result.ok(second, DONE))
    answers = await drain_many(alice, 4)
    assert [(a.attempt, a.result.sequence) for a in answers] == [(1, 1), (1, 2), (2, 1), (2, None)]


async def test_a_repeated_partial_is_delivered_once(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 4: who numbers its partials may repeat any of them safely, also after it was drained."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    first = await bob.send_result(Result.partial(delivery, [Text("a")], 1))
    await bob.send_result(Result.partial(delivery, [Text("b")], 2))
    again = await bob.send_result(Result.partial(delivery, [Text("a")], 1))
    assert (again.generation, again.sequence, again.duplicate) == (first.generation, 1, True)
    assert [answer.result.sequence for answer in await drain_many(alice, 2)] == [1, 2]
    assert (await bob.send_result(Result.partial(delivery, [Text("b")], 2))).duplicate
    assert await nothing_back_for(alice)


async def test_a_partial_number_with_other_content_is_a_conflict(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 4: a number stands for one content."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    await bob.send_result(Result.partial(delivery, [Text("a")], 1))
    with refused("result_conflict"):
        await bob.send_result(Result.partial(delivery, [Text("b")], 1))
    assert (await drain(alice)).content == (Text("a"),)
    assert await nothing_back_for(alice)


async def test_a_partial_cannot_leave_a_gap(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 4: no number is passed over."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    with refused("partial_gap") as caught:
        await bob.send_result(Result.partial(delivery, [Text("b")], 2))
    assert caught.value.details["expected"] == 1
    assert await nothing_back_for(alice)


async def test_a_partial_after_the_final_result_is_refused(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 4: the final result is the last."""
    await alice.send_task(plain(bob))
    delivery = await answer_next(bob)
    with refused("task_terminal"):
        await bob.send_result(Result.partial(delivery, [Text("late")]))
    assert (await drain(alice)).is_final
    assert await nothing_back_for(alice)


async def test_a_partial_of_a_superseded_lease_is_not_delivered(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 4: progress of an old holder is none."""
    await alice.send_task(plain(bob, id=uid(1)))
    old = await take(bob)
    await requeue(box, uid(1))
    new = await take(bob)
    with refused("lease_superseded"):
        await bob.send_result(Result.partial(old, [Text("stale")]))
    assert await nothing_back_for(alice)
    assert (await bob.send_result(Result.partial(new, [Text("fresh")]))).sequence == 1


async def test_a_partial_result_is_never_cached(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 4: progress does not answer the next task under the same key; its followers get the final result."""
    await alice.send_task(keyed(bob, id=uid(1)))
    delivery = await take(bob)
    await bob.send_result(Result.partial(delivery, [Text("half")]))
    assert (await alice.cached_results()).entries == []
    sent = await alice.send_task(keyed(bob, id=uid(2)))
    assert (sent.replayed, sent.follows) == (False, uid(1))
    await bob.send_result(Result.ok(delivery, DONE))
    answers = await drain_many(alice, 3)
    assert [(answer.task_id, answer.status) for answer in answers] == [
        (uid(1), "partial"),
        (uid(1), "ok"),
        (uid(2), "ok"),
    ]


async def test_partials_survive_a_restart(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 4: the numbering goes on, and nothing is delivered twice."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await bob.send_result(Result.partial(delivery, [Text("a")], 1))
    await bob.send_result(Result.partial(delivery, [Text("b")], 2))
    assert (await drain(alice)).result.sequence == 1
    box = await reopen()
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    assert (await bob.send_result(Result.partial(delivery, [Text("b")], 2))).duplicate
    assert (await bob.send_result(Result.partial(delivery, [Text("c")]))).sequence == 3
    await bob.send_result(Result.ok(delivery, DONE))
    assert [answer.result.sequence for answer in await drain_many(alice, 3)] == [2, 3, None]
