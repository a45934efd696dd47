"""Signals: heard one by one, in order, once; and with one a run may begin."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covenant import Limits, Mailbox, OpenMailbox, Result, TaskState
from covenant.model.error import TooLarge
from covenant.model.run import Memo, RunStatus, Wait
from covenant.store.clock import ManualClock

from .runs import DONE, RUN, begin, parked_on, plainly, raw, says, step
from .support import keyed, nothing_for, plain, refused, take, uid

GO = Wait(signals=("go",))


async def test_signals_are_heard_one_by_one_in_their_order(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: one per wait, the oldest first."""
    delivery, _ = await begin(alice, bob)
    for number in range(3):
        await alice.signal_run(RUN, "go", number)
    standing = await bob.commit_run(delivery, step(2, wait=GO))
    heard = []
    for number in (3, 4, 5):
        (signal,) = standing.signals
        heard.append(plainly(signal.value))
        standing = await bob.commit_run(delivery, step(number, takes=[signal.id], wait=GO))
    assert heard == [0, 1, 2]
    assert standing.parked and not standing.signals


async def test_a_signal_is_consumed_in_the_commit_that_records_it(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: a commit that is refused leaves it where it was; one that counts takes it for good."""
    delivery, _ = await begin(alice, bob)
    sent = await alice.signal_run(RUN, "go")
    with refused("wrong_step"):
        await bob.commit_run(delivery, step(7, takes=[sent.signal_id]))
    assert (await bob.get_run(RUN)).signals == ["go"]
    taking = step(2, takes=[sent.signal_id], memos=[Memo("heard", raw("go"))])
    await bob.commit_run(delivery, taking)
    await bob.commit_run(delivery, taking)
    assert (await bob.get_run(RUN)).signals == []
    with refused("malformed"):
        await bob.commit_run(delivery, step(3, takes=[sent.signal_id]))


async def test_a_signal_is_taken_once_in_a_commit(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: named twice, it would have two effects."""
    delivery, _ = await begin(alice, bob)
    sent = await alice.signal_run(RUN, "go", key="k")
    with refused("malformed"):
        await bob.commit_run(delivery, step(2, takes=[sent.signal_id, sent.signal_id]))


async def test_a_signal_under_a_key_is_heard_once(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 22: also after it was taken; the key is its sender's own."""
    delivery, _ = await begin(alice, bob)
    first = await alice.signal_run(RUN, "go", 1, key="k")
    again = await alice.signal_run(RUN, "go", 1, key="k")
    assert (first.duplicate, again.duplicate, again.signal_id) == (False, True, first.signal_id)
    assert not (await bob.signal_run(RUN, "go", 2, key="k")).duplicate
    assert (await bob.get_run(RUN)).signals == ["go", "go"]
    await bob.commit_run(delivery, step(2, takes=[first.signal_id]))
    assert (await alice.signal_run(RUN, "go", 1, key="k")).duplicate
    assert (await bob.get_run(RUN)).signals == ["go"]


@pytest.mark.parametrize("limits", [Limits(signals_max=3)])
async def test_a_full_inbox_takes_no_more(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: nothing that was taken in is dropped for it; what is heard makes room."""
    delivery, _ = await begin(alice, bob)
    sent = [await alice.signal_run(RUN, "go", number) for number in range(3)]
    with refused("too_large"):
        await alice.signal_run(RUN, "go", 3)
    with refused("too_large"):
        await alice.add_message(RUN, "and this")
    await bob.commit_run(delivery, step(2, takes=[sent[0].signal_id]))
    await alice.signal_run(RUN, "go", 3)
    seen = await bob.look_around(delivery, GO)
    assert plainly(seen.signals[0].value) == 1


@pytest.mark.parametrize("limits", [Limits(signals_max=3)])
async def test_of_many_signals_at_once_as_many_as_there_is_room_for_are_taken_in(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: those that are decided together are counted, too."""
    delivery, _ = await begin(alice, bob)
    told = await asyncio.gather(*(alice.signal_run(RUN, "go", n) for n in range(8)), return_exceptions=True)
    assert sum(isinstance(one, TooLarge) for one in told) == 5
    first = (await bob.look_around(delivery, GO)).signals[0].id
    await bob.commit_run(delivery, step(2, takes=[first]))
    told = await asyncio.gather(*(alice.signal_run(RUN, "go", n) for n in range(4)), return_exceptions=True)
    assert sum(isinstance(one, TooLarge) for one in told) == 3


async def test_a_run_waits_for_any_of_several_signals(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: for each name the oldest that fits is told."""
    delivery, _ = await begin(alice, bob)
    for name in ("no", "yes", "yes"):
        await alice.signal_run(RUN, name)
    seen = await bob.look_around(delivery, Wait(signals=("yes", "no", "maybe")))
    assert [one.name for one in seen.signals] == ["yes", "no"]


@pytest.mark.parametrize("limits", [Limits(batch_max=2)])
async def test_so_many_are_told_at_once_as_one_commit_takes(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: the rest waits."""
    delivery, _ = await begin(alice, bob)
    for number in range(3):
        await alice.signal_run(RUN, "go", number)
    seen = await bob.look_around(delivery, GO, every=True)
    assert [plainly(one.value) for one in seen.signals] == [0, 1]
    await bob.commit_run(delivery, step(2, takes=[one.id for one in seen.signals]))
    seen = await bob.look_around(delivery, GO, every=True)
    assert [plainly(one.value) for one in seen.signals] == [2]


async def test_messages_before_the_run_began_wait_for_it(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 20: what was said while nobody listened is not lost."""
    await alice.send_task(plain(bob, id=RUN))
    await alice.add_message(RUN, says("first"))
    await alice.add_message(RUN, says("second", signal="note"))
    delivery = await take(bob)
    await bob.commit_run(delivery, step(1))
    seen = await bob.look_around(delivery, Wait(signals=("message", "note")))
    texts = [one.message.parts[0].text for one in seen.signals if one.message is not None]
    assert ([one.name for one in seen.signals], texts) == (["message", "note"], ["first", "second"])


async def test_a_signal_before_the_run_began_waits_for_it(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: the task is there, its run is not yet."""
    await alice.send_task(plain(bob, id=RUN))
    await alice.signal_run(RUN, "go", 1)
    delivery = await take(bob)
    standing = await bob.commit_run(delivery, step(1, wait=GO))
    assert [plainly(one.value) for one in standing.signals] == [1]


async def test_a_run_begins_with_a_signal(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: start or signal, in one commit."""
    task = plain(bob, "watch the door")
    first = await alice.signal_run(RUN, "event", 1, key="a", start=task)
    assert (first.started, first.duplicate, first.generation) == (True, False, 1)
    second = await alice.signal_run(RUN, "event", 2, key="b", start=task)
    assert (second.started, second.duplicate) == (False, False)
    again = await alice.signal_run(RUN, "event", 1, key="a", start=task)
    assert (again.started, again.duplicate) == (False, True)
    delivery = await take(bob)
    assert (delivery.task.id, delivery.task.intent_text, delivery.task.sender) == (RUN, "watch the door", alice.agent)
    assert await nothing_for(bob)
    await bob.commit_run(delivery, step(1))
    assert (await bob.get_run(RUN)).signals == ["event", "event"]


async def test_a_start_that_is_none_is_refused_with_its_signal(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: neither is there."""
    with refused("blank_text"):
        await alice.signal_run(RUN, "event", start=plain(bob, " "))
    with refused("unknown_task"):
        await alice.get_task(RUN)


async def test_a_run_that_has_ended_hears_nothing(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: nor does it begin anew under its id."""
    delivery, _ = await begin(alice, bob)
    await bob.commit_run(delivery, step(2, result=Result(RUN, "ok", DONE)))
    for start in (None, plain(bob)):
        with refused("task_terminal"):
            await alice.signal_run(RUN, "go", start=start)


async def test_a_start_under_an_id_that_others_use_is_a_conflict(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox, clock: ManualClock
) -> None:
    """Contract 5, 22: as any send. Nothing is kept, and nothing is told of what took the id."""
    delivery, _ = await begin(alice, bob)
    with refused("task_conflict"):
        await carol.signal_run(RUN, "go", 1, start=plain(bob))
    assert (await bob.get_run(RUN)).signals == []
    await bob.commit_run(delivery, step(2, result=Result(RUN, "ok", DONE)))
    await alice.recv_result()
    clock.advance(1)
    await box.compact(older_than_ms=0)
    with refused("task_conflict"):
        await carol.signal_run(RUN, "go", 1, start=plain(bob))


async def test_a_run_of_ones_own_that_is_gone_is_not_started_again(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 9, 22: its id stays taken; a signal to it would be kept for nobody."""
    task = plain(bob)
    await alice.signal_run(RUN, "go", 1, start=task)
    delivery = await take(bob)
    await bob.commit_run(delivery, step(1, result=Result(RUN, "ok", DONE)))
    await alice.recv_result()
    clock.advance(1)
    await box.compact(older_than_ms=0)
    with refused("unknown_task"):
        await alice.signal_run(RUN, "go", 2, start=task)
    with refused("task_conflict"):
        await alice.signal_run(RUN, "go", 2, start=plain(bob, "else"))


@pytest.mark.parametrize("name", ["", " ", "effect:charge", "approve.*"])
async def test_a_name_that_is_none_is_refused(alice: Mailbox, bob: Mailbox, name: str) -> None:
    """Contract 21: what decides about an effect is not sent by anybody; a pattern is for who waits."""
    await parked_on(alice, bob, GO)
    with refused("invalid_input"):
        await alice.signal_run(RUN, name)
    assert (await bob.get_run(RUN)).status is RunStatus.AWAITING_INPUT


async def test_a_message_cannot_decide_about_an_effect(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 21: whatever name it gives."""
    await parked_on(alice, bob, Wait(signals=("effect:charge",), doubt="charge"))
    await alice.add_message(RUN, says("done", signal="effect:charge"))
    await alice.add_message(RUN, says("really"))
    assert (await bob.get_run(RUN)).signals == ["message", "message"]
    assert (await bob.get_task(RUN)).state is TaskState.PARKED
    assert await nothing_for(bob)


@pytest.mark.parametrize("name", ["approve.*", "**", "go" * 600, "go\0"], ids=["pattern", "any", "long", "nul"])
@pytest.mark.parametrize("begun", [True, False])
async def test_a_message_gives_no_name_that_a_signal_cannot_have(
    alice: Mailbox, bob: Mailbox, name: str, begun: bool
) -> None:
    """Contract 22: it is heard as a message, whether the run has begun or not."""
    await alice.send_task(plain(bob, id=RUN))
    delivery = await take(bob)
    if begun:
        await bob.commit_run(delivery, step(1))
    await alice.add_message(RUN, says("yes", signal=name))
    await bob.commit_run(delivery, step(2 if begun else 1))
    assert (await bob.get_run(RUN)).signals == ["message"]
    with refused("invalid_input"):
        await alice.signal_run(RUN, name)


async def test_only_who_sees_a_run_signals_it(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 27: for others there is none."""
    await begin(alice, bob)
    with refused("unknown_task"):
        await carol.signal_run(RUN, "go")
    with refused("unknown_task"):
        await alice.signal_run(uid(2), "go")


@pytest.mark.parametrize(
    "value",
    [float("nan"), [float("inf")], object(), {None: 1}, "\ud800"],
    ids=["nan", "infinity", "object", "key", "surrogate"],
)
async def test_a_value_that_json_does_not_have_is_refused(alice: Mailbox, bob: Mailbox, value: Any) -> None:
    """Contract 22: a run hears what was said, and not what an encoder made of it."""
    await parked_on(alice, bob, GO)
    with refused("malformed"):
        await alice.signal_run(RUN, "go", value)
    assert (await bob.get_run(RUN)).signals == []


async def test_a_start_that_begins_no_run_is_refused_and_keeps_no_signal(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11, 22: under the idempotency key of an open task, or of a cached result, there would be no run that
    receives the signal."""
    leader = await alice.send_task(keyed(bob))
    held_by = []
    for is_cached in (False, True):
        if is_cached:
            await bob.send_result(Result.ok(await take(bob), DONE))
        with refused("not_a_run") as refusal:
            await alice.signal_run(RUN, "go", 1, start=keyed(bob))
        held_by.append(refusal.value.details["held_by"])
        with refused("unknown_task"):
            await alice.get_task(RUN)
    assert held_by == [leader.task_id] * 2
    await alice.send_task(plain(bob, id=RUN))  # the id is free
    assert (await bob.get_task(RUN)).generation == 1
    started = await alice.signal_run(uid(7), "go", 1, start=keyed(bob, key="another"))
    assert (started.started, started.generation) == (True, 1)


async def test_a_start_is_the_run_that_is_signaled(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 34: another id than that of the run would be accepted, and never looked at; the same one is no harm."""
    for is_there in (False, True):
        with refused("malformed") as refusal:
            await alice.signal_run(RUN, "go", 1, start=plain(bob, id=uid(7)))
        assert refusal.value.details["field"] == "start.id"
        assert (await alice.signal_run(RUN, "go", 1, start=plain(bob, id=RUN.upper()))).started != is_there
    with refused("unknown_task"):
        await alice.get_task(uid(7))
