"""What has finished stays for a while; what is open stays."""

from __future__ import annotations

from typing import Any

import pytest

from covenant import Json, Limits, Mailbox, OpenMailbox, TaskState, Text
from covenant.model.limits import DEDUP_MS, RETENTION_MS
from covenant.store.clock import ManualClock

from .support import (
    DONE,
    YEAR_MS,
    Reopen,
    answer_next,
    drain,
    finish,
    keyed,
    nothing_back_for,
    nothing_for,
    plain,
    refused,
    requeue,
    take,
    uid,
)


async def test_a_drained_result_can_be_read_again(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 8: a lost reply loses no result."""
    await alice.send_task(plain(bob, id=uid(1)))
    assert await alice.get_result(uid(1)) is None
    await answer_next(bob)
    before = await alice.get_result(uid(1))
    drained = await drain(alice)
    assert await nothing_back_for(alice)
    assert before == drained == await alice.get_result(uid(1)) == await bob.get_result(uid(1))
    assert await alice.recent_results() == [drained]
    with refused("unknown_task"):
        await carol.get_result(uid(1))


async def test_a_drained_result_can_be_read_again_after_a_restart(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 8: and so across restarts."""
    await alice.send_task(plain(bob, id=uid(1)))
    await answer_next(bob)
    drained = await drain(alice)
    alice = (await reopen()).of("alice@lab")
    assert await alice.get_result(uid(1)) == drained


@pytest.mark.parametrize("limits", [Limits(), Limits(retention_ms=5000)], ids=["default", "set"])
async def test_a_result_is_readable_for_the_retention_window(
    alice: Mailbox, bob: Mailbox, clock: ManualClock, limits: Limits
) -> None:
    """Contract 9: resolved tasks live for `retention`, and then are unknown."""
    await finish(alice, bob, plain(bob, id=uid(1)))
    clock.advance(limits.retention_ms)
    assert await alice.get_result(uid(1)) is not None
    clock.advance(1)
    with refused("unknown_task"):
        await alice.get_result(uid(1))
    with refused("unknown_task"):
        await alice.get_task(uid(1))
    assert await alice.recent_tasks() == []
    assert await alice.recent_results() == []


async def test_a_result_drained_late_can_still_be_read_again(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 8: the window is there for the reply that was lost, so it opens with the drain."""
    await alice.send_task(plain(bob, id=uid(1)))
    await answer_next(bob)
    clock.advance(RETENTION_MS + 1)
    drained = await drain(alice)
    assert await alice.get_result(uid(1)) == drained


async def test_nothing_open_is_ever_dropped(box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 9: queued, in flight, following or undrained, a task outlives retention and compaction."""
    await alice.send_task(plain(bob, id=uid(1)))
    await answer_next(bob)
    await alice.send_task(keyed(bob, id=uid(2)))
    held = await take(bob)
    await alice.send_task(keyed(bob, id=uid(3)))
    await alice.send_task(plain(bob, id=uid(4)))
    clock.advance(YEAR_MS)
    assert (await box.compact()).tasks_dropped == 0
    assert (await box.compact(older_than_ms=0)).tasks_dropped == 0
    states = [(await alice.get_task(uid(number))).state for number in (1, 2, 3, 4)]
    assert states == [TaskState.RESULT_PENDING, TaskState.IN_FLIGHT, TaskState.QUEUED, TaskState.QUEUED]
    assert (await drain(alice)).task_id == uid(1)
    assert (await bob.heartbeat(held)).task_id == uid(2)
    assert (await take(bob)).task.id == uid(4)


async def test_a_requeued_task_is_not_taken_for_finished(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 9: an attempt that ended is not the end of the task."""
    await alice.send_task(plain(bob, id=uid(1)))
    await take(bob)
    await requeue(box, uid(1))
    assert (await box.compact(older_than_ms=0)).tasks_dropped == 0
    assert (await take(bob)).attempt == 2


async def test_compaction_lets_go_of_what_is_resolved(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 9: it drops the old, keeps the young, and has nothing to do the second time."""
    for number in (1, 2):
        await finish(alice, bob, plain(bob, id=uid(number)))
    clock.advance(1000)
    await finish(alice, bob, plain(bob, id=uid(3)))
    assert (await box.compact(older_than_ms=500)).tasks_dropped == 2
    assert (await box.compact(older_than_ms=500)).tasks_dropped == 0
    assert [task.id for task in await box.recent_tasks()] == [uid(3)]
    with refused("unknown_task"):
        await alice.get_task(uid(1))
    assert await alice.get_result(uid(3)) is not None


async def test_what_was_compacted_away_does_not_come_back(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 9: a compaction that asks for less takes nothing back."""
    await finish(alice, bob, plain(bob, id=uid(1)))
    clock.advance(1000)
    await finish(alice, bob, plain(bob, id=uid(2)))
    await box.compact(older_than_ms=500)
    await box.compact(older_than_ms=5000)
    with refused("unknown_task"):
        await alice.get_task(uid(1))
    assert (await alice.get_task(uid(2))).task.id == uid(2)


async def test_only_the_operator_compacts(alice: Mailbox) -> None:
    """Contract 9: a peer does not drop the history of others."""
    with refused("not_permitted"):
        await alice.compact(older_than_ms=0)


@pytest.mark.parametrize("compacted", [False, True], ids=["kept", "compacted"])
async def test_the_id_of_a_dropped_task_stays_taken(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock, compacted: bool
) -> None:
    """Contract 9: id and digest stay as a tombstone, so a late repeat of a send is not done again."""
    content = (Json({"a": 1, "b": 2}), Text("x"))
    await finish(alice, bob, plain(bob, id=uid(1), content=content))
    clock.advance(RETENTION_MS + 1)
    if compacted:
        assert (await box.compact()).tasks_dropped == 1
    assert (await alice.send_task(plain(bob, id=uid(1), content=content))).duplicate
    with refused("task_conflict"):
        await alice.send_task(plain(bob, "else", id=uid(1)))
    assert await nothing_for(bob)


async def test_a_tombstone_survives_a_restart(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock, reopen: Reopen
) -> None:
    """Contract 9: the id of a dropped task stays taken across restarts."""
    await finish(alice, bob, plain(bob, id=uid(1)))
    clock.advance(RETENTION_MS + 1)
    await box.compact()
    box = await reopen()
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    assert (await alice.send_task(plain(bob, id=uid(1)))).duplicate
    with refused("task_conflict"):
        await alice.send_task(plain(bob, "else", id=uid(1)))


@pytest.mark.parametrize("compacted", [False, True], ids=["kept", "compacted"])
async def test_an_id_is_free_again_after_dedup(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock, compacted: bool
) -> None:
    """Contract 9: after `dedup` the id is a new task, which has nothing of the old one."""
    await finish(alice, bob, plain(bob, id=uid(1), parent=uid(7)))
    await finish(alice, bob, plain(bob, id=uid(2)))
    clock.advance(DEDUP_MS + 1)
    if compacted:
        await box.compact()
    sent = await alice.send_task(plain(bob, "else", id=uid(1), parent=uid(8)))
    assert (sent.duplicate, sent.generation) == (False, 1)
    assert [task.id for task in await box.recent_tasks()] == [uid(1)]
    assert await box.recent_results() == []
    assert [entry.task.intent_text for entry in (await box.task_queue()).tasks] == ["else"]
    with refused("unknown_task"):
        await box.task_tree(uid(7))
    assert (await take(bob)).attempt == 1


async def test_a_reused_id_is_listed_once_when_it_is_done(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 9: the second life of an id leaves one task and one result, and compaction takes it alone."""
    await finish(alice, bob, plain(bob, id=uid(1)))
    clock.advance(DEDUP_MS + 1)
    await finish(alice, bob, plain(bob, "else", id=uid(1)))
    await alice.send_task(plain(bob, id=uid(3)))
    assert [task.id for task in await box.recent_tasks()] == [uid(3), uid(1)]
    assert [answer.task_id for answer in await box.recent_results()] == [uid(1)]
    clock.advance(1000)
    await box.compact(older_than_ms=500)
    assert [task.id for task in await box.recent_tasks()] == [uid(3)]


@pytest.mark.parametrize("limits", [Limits(retention_ms=1000, dedup_ms=2000)], ids=["short"])
async def test_dedup_can_be_set(alice: Mailbox, bob: Mailbox, box: OpenMailbox, clock: ManualClock) -> None:
    """Contract 9: all of these times can be set."""
    await finish(alice, bob, plain(bob, id=uid(1)))
    clock.advance(1500)
    await box.compact()
    assert (await alice.send_task(plain(bob, id=uid(1)))).duplicate
    clock.advance(1000)
    assert (await box.compact()).tombstones_dropped == 1
    assert not (await alice.send_task(plain(bob, "else", id=uid(1)))).duplicate


async def test_cached_results_survive_compaction(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 9: compaction removes the task and keeps what it answered under its key."""
    await finish(alice, bob, keyed(bob, id=uid(1)))
    clock.advance(RETENTION_MS + 1)
    assert (await box.compact()).tasks_dropped == 1
    assert (await alice.send_task(keyed(bob, id=uid(2)))).replayed
    assert (await drain(alice)).content == DONE
    assert await nothing_for(bob)


async def test_compaction_is_the_same_after_a_restart(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock, reopen: Reopen
) -> None:
    """Contract 9: what was dropped stays dropped, what was kept is whole."""
    await finish(alice, bob, plain(bob, id=uid(1)))
    clock.advance(1000)
    await finish(alice, bob, plain(bob, id=uid(2)))
    await alice.send_task(plain(bob, id=uid(3)))
    await box.compact(older_than_ms=500)
    kept = [await box.get_task(uid(number)) for number in (2, 3)]
    box = await reopen()
    assert [task.id for task in await box.recent_tasks()] == [uid(3), uid(2)]
    assert [await box.get_task(uid(number)) for number in (2, 3)] == kept
    with refused("unknown_task"):
        await box.get_task(uid(1))


async def test_a_clock_set_back_after_compaction_hides_no_new_result(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 8: what was drained a moment ago can be read again, wherever the clock was before."""
    await finish(alice, bob, plain(bob, id=uid(1)))
    clock.advance(60_000)
    await box.compact(older_than_ms=0)
    clock.advance(-30_000)
    await finish(alice, bob, plain(bob, id=uid(2)))
    assert await alice.get_result(uid(2)) is not None


@pytest.mark.parametrize("age", [-1, True, "1d"])
async def test_an_age_that_is_none_is_refused_as_an_age(box: OpenMailbox, age: Any) -> None:
    """Contract 9: `older_than_ms` is how old, and not a time."""
    with refused("malformed") as caught:
        await box.compact(older_than_ms=age)
    assert "Unix" not in caught.value.message
