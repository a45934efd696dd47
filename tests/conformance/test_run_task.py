"""The tasks of a run: sent once, answered to the run alone, let go when it needs them no more."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec import structs

from covenant import Delivery, Mailbox, OpenMailbox, Outcome, Result, TaskState, Text
from covenant.model.run import RunStatus, Wait
from covenant.store.clock import ManualClock

from .runs import DONE, RUN, answer, answered, begin, is_so, memo, parked_on, part, parts, raw, step
from .support import drain, nothing_back_for, nothing_for, plain, refused, take, uid


async def is_resolved(box: Mailbox, number: int) -> bool:
    return (await box.get_task(uid(number))).state is TaskState.RESOLVED


async def test_the_same_task_again_is_the_same_task(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 19: its id tells what it asks for; in the same commit, and in a later one."""
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(10, carol), part(10, carol)]))
    await bob.commit_run(delivery, step(2, tasks=[part(10, carol)]))
    await answered(carol)
    assert await nothing_for(carol)
    standing = await bob.commit_run(delivery, step(3, tasks=[part(10, carol)], wait=Wait(tasks=parts(10))))
    assert [one.content for one in standing.outcomes] == [DONE]
    assert await nothing_for(carol)


async def test_the_same_id_with_other_content_is_a_conflict(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 19: never a silent success; nor is a task that somebody else has sent the run's own."""
    other = structs.replace(part(10, carol), intent_text="something else")
    await alice.send_task(structs.replace(part(20, carol), sender=None))
    delivery, _ = await begin(alice, bob)
    with refused("task_conflict"):
        await bob.commit_run(delivery, step(2, tasks=[part(10, carol), other]))
    await bob.commit_run(delivery, step(2, tasks=[part(10, carol)]))
    for conflicting in (other, part(20, carol)):
        with refused("task_conflict"):
            await bob.commit_run(delivery, step(3, tasks=[conflicting]))
    assert (await bob.get_run(RUN)).step == 2


async def test_a_result_is_for_the_run_alone(alice: Mailbox, bob: Mailbox, carol: Mailbox, box: OpenMailbox) -> None:
    """Contract 22: it is not drained by whoever asks for results."""
    await parked_on(alice, bob, Wait(tasks=parts(10)), tasks=[part(10, carol)])
    delivery = await take(carol)
    await carol.send_result(Result.partial(delivery, (Text("half"),)))
    await carol.send_result(Result.ok(delivery, DONE))
    assert await nothing_back_for(bob)
    assert await box.try_recv_result_for() is None
    found = await bob.get_result(uid(10))
    assert found is not None and found.content == DONE
    assert (await bob.get_task(uid(10))).state is TaskState.RESULT_PENDING


@pytest.mark.parametrize("when", ["before", "with"])
async def test_what_ends_behind_a_checkpoint_that_forgot_it_is_let_go(
    alice: Mailbox, bob: Mailbox, carol: Mailbox, when: str
) -> None:
    """Contract 20: nobody waits for it, and a run may live for ever."""
    is_before = when == "before"
    first = step(1, tasks=[part(2, carol)], memos=[memo(2)]) if is_before else step(1)
    delivery, _ = await begin(alice, bob, first)
    asked = () if is_before else [part(2, carol)]
    second = step(2, checkpoint=raw({"phase": 2}), tasks=[*asked, part(3, carol)], memos=[memo(3)])
    await bob.commit_run(delivery, second)
    await bob.commit_run(delivery, step(3, tasks=[part(4, carol)], memos=[memo(4)]))
    await is_so(lambda: _is_swept_to(bob, delivery, 1))
    for _ in range(3):
        await answered(carol)
    assert [await is_resolved(bob, number) for number in (2, 3, 4)] == [True, False, False]
    wait = Wait(tasks=parts(2, 3))  # asked for again, it is still there
    assert {result.task_id for result in (await bob.look_around(delivery, wait)).outcomes} == parts(2, 3)


async def test_what_no_checkpoint_forgot_is_kept_although_no_step_names_it(
    alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 9, 20: a task of before any checkpoint, and one of behind it; both until the end of the run."""
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(2, carol)]))
    await answered(carol)
    assert not await is_resolved(bob, 2)
    await bob.commit_run(delivery, step(2, checkpoint=raw({"phase": 2})))
    await bob.commit_run(delivery, step(3, tasks=[part(3, carol)]))
    await answered(carol)
    assert not await is_resolved(bob, 3)
    await bob.commit_run(delivery, step(4, result=Result(RUN, "ok", DONE)))
    for number in (2, 3):
        await is_so(partial(is_resolved, bob, number))


async def test_a_checkpoint_lets_go_of_nobody_elses_task(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 20, 22: a step may name any task; a result that waits for its sender is not drained by that."""
    await alice.send_task(plain(carol, id=uid(2)))
    await answered(carol)
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(3, carol)], memos=[memo(2), memo(3)]))
    await answered(carol)
    await bob.commit_run(delivery, step(2, checkpoint=raw({"phase": 2})))
    await is_so(lambda: is_resolved(bob, 3))
    assert not await is_resolved(alice, 2)
    assert (await drain(alice)).task_id == uid(2)


