"""The conversation about a task: what its holder says before the end, and what its sender adds."""

from __future__ import annotations

import asyncio

from covenant import Mailbox, OpenMailbox, Outcome, Result, TaskState, Text
from covenant.mailbox import said
from covenant.model.message import Artifact, Message, Part
from covenant.model.record import Asks
from covenant.model.view import Inputs
from covenant.store.clock import ManualClock

from .support import (
    DONE,
    PATIENCE_MS,
    Reopen,
    drain,
    keyed,
    nothing_back_for,
    nothing_for,
    plain,
    refused,
    requeue,
    soon,
    stale,
    take,
    turn,
    uid,
)

HOUR_MS = 3_600_000


def piece(text: str, name: str = "draft") -> Artifact:
    return Artifact(artifact_id=name, parts=(Part(text=text),))


def texts(heard: Inputs) -> list[str | None]:
    return [entry.message.parts[0].text for entry in heard.inputs]


# --- what a holder says ------------------------------------------------------------------------------------


async def test_each_act_of_a_holder_moves_the_generation_by_one(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 14: progress, a piece of an artifact and a question are one event each."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    moved = [
        await bob.update(delivery, "half way"),
        await bob.artifact(delivery, piece("one")),
        await bob.artifact(delivery.lease_id, piece("two"), append=True, last=True),
        await bob.ask(delivery, "which colour?"),
    ]
    assert [(one.task_id, one.generation) for one in moved] == [(uid(1), number) for number in (3, 4, 5, 6)]
    assert (await alice.get_task(uid(1))).generation == 6
    assert await nothing_back_for(alice)


