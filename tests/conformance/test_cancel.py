"""Cancel ends a task, at once or by asking, alone or with its children."""

from __future__ import annotations

import asyncio

import pytest

from covenant import Mailbox, Outcome, Result, TaskState
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
    soon,
    take,
    turn,
    uid,
)


async def test_a_canceled_task_answers_its_sender_and_is_not_done(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: cancel ends the task in its commit with an error result `canceled`."""
    await alice.send_task(plain(bob, id=uid(1)))
    canceled = await alice.cancel_task(uid(1), reason="no longer needed")
    assert canceled.state == TaskState.RESULT_PENDING
    assert await nothing_for(bob)
    answer = await drain(alice)
    assert (answer.task_id, answer.status) == (uid(1), "error")
    assert answer.error_message is not None
    assert answer.error_message.startswith("canceled")
    assert "no longer needed" in answer.error_message
    entry = await alice.get_task(uid(1))
    assert (entry.outcome, entry.state) == (Outcome.CANCELED, TaskState.RESOLVED)


async def test_cancel_voids_the_lease(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: the holder learns of it by its heartbeat, and cannot answer any more."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await alice.cancel_task(uid(1))
    with refused("task_terminal") as caught:
        await bob.heartbeat(delivery)
    assert caught.value.details["outcome"] == "canceled"
    with refused("task_terminal"):
        await bob.send_result(Result.ok(delivery, DONE))
    with refused("task_terminal"):
        await bob.release(delivery)
    assert (await alice.get_task(uid(1))).lease_id is None
    assert (await drain(alice)).status == "error"
    assert await nothing_back_for(alice)


async def test_a_holder_who_waits_learns_of_the_cancel(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: it reaches the holder through wait."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    waiting = asyncio.create_task(bob.wait_generation(uid(1), delivery.generation))
    await turn()
    await alice.cancel_task(uid(1))
    assert (await soon(waiting)).outcome == Outcome.CANCELED


async def test_a_second_cancel_changes_nothing(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: canceled twice is canceled once."""
    await alice.send_task(plain(bob, id=uid(1)))
    first = await alice.cancel_task(uid(1))
    assert (await alice.cancel_task(uid(1))).generation == first.generation
    await drain(alice)
    assert (await alice.cancel_task(uid(1))).generation == first.generation
    assert await nothing_back_for(alice)


async def test_an_answered_task_cannot_be_canceled(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: what has ended has ended."""
    await alice.send_task(plain(bob, id=uid(1)))
    await answer_next(bob)
    with refused("task_terminal") as caught:
        await alice.cancel_task(uid(1))
    assert caught.value.details["outcome"] == "answered"
    assert (await drain(alice)).status == "ok"


async def test_only_sender_and_operator_cancel(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 7: the recipient may not, and to others the task does not exist."""
    await alice.send_task(plain(bob, id=uid(1)))
    with refused("not_permitted"):
        await bob.cancel_task(uid(1))
    with refused("unknown_task"):
        await carol.cancel_task(uid(1))
    with refused("unknown_task"):
        await alice.cancel_task(uid(2))
    with refused("blank_text"):
        await alice.cancel_task(uid(1), reason=" ")
    assert (await take(bob)).task.id == uid(1)


async def test_a_delayed_task_can_be_canceled(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 7: its time does not bring it back."""
    await alice.send_task(plain(bob, id=uid(1), not_before_ms=clock.now_ms() + 1000))
    await alice.cancel_task(uid(1))
    clock.advance(1001)
    assert await nothing_for(bob)
    assert (await drain(alice)).status == "error"


async def test_a_graceful_cancel_asks_the_holder_first(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: the lease stays until its holder gives in, and that is the end of the task."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    asked = await alice.cancel_task(uid(1), reason="too dear", graceful=True)
    assert asked.state == TaskState.IN_FLIGHT
    assert (await alice.get_task(uid(1))).cancel_requested
    assert await nothing_back_for(alice)
    status = await bob.heartbeat(delivery)
    assert (status.cancel_requested, status.cancel_reason) == (True, "too dear")
    await bob.release(delivery)
    assert (await drain(alice)).error_message == "canceled: too dear"
    assert (await alice.get_task(uid(1))).outcome == Outcome.CANCELED
    assert await nothing_for(bob)


async def test_a_holder_may_finish_in_spite_of_a_graceful_cancel(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: to ask is not to end; the work that was done counts."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await alice.cancel_task(uid(1), graceful=True)
    await bob.send_result(Result.ok(delivery, DONE))
    assert (await drain(alice)).status == "ok"
    entry = await alice.get_task(uid(1))
    assert (entry.outcome, entry.cancel_requested) == (Outcome.ANSWERED, False)


async def test_a_graceful_cancel_of_a_queued_task_ends_it(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: where nobody holds the task there is nobody to ask."""
    await alice.send_task(plain(bob, id=uid(1)))
    await alice.cancel_task(uid(1), graceful=True)
    assert await nothing_for(bob)
    assert (await drain(alice)).status == "error"


async def test_a_cancel_overrides_a_graceful_one(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: a holder that does not listen loses its lease."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await alice.cancel_task(uid(1), graceful=True)
    await alice.cancel_task(uid(1), reason="now")
    with refused("task_terminal"):
        await bob.send_result(Result.ok(delivery, DONE))
    assert (await drain(alice)).error_message == "canceled: now"


async def test_a_graceful_cancel_survives_a_restart(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 7: the holder is asked by its first heartbeat afterwards."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await alice.cancel_task(uid(1), reason="too dear", graceful=True)
    assert (await (await reopen()).of("bob@lab").heartbeat(delivery)).cancel_reason == "too dear"


async def test_children_are_left_alone_unless_asked_for(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: cancel cascades on request only."""
    await alice.send_task(plain(bob, id=uid(1)))
    await alice.send_task(plain(bob, id=uid(2), parent=uid(1)))
    await alice.cancel_task(uid(1))
    assert (await take(bob)).task.id == uid(2)


async def test_a_cascade_takes_the_whole_tree_along(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 7: children and theirs end, in whatever state, and each sender hears of its own."""
    await alice.send_task(plain(bob, id=uid(1)))
    await take(bob)
    await bob.send_task(plain(carol, id=uid(2), parent=uid(1)))
    child = await take(carol)
    await carol.send_task(plain(alice, id=uid(3), parent=uid(2)))
    await alice.send_task(plain(bob, id=uid(4)))
    await alice.cancel_task(uid(1), cascade=True)
    assert (await drain(alice)).task_id == uid(1)
    assert (await drain(bob)).task_id == uid(2)
    assert (await drain(carol)).task_id == uid(3)
    with refused("task_terminal"):
        await carol.heartbeat(child)
    assert await nothing_for(alice)
    assert (await take(bob)).task.id == uid(4)


async def test_a_cascade_reaches_many_children(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: more children than one step takes, each answered once."""
    await alice.send_task(plain(bob, id=uid(1000)))
    await alice.send_tasks([plain(bob, id=uid(number), parent=uid(1000)) for number in range(250)])
    await alice.cancel_task(uid(1000), cascade=True)
    answers = await drain_many(alice, 251)
    assert {answer.task_id for answer in answers} == {uid(1000), *(uid(number) for number in range(250))}
    assert {answer.status for answer in answers} == {"error"}
    assert await nothing_for(bob)
    assert await nothing_back_for(alice)


async def test_a_cascade_is_finished_after_a_restart(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 7: what a cascade had left to do when the store was closed is done when it is opened."""
    await alice.send_task(plain(bob, id=uid(5000)))
    await alice.send_tasks([plain(bob, id=uid(number), parent=uid(5000)) for number in range(1000)])
    await alice.send_tasks([plain(bob, id=uid(number), parent=uid(7)) for number in range(1000, 1999)])
    await alice.cancel_task(uid(5000), cascade=True)
    box = await reopen()
    answers = await drain_many(box.of("alice@lab"), 2000)
    assert len({answer.task_id for answer in answers}) == 2000
    assert await nothing_for(box.of("bob@lab"))


async def test_a_cascade_over_a_ring_of_parents_ends(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: parents are links that nobody validated, and a ring of them is canceled like a tree."""
    await alice.send_task(plain(bob, id=uid(1), parent=uid(2)))
    await alice.send_task(plain(bob, id=uid(2), parent=uid(1)))
    await alice.send_task(plain(bob, id=uid(3), parent=uid(3)))
    await alice.cancel_task(uid(1), cascade=True)
    await alice.cancel_task(uid(3), cascade=True)
    assert {answer.task_id for answer in await drain_many(alice, 3)} == {uid(1), uid(2), uid(3)}
    assert await nothing_back_for(alice)


async def test_a_cascade_passes_through_a_child_that_has_ended(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: the tree is canceled, not only its unbroken branches."""
    await alice.send_task(plain(bob, id=uid(2), parent=uid(1)))
    await answer_next(bob)
    await drain(alice)
    await alice.send_task(plain(bob, id=uid(1)))
    await alice.send_task(plain(bob, id=uid(3), parent=uid(2)))
    await alice.cancel_task(uid(1), cascade=True)
    assert (await drain(alice)).task_id == uid(1)
    assert (await alice.get_task(uid(3))).outcome == Outcome.CANCELED


async def test_a_graceful_cascade_takes_the_children_when_the_holder_gives_in(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: a cascade that was asked for together with `graceful` is not forgotten."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await alice.send_task(plain(bob, id=uid(2), parent=uid(1)))
    await alice.cancel_task(uid(1), graceful=True, cascade=True)
    await bob.release(delivery)
    assert (await drain(alice)).task_id == uid(1)
    assert (await alice.get_task(uid(2))).outcome == Outcome.CANCELED


async def test_a_cascade_may_be_asked_for_after_the_cancel(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: who canceled only the parent may take the children along later."""
    await alice.send_task(plain(bob, id=uid(1)))
    await alice.send_task(plain(bob, id=uid(2), parent=uid(1)))
    await alice.cancel_task(uid(1))
    await alice.cancel_task(uid(1), cascade=True)
    assert (await drain(alice)).task_id == uid(1)
    assert (await alice.get_task(uid(2))).outcome == Outcome.CANCELED


@pytest.mark.parametrize("first", ["cancel", "answer"])
async def test_of_cancel_and_answer_at_once_one_holds(alice: Mailbox, bob: Mailbox, first: str) -> None:
    """Contract 7: the sender hears one end of the task, whichever came first."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    both = [alice.cancel_task(uid(1)), bob.send_result(Result.ok(delivery, DONE))]
    if first == "answer":
        both.reverse()
    replies = await asyncio.gather(*both, return_exceptions=True)
    assert [isinstance(reply, Exception) for reply in replies].count(True) == 1
    outcome = (await alice.get_task(uid(1))).outcome
    assert (await drain(alice)).status == ("ok" if outcome == Outcome.ANSWERED else "error")
    assert await nothing_back_for(alice)