async def test_what_is_waited_for_behind_a_checkpoint_is_kept(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 20: asked for again, it is remembered again, until the next checkpoint."""
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(2, carol)], memos=[memo(2)]))
    again = step(3, tasks=[part(2, carol)], memos=[memo(2)], wait=Wait(tasks=parts(2)))
    await bob.commit_run(delivery, step(2, checkpoint=raw({"phase": 2})))
    assert (await bob.commit_run(delivery, again)).parked
    await answered(carol)
    assert not await is_resolved(bob, 2)
    delivery = await take(bob)
    await bob.commit_run(delivery, step(4, checkpoint=raw({"phase": 3})))
    await is_so(lambda: is_resolved(bob, 2))


@pytest.mark.parametrize("steps", [1, 200], ids=["soon", "much-later"])
async def test_what_is_asked_for_again_behind_a_checkpoint_is_kept_whatever_is_waited_for(
    alice: Mailbox, bob: Mailbox, carol: Mailbox, steps: int
) -> None:
    """Contract 9, 20: a run that remembers it will come to it, when it has heard of something else."""
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(2, carol)], memos=[memo(2)]))
    await bob.commit_run(delivery, step(2, checkpoint=raw({"phase": 2})))
    last = 2 + steps
    for number in range(3, last):
        await bob.commit_run(delivery, step(number))
    again = step(last, tasks=[part(2, carol)], memos=[memo(2)], wait=Wait(signals=("go",)))
    assert (await bob.commit_run(delivery, again)).parked
    await answered(carol)
    assert not await is_resolved(bob, 2)


async def _is_swept_to(bob: Mailbox, delivery: Delivery, number: int) -> bool:
    return all(seen.number > number for seen in (await bob.load_run(delivery)).steps)


async def test_a_checkpoint_lets_go_of_what_came_before(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 9, 20: what the run has forgotten is resolved; what it still needs is not."""
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(10, carol)], memos=[memo(10)]))
    await answered(carol)
    await bob.commit_run(delivery, step(2, memos=[memo(10)]))
    assert not await is_resolved(bob, 10)
    await bob.commit_run(delivery, step(3, checkpoint=raw({"phase": 2})))
    await is_so(lambda: is_resolved(bob, 10))
    await bob.commit_run(delivery, step(4, tasks=[part(11, carol)], memos=[memo(11)]))
    await answered(carol)
    loaded = await bob.load_run(delivery)
    assert [one.task_id for seen in loaded.steps for one in seen.outcomes] == [uid(11)]
    assert not await is_resolved(bob, 11)