async def test_each_act_is_one_row_of_its_task(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 28: what was done, by whom, told once."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await bob.update(delivery, "half way")
    await bob.artifact(delivery, piece("one"))
    await bob.ask(delivery, "which colour?")
    await alice.add_message(uid(1), "red")
    rows = [row for row in await box.recent_audit(100) if row.kind != "capability_check"]
    told = [(row.kind, row.task_id, row.actor) for row in rows[-4:]]
    assert told == [
        ("updated", uid(1), "bob@lab"),
        ("chunked", uid(1), "bob@lab"),
        ("asked", uid(1), "bob@lab"),
        ("messaged", uid(1), "alice@lab"),
    ]


async def test_a_question_shows_in_the_task_until_it_is_answered(alice: Mailbox, bob: Mailbox) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    for asks in Asks:
        await bob.ask(delivery, asks=asks)
        entry = await alice.get_task(uid(1))
        assert (entry.state, entry.asks) == (TaskState.IN_FLIGHT, asks)
        await alice.add_message(uid(1), "here")
        assert (await alice.get_task(uid(1))).asks is None


async def test_under_one_receipt_a_thing_is_said_once(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Whose answer was lost on its way says it again."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    for generation, receipt in ((3, "a"), (3, "a"), (4, "b"), (4, "b")):
        assert (await bob.artifact(delivery, piece("x"), append=True, receipt=receipt)).generation == generation
    for _ in range(2):
        assert (await bob.update(delivery, "half way", receipt="c")).generation == 5
    for _ in range(2):
        assert (await bob.ask(delivery, "which?", receipt="d")).generation == 6
    await requeue(box, uid(1))
    again = await take(bob)
    assert (await bob.ask(again, "which?", receipt="d")).generation == 9  # another holder, another receipt


async def test_what_was_said_under_a_receipt_is_not_said_again_behind_something_else(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """The holder gave up waiting, said it by another way and went on; then the first way brings it, too."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    for number in range(10):
        await bob.artifact(delivery, piece("x"), append=True, receipt=f"{number}")
    for number in range(10):
        assert (await bob.artifact(delivery, piece("x"), append=True, receipt=f"{number}")).generation == 12
    assert (await bob.update(delivery, "half way", receipt="0")).generation == 12
    assert (await box.get_task(uid(1))).generation == 12


async def test_what_says_nothing_or_is_nobodys_is_refused(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    with refused("malformed"):
        await bob.ask(delivery, asks="money")
    with refused("malformed"):
        await bob.update(delivery, Message(message_id="m", role="ROLE_AGENT", parts=()))
    with refused("malformed"):
        await bob.artifact(delivery, Artifact(artifact_id="a", parts=(Part(),)))
    with refused("blank_text"):
        await bob.update(delivery, "x", receipt=" ")
    with refused("bad_id"):
        await bob.inputs("no lease")
    for somebody in (alice, carol):
        with refused("unknown_lease"):
            await somebody.update(delivery, "mine")
        with refused("unknown_lease"):
            await somebody.inputs(delivery)
    assert (await bob.get_task(uid(1))).generation == 2


async def test_who_speaks_is_told_by_who_came_in(alice: Mailbox, bob: Mailbox) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await bob.update(delivery, Message(message_id="b", role="ROLE_USER", parts=(Part(text="from bob"),)))
    await alice.add_message(uid(1), Message(message_id="a", role="ROLE_AGENT", parts=(Part(text="from alice"),)))
    assert texts(await bob.inputs(delivery)) == ["from alice"]


async def test_an_old_holder_has_nothing_to_say(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: an older lease is superseded."""
    await alice.send_task(plain(bob, id=uid(1)))
    old = await take(bob)
    await requeue(box, uid(1))
    await take(bob)
    for act in (
        bob.update(old, "late"),
        bob.artifact(old, piece("late")),
        bob.ask(old),
        bob.reject(old, "late"),
        bob.reply(old, "late"),
        bob.inputs(old),
    ):
        with refused("lease_superseded"):
            await act


# --- the end -----------------------------------------------------------------------------------------------


async def test_a_rejected_task_ends_with_the_reason(alice: Mailbox, bob: Mailbox) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    message = Message(message_id="m", role="ROLE_AGENT", parts=(Part(text="not my trade"),))
    moved = await bob.reject(delivery, message)
    assert (await bob.reject(delivery, message)) == moved
    with refused("task_terminal"):
        await bob.reject(delivery, "another reason")
    answer = await drain(alice)
    assert (answer.status, answer.error_message) == ("error", "rejected: not my trade")
    assert (await alice.get_task(uid(1))).outcome is Outcome.REJECTED


async def test_who_did_not_hear_that_it_had_rejected_a_task_is_told_again_however_late(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """Also when the task has left the memory of the store."""
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    message = said("not that one")
    moved = await bob.reject(delivery, message)
    await drain(alice)
    await box.compact()
    assert await bob.reject(delivery, message) == moved


async def test_a_rejected_task_goes_to_its_follower(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: the oldest follower becomes the task to do."""
    await alice.send_task(keyed(bob, id=uid(1)))
    delivery = await take(bob)
    assert (await alice.send_task(keyed(bob, id=uid(2)))).follows == uid(1)
    await bob.reject(delivery, "not I")
    assert (await take(bob)).task.id == uid(2)


async def test_what_came_by_the_mailbox_is_not_answered_by_a_message(alice: Mailbox, bob: Mailbox) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    with refused("not_permitted"):
        await bob.reply(delivery, "hello")
    assert (await alice.get_task(uid(1))).state is TaskState.IN_FLIGHT


async def test_a_result_may_say_something(alice: Mailbox, bob: Mailbox) -> None:
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    message = Message(message_id="m", role="ROLE_AGENT", parts=(Part(text="with regards"),))
    await bob.send_result(Result(delivery.task.id, "ok", (Text("done"),), None, delivery.lease_id, None, message))
    assert (await drain(alice)).result.message == message


# --- what a sender adds ------------------------------------------------------------------------------------


async def test_a_message_to_an_open_task_is_input_for_its_holder(alice: Mailbox, bob: Mailbox) -> None:
    """A second run is never started by it."""
    await alice.send_task(plain(bob, id=uid(1)))
    assert (await alice.add_message(uid(1), "before")).generation == 2
    delivery = await take(bob)
    assert (await alice.add_message(uid(1), "after")).generation == 4
    heard = await bob.inputs(delivery)
    assert (heard.task_id, heard.generation, texts(heard)) == (uid(1), 4, ["before", "after"])
    assert texts(await bob.inputs(delivery, heard.inputs[0].number)) == ["after"]
    assert texts(await bob.inputs(delivery, heard.inputs[-1].number)) == []
    assert await nothing_for(bob)


async def test_a_message_may_insist_on_a_generation(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 16: mismatch changes nothing and tells both values."""
    await alice.send_task(plain(bob, id=uid(1)))
    await alice.add_message(uid(1), "in time", 1)
    with refused("generation_mismatch") as caught:
        await alice.add_message(uid(1), "late", if_generation=1)
    assert (caught.value.details["expected"], caught.value.details["current"]) == (1, 2)
    assert texts(await bob.inputs(await take(bob))) == ["in time"]


async def test_only_the_sender_adds_and_only_while_it_is_open(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    with refused("not_permitted"):
        await bob.add_message(uid(1), "mine")
    with refused("unknown_task"):
        await carol.add_message(uid(1), "mine")
    await box.add_message(uid(1), "the operator may")
    delivery = await take(bob)
    await bob.send_result(Result.ok(delivery, DONE))
    with refused("task_terminal"):
        await alice.add_message(uid(1), "late")


async def test_a_wait_for_input_ends_when_there_is_some(alice: Mailbox, bob: Mailbox) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    assert (await bob.inputs(delivery, wait_ms=1)).inputs == []
    waiting = asyncio.ensure_future(bob.inputs(delivery, wait_ms=None))
    await turn()
    await bob.update(delivery, "still here")  # a change, but no input
    await turn()
    await alice.add_message(uid(1), "go on")
    assert texts(await soon(waiting)) == ["go on"]


async def test_a_wait_for_input_ends_when_a_cancel_is_asked_for(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: it reaches a holder that waits."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    waiting = asyncio.ensure_future(bob.inputs(delivery, wait_ms=None))
    await turn()
    await alice.cancel_task(uid(1), reason="too dear", graceful=True)
    heard = await soon(waiting)
    assert (heard.inputs, heard.cancel_requested, heard.cancel_reason) == ([], True, "too dear")
    known = asyncio.ensure_future(bob.inputs(delivery, wait_ms=PATIENCE_MS, cancel_known=True))
    await turn()
    await alice.add_message(uid(1), "after all")
    assert texts(await soon(known)) == ["after all"]


async def test_a_wait_for_input_ends_with_the_task(alice: Mailbox, bob: Mailbox) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    waiting = asyncio.ensure_future(bob.inputs(delivery, wait_ms=None))
    await turn()
    await alice.cancel_task(uid(1))
    with refused("task_terminal"):
        await soon(waiting)


async def test_nothing_is_asked_of_a_sender_that_was_quicker(alice: Mailbox, bob: Mailbox) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await alice.add_message(uid(1), "red")
    assert (await bob.ask(delivery, "which colour?", after=0)).generation == 3
    assert (await alice.get_task(uid(1))).asks is None
    (heard,) = (await bob.inputs(delivery)).inputs
    assert (await bob.ask(delivery, "which size?", after=heard.number)).generation == 4
    assert (await alice.get_task(uid(1))).asks is Asks.INPUT


# --- time, crashes, restarts -------------------------------------------------------------------------------


async def test_who_waits_for_input_is_not_stale(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 12: a holder waiting for input is not stale; the gate says why it leaves it alone."""
    await alice.send_task(keyed(bob, id=uid(1)))
    delivery = await take(bob)
    await bob.ask(delivery, "which colour?")
    clock.advance(HOUR_MS)
    for min_age_ms in (0, HOUR_MS // 2):
        report = await box.retry_stale(stale(min_lease_age_ms=min_age_ms))
        assert [(skip.reason, skip.lease_age_ms) for skip in report.skipped] == [("waiting_for_input", 0)]
        assert report.requeued == []
    assert (await box.task_queue(10, state="in_flight", min_lease_age_ms=1)).tasks == []
    await alice.add_message(uid(1), "red")  # from here on it is the holder's turn
    assert (await box.retry_stale(stale(min_lease_age_ms=HOUR_MS))).skipped[0].reason == "lease_too_young"
    clock.advance(HOUR_MS)
    assert [one.task_id for one in (await box.retry_stale(stale(min_lease_age_ms=HOUR_MS))).requeued] == [uid(1)]


async def test_the_next_holder_hears_everything_from_the_start(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    first = await take(bob)
    await bob.ask(first, "which colour?")
    await alice.add_message(uid(1), "red")
    await requeue(box, uid(1))
    await alice.add_message(uid(1), "or blue")
    second = await take(bob)
    assert texts(await bob.inputs(second)) == ["red", "or blue"]


async def test_the_dialog_survives_a_restart(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await bob.artifact(delivery, piece("one"), receipt="a")
    await alice.add_message(uid(1), "red")
    await bob.ask(delivery, "which size?", receipt="b")
    box = await reopen()
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    assert (await alice.get_task(uid(1))).asks is Asks.INPUT
    assert (await bob.ask(delivery, "which size?", receipt="b")).generation == 5
    assert texts(await bob.inputs(delivery)) == ["red"]
    await alice.add_message(uid(1), "small")
    assert texts(await bob.inputs(delivery, wait_ms=PATIENCE_MS)) == ["red", "small"]
    await bob.reject(delivery, "sold out")
    assert (await drain(alice)).error_message == "rejected: sold out"
