"""A task that was acknowledged is there, whole, and for its recipient alone."""

from __future__ import annotations

import asyncio

import pytest

from covenant import (
    Audio,
    Idempotency,
    Image,
    Json,
    Mailbox,
    OpenMailbox,
    Resource,
    ResourceContents,
    ResourceLink,
    Result,
    Task,
    TaskState,
    Text,
)
from covenant.store.clock import ManualClock

from .support import DONE, Reopen, drain, keyed, nothing_back_for, nothing_for, plain, refused, take, turn, uid

pytestmark = pytest.mark.write_ahead


def everything(to: Mailbox, now: int) -> Task:
    return Task(
        id=uid(1),
        recipient=to.agent,
        intent_text="déjà vu ✓",
        task_kind="brief",
        parent=uid(77),
        deadline_ms=now + 60_000,
        idempotency=Idempotency("idempotent", "a key"),
        content=(
            Text("a", {"audience": ["user"]}),
            Json({"n": [1, 2.5, None, True, "x"]}),
            Image("aGk=", "image/png"),
            Audio("aGk=", "audio/wav"),
            Resource(ResourceContents("file:///a", "text/plain", "hi")),
            ResourceLink("file:///b", "b", size=3),
        ),
    )


async def test_a_task_arrives_with_everything_it_was_sent_with(
    alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 1: nothing of a task is lost on its way."""
    sent = everything(bob, clock.now_ms())
    await alice.send_task(sent)
    arrived = (await take(bob)).task
    assert arrived.sender == alice.agent
    for field in ("id", "recipient", "intent_text", "task_kind", "parent", "deadline_ms", "idempotency", "content"):
        assert getattr(arrived, field) == getattr(sent, field), field


async def test_a_task_is_whole_after_a_restart(
    alice: Mailbox, bob: Mailbox, clock: ManualClock, reopen: Reopen
) -> None:
    """Contract 1: an acknowledged send is durable, with all of its fields."""
    await alice.send_task(everything(bob, clock.now_ms()))
    before = await bob.get_task(uid(1))
    bob = (await reopen()).of("bob@lab")
    assert await bob.get_task(uid(1)) == before
    assert (await take(bob)).task == before.task


async def test_every_state_survives_a_restart(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 1: what was acknowledged in any state is in that state afterwards."""
    for number in range(1, 5):
        await alice.send_task(plain(bob, id=uid(number)))
    for number in range(1, 4):
        delivery = await take(bob)
        if number < 3:
            await bob.send_result(Result.ok(delivery, DONE))
    await drain(alice)
    states = [TaskState.RESOLVED, TaskState.RESULT_PENDING, TaskState.IN_FLIGHT, TaskState.QUEUED]
    before = [await alice.get_task(uid(number)) for number in range(1, 5)]
    assert [entry.state for entry in before] == states
    alice = (await reopen()).of("alice@lab")
    assert [await alice.get_task(uid(number)) for number in range(1, 5)] == before
    assert (await drain(alice)).task_id == uid(2)
    assert await nothing_back_for(alice)


async def test_a_drained_result_is_not_delivered_again_after_a_restart(
    alice: Mailbox, bob: Mailbox, reopen: Reopen
) -> None:
    """Contract 1: that a result was handed over is durable too."""
    await alice.send_task(plain(bob))
    await bob.send_result(Result.ok(await take(bob), DONE))
    await drain(alice)
    assert await nothing_back_for((await reopen()).of("alice@lab"))


async def test_an_acknowledged_send_survives_a_crash(alice: Mailbox, bob: Mailbox, crash: Reopen) -> None:
    """Contract 1: durable when the call returns, not when the store is closed."""
    await alice.send_task(plain(bob, id=uid(1)))
    left = await crash()
    assert (await take(left.of("bob@lab"))).task.id == uid(1)


async def test_a_read_shows_nothing_that_a_crash_takes_back(alice: Mailbox, bob: Mailbox, crash: Reopen) -> None:
    """Contract 1: a read of a send that is still under way waits until that is durable."""
    sending = asyncio.create_task(alice.send_task(plain(bob, id=uid(1))))
    await turn()
    seen = await bob.get_task(uid(1))
    left = await crash()
    assert await left.get_task(uid(1)) == seen
    await sending


async def test_a_refusal_reveals_nothing_that_a_crash_takes_back(alice: Mailbox, bob: Mailbox, crash: Reopen) -> None:
    """Contract 1: a conflict with a send that is still under way is only told once that is durable."""
    sending = asyncio.create_task(alice.send_task(plain(bob, "one", id=uid(1))))
    await turn()
    with refused("task_conflict"):
        await alice.send_task(plain(bob, "two", id=uid(1)))
    left = await crash()
    assert (await left.get_task(uid(1))).task.intent_text == "one"
    await sending


async def test_a_woken_receiver_holds_a_lease_that_a_crash_keeps(alice: Mailbox, bob: Mailbox, crash: Reopen) -> None:
    """Contract 1: a wake-up, too, shows only what is durable."""
    waiting = asyncio.create_task(take(bob))
    await turn()
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await waiting
    left = await crash()
    entry = await left.get_task(uid(1))
    assert (entry.state, entry.lease_id) == (TaskState.IN_FLIGHT, delivery.lease_id)


async def test_many_sends_at_once_are_all_there_after_a_crash(alice: Mailbox, bob: Mailbox, crash: Reopen) -> None:
    """Contract 1: sends that share a sync are each durable when acknowledged."""
    await asyncio.gather(*(alice.send_task(plain(bob, id=uid(number))) for number in range(1, 51)))
    left = (await crash()).of("bob@lab")
    assert {(await take(left)).task.id for _ in range(50)} == {uid(number) for number in range(1, 51)}


async def test_only_the_recipient_receives_a_task(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 2: a task is leased by the agent it is addressed to."""
    await alice.send_task(plain(bob))
    assert await nothing_for(carol)
    assert await nothing_for(alice)
    with refused("not_permitted"):
        await carol.try_recv_task_for(bob.agent)
    assert (await take(bob)).attempt == 1


async def test_the_operator_receives_for_one_recipient(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 2: who receives for another holds the lease in that agent's name."""
    await alice.send_task(plain(carol, id=uid(1)))
    await alice.send_task(plain(bob, id=uid(2)))
    delivery = await box.try_recv_task_for(bob.agent)
    assert delivery is not None
    assert delivery.task.id == uid(2)
    assert (await bob.get_task(uid(2))).leased_to == bob.agent
    await bob.send_result(Result.ok(delivery, DONE))
    assert (await drain(alice)).task_id == uid(2)


async def test_a_task_to_oneself_is_delivered_once(alice: Mailbox) -> None:
    """Contract 2: sender and recipient may be the same agent."""
    await alice.send_task(plain(alice, id=uid(1)))
    await alice.send_result(Result.ok(await take(alice), DONE))
    assert await nothing_for(alice)
    assert (await drain(alice)).task_id == uid(1)
    assert await nothing_back_for(alice)
    assert [task.id for task in await alice.recent_tasks()] == [uid(1)]


async def test_a_batch_keeps_its_order_and_refuses_one_by_one(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 1: each task of a batch stands for itself."""
    replies = await alice.send_tasks([plain(bob, id=uid(1)), plain(bob, " "), keyed(bob, id=uid(3))])
    assert [getattr(reply, "code", None) for reply in replies] == [None, "blank_text", None]
    assert [(await take(bob)).task.id for _ in range(2)] == [uid(1), uid(3)]
    assert await nothing_for(bob)


async def test_a_box_that_is_open_is_not_opened_again(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 1: `async with await Mailbox.open(url)` is one opening, and so are two at once."""
    await asyncio.gather(box.__aenter__(), box.__aenter__())
    await alice.send_task(plain(bob, id=uid(1)))
    async with await box:
        await alice.send_task(plain(bob, id=uid(2)))
        assert [(await take(bob)).task.id for _ in range(2)] == [uid(1), uid(2)]
    with refused("store_closed"):
        await alice.send_task(plain(bob))