async def test_the_end_lets_go_of_everything(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 9: also of tasks that end after their run; those it leaves to their fate."""
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(10, carol), part(11, carol)], memos=[memo(10), memo(11)]))
    await answered(carol)
    await bob.commit_run(delivery, step(2, result=Result(RUN, "ok", DONE)))
    await is_so(lambda: is_resolved(bob, 10))
    assert (await bob.get_task(uid(11))).state is TaskState.QUEUED
    await answered(carol)
    await is_so(lambda: is_resolved(bob, 11))
    assert await nothing_back_for(bob)


async def test_the_cancel_of_a_run_cancels_its_open_tasks(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 7, 23: whether it is parked or not; nobody would hear what they come to."""
    await parked_on(alice, bob, Wait(tasks=parts(10, 11)), tasks=[part(10, carol), part(11, carol)])
    held = await take(carol)
    await alice.cancel_task(RUN, reason="enough")
    assert (await drain(alice)).error_message == "canceled: enough"
    await is_so(lambda: is_resolved(bob, 11))
    assert [(await bob.get_task(uid(number))).outcome for number in (10, 11)] == [Outcome.CANCELED] * 2
    assert await nothing_for(carol)
    assert await nothing_for(bob)
    with refused("task_terminal"):
        await carol.send_result(Result.ok(held, DONE))
    assert (await bob.get_run(RUN)).status is RunStatus.ENDED


async def test_a_deadline_ends_a_parked_run(alice: Mailbox, bob: Mailbox, carol: Mailbox, clock: ManualClock) -> None:
    """Contract 6: it is not in flight; its tasks go with it."""
    deadline_ms = clock.now_ms() + 1000
    wait = Wait(tasks=parts(10), until_ms=deadline_ms + 1000)
    await begin(alice, bob, step(1, tasks=[part(10, carol)], wait=wait), deadline_ms=deadline_ms)
    clock.advance(1001)
    answer = await drain(alice)
    assert answer.error_message is not None and answer.error_message.startswith("deadline_exceeded")
    await is_so(lambda: is_resolved(bob, 10))
    assert await nothing_for(carol)
    clock.advance(5000)
    assert await nothing_for(bob)


async def test_a_run_cancels_its_own_tasks(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 7: in the commit in which it decides so; what has ended is left as it is."""
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(10, carol), part(11, carol), part(12, carol)]))
    await answered(carol)
    held = await take(carol)
    cancels = [uid(10), uid(11), uid(12), uid(12)]
    standing = await bob.commit_run(delivery, step(2, cancels=cancels, wait=Wait(tasks=parts(10, 11, 12))))
    assert not standing.parked
    assert [(one.task_id, one.status) for one in standing.outcomes] == [
        (uid(10), "ok"),
        (uid(11), "error"),
        (uid(12), "error"),
    ]
    with refused("task_terminal"):
        await carol.send_result(Result.ok(held, DONE))
    assert await nothing_for(carol)


async def test_a_run_cancels_no_task_of_another(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 26: nor does it answer one, or take one up."""
    await bob.send_task(plain(carol, id=uid(20)))
    await alice.send_task(plain(bob, id=uid(21)))
    assert (await take(bob)).task.id == uid(21)
    delivery, _ = await begin(alice, bob)
    for wrong in (
        step(2, cancels=[uid(20)]),
        step(2, begins=[uid(20)]),
        step(2, answers=[answer(uid(21), uid(99))]),
        step(2, tasks=[part(10, carol)], begins=[uid(10)]),
    ):
        with refused("not_permitted"):
            await bob.commit_run(delivery, wrong)


async def test_a_run_takes_up_a_task_and_answers_it(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: the outcome of one and the beginning of the next are one commit."""
    delivery, first = await begin(alice, bob, step(1, tasks=[part(10, bob)], begins=[uid(10), uid(10)]))
    assert await nothing_for(bob)
    done = answer(uid(10), first.leases[uid(10)], "one")
    wait = Wait(tasks=parts(10, 11), first=True)
    second = await bob.commit_run(
        delivery, step(2, answers=[done], tasks=[part(11, bob)], begins=[uid(11)], memos=[memo(10)], wait=wait)
    )
    assert not second.parked
    assert [(one.task_id, one.content) for one in second.outcomes] == [(uid(10), (Text("one"),))]
    assert list(second.leases) == [uid(11)]
    entry = await bob.get_task(uid(11))
    assert (entry.state, entry.attempt, entry.lease_id) == (TaskState.IN_FLIGHT, 1, second.leases[uid(11)])


async def test_a_task_that_another_worker_has_is_not_taken_up(alice: Mailbox, bob: Mailbox, box: OpenMailbox) -> None:
    """Contract 2: it is leased to one holder at a time."""
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(10, bob)]))
    other = box.of("bob@lab", incarnation="another")
    held = await take(other)
    standing = await bob.commit_run(delivery, step(2, begins=[uid(10)], wait=Wait(tasks=parts(10))))
    assert (standing.leases, standing.parked) == ({}, True)
    await other.send_result(Result.ok(held, DONE))
    assert (await take(bob)).task.id == RUN


async def test_a_task_that_another_has_sent_is_not_taken_up(alice: Mailbox, bob: Mailbox, box: OpenMailbox) -> None:
    """Contract 2, 22: a run leases its own tasks, not one that another run, or nobody's, has sent to its agent."""
    await begin(alice, bob)
    await alice.send_task(plain(bob, "research", id=uid(2)))
    other = box.of("bob@lab", incarnation="another")
    await other.commit_run(await take(other), step(1, tasks=[part(20, bob)]))
    await alice.send_task(plain(bob, id=uid(21)))
    run = await bob.get_task(RUN)
    assert run.lease_id is not None
    standing = await bob.commit_run(run.lease_id, step(2, begins=[uid(20), uid(21)]))
    assert standing.leases == {}
    for number in (20, 21):
        entry = await bob.get_task(uid(number))
        assert (entry.state, entry.attempt) == (TaskState.QUEUED, 0)
        assert (await take(bob)).task.id == uid(number)


async def test_a_commit_whose_task_was_lost_is_void(alice: Mailbox, bob: Mailbox, box: OpenMailbox) -> None:
    """Contract 3, 22: somebody else was given the task; what the run went on to do with its own outcome counts not."""
    delivery, first = await begin(alice, bob, step(1, tasks=[part(10, bob, key="k")], begins=[uid(10)]))
    lease_id = first.leases[uid(10)]
    await bob.release(lease_id)
    with refused("not_leased"):
        await bob.commit_run(delivery, step(2, answers=[answer(uid(10), uid(99))], memos=[memo(10)]))
    with refused("lease_superseded"):
        await bob.commit_run(delivery, step(2, answers=[answer(uid(10), lease_id)], memos=[memo(10)]))
    assert (await bob.get_run(RUN)).step == 1
    assert (await bob.get_task(uid(10))).state is TaskState.QUEUED


async def test_a_task_is_answered_once_in_a_commit(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: the first writer wins, also within one commit."""
    delivery, first = await begin(alice, bob, step(1, tasks=[part(10, bob)], begins=[uid(10)]))
    lease_id = first.leases[uid(10)]
    with refused("result_conflict"):
        twice = [answer(uid(10), lease_id, "one"), answer(uid(10), lease_id, "two")]
        await bob.commit_run(delivery, step(2, answers=twice))
    await bob.commit_run(delivery, step(2, answers=[answer(uid(10), lease_id)]))
    with refused("result_conflict"):
        await bob.commit_run(delivery, step(3, answers=[answer(uid(10), lease_id, "other")]))
    await bob.commit_run(delivery, step(3, answers=[answer(uid(10), lease_id)]))


@pytest.mark.parametrize("status", ["ok", "error"])
async def test_a_task_that_ends_in_the_commit_is_there(alice: Mailbox, bob: Mailbox, status: str) -> None:
    """Contract 22: its outcome, whichever, ends the wait of the same commit."""
    delivery, first = await begin(alice, bob, step(1, tasks=[part(10, bob)], begins=[uid(10)]))
    lease_id = first.leases[uid(10)]
    result = answer(uid(10), lease_id) if status == "ok" else Result(uid(10), "error", (), "broken", lease_id)
    standing = await bob.commit_run(delivery, step(2, answers=[result], wait=Wait(tasks=parts(10))))
    assert [one.status for one in standing.outcomes] == [status]
    assert not standing.parked


async def test_a_run_that_its_run_cancels_takes_its_own_tasks_along(
    alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 7: at once, and not with the next start."""
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(10, carol)]))
    below = await take(carol)
    await carol.commit_run(below, step(1, tasks=[part(20, carol)]))
    await bob.commit_run(delivery, step(2, cancels=[uid(10)]))

    async def is_canceled() -> bool:
        return (await carol.get_task(uid(20))).outcome is Outcome.CANCELED

    await is_so(is_canceled)
