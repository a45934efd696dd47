"""What a careless or hostile caller tries; none of it may hurt anybody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covenant import CovenantError, Json, Limits, Mailbox, OpenMailbox, Result, Task, TaskState, Text
from covenant.store.clock import ManualClock

from .support import DONE, Reopen, nothing_for, plain, refused, soon, take, turn, uid

pytestmark = pytest.mark.rules_only


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("incarnation", [4711, b"one", "", " ", "\ud800"])
async def test_an_incarnation_is_text(box: OpenMailbox, incarnation: Any) -> None:
    """Contract 2: a wrong type never reaches the store."""
    with pytest.raises(CovenantError):
        box.of("bob@lab", incarnation=incarnation)


@pytest.mark.parametrize("how", [{"cascade": 1}, {"graceful": "yes"}, {"cascade": None}])
async def test_the_flags_of_a_cancel_are_flags(alice: Mailbox, bob: Mailbox, how: dict[str, Any]) -> None:
    """Contract 7."""
    sent = await alice.send_task(plain(bob))
    with refused("malformed"):
        await alice.cancel_task(sent.task_id, **how)
    assert (await alice.get_task(sent.task_id)).outcome is None


async def test_what_is_nested_too_deep_is_refused_and_stops_nobody(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 1: what is accepted can be delivered."""
    for depth in (65, 600, 900, 5000):
        with refused("malformed"):
            await alice.send_task(plain(bob, content=[Json(nested(depth))]))
    await alice.send_task(plain(bob, content=[Json(nested(64))]))
    block = (await take(bob)).task.content[0]
    assert isinstance(block, Json)
    assert block.value == nested(64)


@pytest.mark.parametrize("content", ["", {}, 0, False, {"type": "text"}])
async def test_content_is_a_list(alice: Mailbox, bob: Mailbox, content: Any) -> None:
    """Contract 5: a wrong type is not taken for nothing."""
    with refused("malformed"):
        await alice.send_task(plain(bob, content=content))
    assert await nothing_for(bob)


@pytest.mark.parametrize("task_id", [0, False, None, b"x"])
async def test_an_id_of_the_wrong_type_is_not_taken_for_none(alice: Mailbox, bob: Mailbox, task_id: Any) -> None:
    """Contract 5."""
    with refused("bad_id"):
        await alice.send_task(plain(bob, id=task_id))


