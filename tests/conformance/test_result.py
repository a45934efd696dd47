"""A result belongs to its lease; the first one counts."""

from __future__ import annotations

import asyncio

import pytest

from covenant import CovenantError, ForceError, Json, Mailbox, OpenMailbox, RepairRequest, Result, TaskState, Text
from covenant.mailbox import said
from covenant.store.clock import ManualClock

from .support import (
    DONE,
    Reopen,
    answer_next,
    drain,
    drain_many,
    nothing_back_for,
    nothing_for,
    plain,
    refused,
    requeue,
    take,
    uid,
)

pytestmark = pytest.mark.write_ahead


async def test_a_result_reaches_its_sender_alone(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 3: a result goes to who sent the task."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    posted = await bob.send_result(Result.ok(delivery, [Text("a"), Json({"b": 1})]))
    assert (await alice.get_task(uid(1))).state == TaskState.RESULT_PENDING
    assert await nothing_back_for(bob)
    assert await nothing_back_for(carol)
    answer = await drain(alice)
    assert (answer.task_id, answer.status, answer.attempt, answer.replayed) == (uid(1), "ok", 1, False)
    assert list(answer.content) == [Text("a"), Json({"b": 1})]
    assert answer.generation == posted.generation
    assert (await alice.get_task(uid(1))).state == TaskState.RESOLVED
    assert await nothing_back_for(box)


async def test_results_are_drained_in_the_order_of_their_posting(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: first answered, first drained."""
    await alice.send_tasks([plain(bob, id=uid(number)) for number in (1, 2, 3)])
    leased = [await take(bob) for _ in range(3)]
    for delivery in reversed(leased):
        await bob.send_result(Result.ok(delivery, DONE))
    assert [answer.task_id for answer in await drain_many(alice, 3)] == [uid(3), uid(2), uid(1)]


async def test_an_error_result_carries_its_message(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: an error of the holder is an answer like any other."""
    await alice.send_task(plain(bob))
    await answer_next(bob, "error")
    answer = await drain(alice)
    assert (answer.status, answer.error_message, answer.is_final) == ("error", "broken", True)


async def test_the_holder_of_the_first_attempt_need_not_name_its_lease(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: `lease_id` is optional at attempt 1, and the answer shows it all the same."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await bob.send_result(Result(uid(1), "ok", DONE))
    assert (await drain(alice)).result.lease_id == delivery.lease_id


async def test_the_holder_of_a_later_attempt_names_its_lease(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: without `lease_id` nobody can tell which attempt answers."""
    await alice.send_task(plain(bob, id=uid(1)))
    await take(bob)
    await requeue(box, uid(1))
    second = await take(bob)
    with refused("lease_required"):
        await bob.send_result(Result(uid(1), "ok", DONE))
    await bob.send_result(Result.ok(second, DONE))
    assert (await drain(alice)).attempt == 2


async def test_the_same_result_again_gets_the_same_answer(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: a repeated post changes nothing, before the drain and after it."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    first = await bob.send_result(Result.ok(delivery, DONE))
    again = await bob.send_result(Result.ok(delivery, DONE))
    assert (again.task_id, again.generation, again.duplicate) == (first.task_id, first.generation, True)
    await drain(alice)
    assert (await bob.send_result(Result(delivery.task.id, "ok", DONE))).generation == first.generation
    assert await nothing_back_for(alice)


async def test_the_same_result_after_a_restart_is_still_the_same(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 3: a worker that never heard the answer may post again after a restart."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    first = await bob.send_result(Result.ok(delivery, [Json({"a": 1, "b": 2})]))
    box = await reopen()
    again = await box.of("bob@lab").send_result(Result.ok(delivery, [Json({"b": 2, "a": 1})]))
    assert (again.generation, again.duplicate) == (first.generation, True)
    await drain(box.of("alice@lab"))
    assert await nothing_back_for(box.of("alice@lab"))


@pytest.mark.parametrize("drained", [False, True], ids=["pending", "drained"])
@pytest.mark.parametrize("other", ["content", "status", "message", "said"])
async def test_another_result_is_a_conflict(alice: Mailbox, bob: Mailbox, drained: bool, other: str) -> None:
    """Contract 3: the first writer wins, and the second is told so."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    await bob.send_result(Result(delivery.task.id, "error", DONE, "broken", delivery.lease_id))
    if drained:
        await drain(alice)
    others = {
        "content": Result(delivery.task.id, "error", (Text("else"),), "broken", delivery.lease_id),
        "status": Result(delivery.task.id, "ok", DONE, "broken", delivery.lease_id),
        "message": Result(delivery.task.id, "error", DONE, "otherwise", delivery.lease_id),
        "said": Result(delivery.task.id, "error", DONE, "broken", delivery.lease_id, None, said("sorry")),
    }
    with refused("result_conflict"):
        await bob.send_result(others[other])
    kept = await alice.get_result(delivery.task.id)
    assert kept is not None
    assert (kept.status, kept.error_message, kept.content) == ("error", "broken", DONE)


async def test_of_two_results_at_once_one_is_delivered(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: first writer wins, also when both write at once."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    replies = await asyncio.gather(
        *(bob.send_result(Result.ok(delivery, [Text(f"answer {number}")])) for number in range(8)),
        return_exceptions=True,
    )
    refusals = [reply.code for reply in replies if isinstance(reply, CovenantError)]
    assert refusals == ["result_conflict"] * 7
    won = next(number for number, reply in enumerate(replies) if not isinstance(reply, BaseException))
    assert (await drain(alice)).content == (Text(f"answer {won}"),)
    assert await nothing_back_for(alice)


async def test_a_superseded_lease_cannot_post(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: neither while the task waits again, nor against the new holder, nor after its answer."""
    await alice.send_task(plain(bob, id=uid(1)))
    old = await take(bob)
    stale_result = Result.ok(old, [Text("stale")])
    await requeue(box, uid(1))
    with refused("lease_superseded"):
        await bob.send_result(stale_result)
    new = await take(bob)
    with refused("lease_superseded"):
        await bob.send_result(stale_result)
    assert (await bob.heartbeat(new)).attempt == 2
    await bob.send_result(Result.ok(new, [Text("fresh")]))
    with refused("lease_superseded"):
        await bob.send_result(stale_result)
    assert (await drain(alice)).content == (Text("fresh"),)
    assert await nothing_back_for(alice)


async def test_a_superseded_result_equal_to_the_accepted_one_is_still_superseded(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """Contract 3: equal content does not make an old lease the one that answered."""
    await alice.send_task(plain(bob, id=uid(1)))
    old = await take(bob)
    await requeue(box, uid(1))
    await answer_next(bob)
    with refused("lease_superseded"):
        await bob.send_result(Result.ok(old, DONE))


async def test_a_superseded_result_is_kept_for_the_operator(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, reopen: Reopen
) -> None:
    """Contract 3: what came too late is shown once, to the operator alone, and is not lost by a restart."""
    await alice.send_task(plain(bob, id=uid(1)))
    old = await take(bob)
    await requeue(box, uid(1))
    generation = (await box.get_task(uid(1))).generation
    for _ in range(2):
        with refused("lease_superseded"):
            await bob.send_result(Result.ok(old, [Text("stale")]))
    box = await reopen()
    entry = await box.get_task(uid(1))
    assert [late.content for late in entry.late_results] == [(Text("stale"),)]
    assert entry.generation == generation
    for agent in ("alice@lab", "bob@lab"):
        assert list((await box.of(agent).get_task(uid(1))).late_results) == []


async def test_a_superseded_final_result_is_kept_beside_its_partials(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """Contract 3: the operator sees all that a superseded holder had to say, its final result above all."""
    await alice.send_task(plain(bob, id=uid(1)))
    old = await take(bob)
    await requeue(box, uid(1))
    for late in (Result.partial(old, [Text("half")]), Result.ok(old, [Text("whole")])):
        with refused("lease_superseded"):
            await bob.send_result(late)
    kept = (await box.get_task(uid(1))).late_results
    assert "ok" in [late.status for late in kept]


async def test_a_lease_of_another_task_does_not_fit(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: a result names the lease of its own task."""
    await alice.send_tasks([plain(bob, id=uid(1)), plain(bob, id=uid(2))])
    one, two = await take(bob), await take(bob)
    for wrong in (two.lease_id, uid(99)):
        with refused("lease_mismatch"):
            await bob.send_result(Result(uid(1), "ok", DONE, None, wrong))
    assert (await bob.get_task(uid(1))).lease_id == one.lease_id


async def test_a_task_that_nobody_holds_cannot_be_answered(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: a result without a lease is refused, and the task stays to be done."""
    await alice.send_task(plain(bob, id=uid(1)))
    with refused("not_leased"):
        await bob.send_result(Result(uid(1), "ok", DONE))
    assert await nothing_back_for(alice)
    assert (await take(bob)).attempt == 1


async def test_only_the_recipient_answers(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 3: the sender may not answer, and to others the task does not exist."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    with refused("not_permitted"):
        await alice.send_result(Result.ok(delivery, DONE))
    with refused("unknown_task"):
        await carol.send_result(Result.ok(delivery, DONE))
    with refused("unknown_task"):
        await bob.send_result(Result(uid(2), "ok", DONE))
    assert await nothing_back_for(alice)


@pytest.mark.parametrize("ending", ["canceled", "forced", "deadline_exceeded"])
async def test_a_result_after_the_end_is_refused(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock, ending: str
) -> None:
    """Contract 3: after the end `task_terminal` says how it ended, and the sender hears nothing more."""
    await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 10))
    delivery = await take(bob)
    if ending == "canceled":
        await alice.cancel_task(uid(1))
    elif ending == "forced":
        await box.repair_task(RepairRequest(uid(1), ForceError("given up"), "stuck"))
    else:
        clock.advance(10)
        await bob.release(delivery)
    assert (await drain(alice)).status == "error"
    with refused("task_terminal") as caught:
        await bob.send_result(Result.ok(delivery, DONE))
    assert caught.value.details["outcome"] == ending
    assert await nothing_back_for(alice)
    assert await nothing_for(bob)