async def test_a_cascade_does_not_reach_what_strangers_sent(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 7: whoever takes the id of an intent does not own what hangs on it."""
    child = await alice.send_task(plain(bob, parent=uid(7)))
    await carol.send_task(plain(carol, id=uid(7)))
    await carol.cancel_task(uid(7), cascade=True)
    assert (await alice.get_task(child.task_id)).outcome is None


async def test_a_cascade_does_not_reach_what_the_recipient_hung_there_before_it_knew(
    alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 7: to send somebody a task under the id of its own intent gives no power over what hangs on that."""
    before = await bob.send_task(plain(alice, parent=uid(7)))
    await carol.send_task(plain(bob, id=uid(7)))
    unread = await bob.send_task(plain(alice, parent=uid(7)))
    await take(bob)
    known = await bob.send_task(plain(alice, parent=uid(7)))
    await carol.cancel_task(uid(7), cascade=True)
    ends = [(await bob.get_task(child.task_id)).outcome for child in (before, unread, known)]
    assert ends == [None, None, "canceled"]


async def test_a_cascade_reaches_what_the_worker_sent_on(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 7: the children that the recipient fanned out go with the task."""
    parent = await alice.send_task(plain(bob))
    await take(bob)
    child = await bob.send_task(plain(carol, parent=parent.task_id))
    await alice.cancel_task(parent.task_id, cascade=True)
    assert (await bob.get_task(child.task_id)).outcome == "canceled"


async def test_no_overdue_task_is_leased_however_many_there_are(
    alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 6: more than one turn of the loop can end."""
    deadline = clock.now_ms() + 1000
    for _ in range(3):
        await alice.send_tasks([plain(bob, deadline_ms=deadline) for _ in range(1000)])
    await alice.send_task(plain(bob, "in time"))
    clock.advance(2000)
    assert (await soon(bob.recv_task())).task.intent_text == "in time"


async def test_pending_results_are_paged(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 8: a listing is complete."""
    for number in range(25):
        await alice.send_task(plain(bob, f"number {number}"))
        await bob.send_result(Result.ok(await take(bob), [Text(str(number))]))
    seen: list[Any] = []
    cursor = None
    while True:
        page = await alice.task_queue(10, state=TaskState.RESULT_PENDING, cursor=cursor)
        seen += [answer.content[0] for answer in page.results]
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == [Text(str(number)) for number in range(25)]


@pytest.mark.parametrize("number", ["9" * 19, "9" * 30, "-1", "٣", "1.0", ""])
async def test_an_impossible_cursor_is_refused(box: OpenMailbox, number: str) -> None:
    """Contract 12: by every listing, with the same code."""
    with refused("bad_cursor"):
        await box.cached_results(cursor=f"slot:{number}")
    with refused("bad_cursor"):
        await box.task_queue(cursor=f"task:{number}")
    with refused("bad_cursor"):
        await box.retry_stale(cursor=number)


async def test_a_holder_who_waits_learns_of_a_graceful_cancel(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: through wait as well as through heartbeat."""
    sent = await alice.send_task(plain(bob))
    delivery = await take(bob)
    waiting = asyncio.create_task(bob.wait_generation(sent.task_id, delivery.generation))
    await turn()
    await bob.get_task(sent.task_id)  # asked later, and answered: so it waits by now
    await alice.cancel_task(sent.task_id, graceful=True)
    assert (await soon(waiting)).cancel_requested


async def test_a_box_says_on_another_event_loop_that_it_is_at_home_elsewhere(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """Contract 22: nobody who waits at home would be woken from there."""

    async def used() -> None:
        for call in (alice.send_task(plain(bob)), box.recent_tasks(), bob.recv_tasks(1, 0), alice.recv_results(1, 0)):
            with refused("malformed"):
                await call

    await asyncio.to_thread(asyncio.run, used())
    assert await nothing_for(bob)


def test_a_box_in_memory_whose_event_loop_has_ended_can_still_be_closed() -> None:
    """As `asyncio.run` leaves it behind when it is called twice."""

    async def opened() -> OpenMailbox:
        box: OpenMailbox = await Mailbox.open("memory:")
        return box

    async def used(box: OpenMailbox) -> None:
        with refused("malformed"):
            await box.recent_tasks()
        await box.close()
        with refused("store_closed"):
            await box.recent_tasks()

    asyncio.run(used(asyncio.run(opened())))


@pytest.mark.parametrize(
    "wrong", [{"step_records_max": 0}, {"page_max": "x"}, {"retention_ms": -5}, {"batch_max": None}, {"dedup_ms": 1}]
)
async def test_a_limit_is_a_number_that_makes_sense(wrong: dict[str, Any]) -> None:
    """Contract 9: all can be set, within reason."""
    with refused("malformed"):
        Limits(**wrong)


async def test_whatever_was_accepted_is_there_after_a_restart(
    alice: Mailbox, bob: Mailbox, clock: ManualClock, reopen: Reopen
) -> None:
    """Contract 1: odd text, big numbers, every sort of block."""
    odd = Task(
        recipient=bob.agent,
        intent_text='nul \0, quote ", line \u2028, emoji 🜚, escape \\u0000',
        task_kind="\t",
        content=[Json({"big": 2**60, "float": 1e300, "key\n": [None, True, {"": []}]}), Text("x" * 10_000)],
    )
    with refused("blank_text"):
        await alice.send_task(odd)
    odd = Task(recipient=bob.agent, intent_text=odd.intent_text, task_kind="k\0", content=odd.content)
    sent = await alice.send_task(odd)
    box = await reopen()
    delivery = await take(box.of("bob@lab"))
    assert delivery.task.id == sent.task_id
    assert (delivery.task.intent_text, delivery.task.content) == (odd.intent_text, odd.content)
    await box.of("bob@lab").send_result(Result.ok(delivery, DONE))
