"""A run: commits that are whole and done once, and waits in which no wake-up is lost."""

from __future__ import annotations

import pytest

from covenant import Mailbox, OpenMailbox, Outcome, Result, TaskState
from covenant.model.record import Asks
from covenant.model.run import Memo, RunStatus, Standing, Wait
from covenant.store.clock import ManualClock

from .runs import DONE, RUN, answered, begin, entry, memo, parked_on, part, parts, plainly, raw, says, step
from .support import Reopen, drain, nothing_back_for, nothing_for, plain, refused, take, uid

APPROVE = Wait(signals=("approve",))


# --- commits -----------------------------------------------------------------------------------------------


async def test_a_commit_brings_everything_at_once(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 22: entries, tasks, what is remembered and the wait are one commit."""
    commit = step(1, entries=[entry(1)], memos=[memo(10)], tasks=[part(10, carol)], wait=Wait(tasks=parts(10)), leaf=1)
    _, standing = await begin(alice, bob, commit)
    assert (standing.number, standing.parked, standing.ended) == (1, True, False)
    run = await bob.get_run(RUN)
    assert (run.step, run.entries, run.leaf, run.status) == (1, 1, 1, RunStatus.AWAITING_WORK)
    assert run.awaits == [f"task {uid(10)}"]
    child = await take(carol)
    assert (child.task.id, child.task.parent, child.task.sender) == (uid(10), RUN, bob.agent)


async def test_a_commit_that_is_refused_leaves_nothing(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 22: the last of its parts is wrong, and none of them is there."""
    delivery, _ = await begin(alice, bob)
    with refused("malformed"):
        await bob.commit_run(delivery, step(2, entries=[entry(1)], tasks=[part(10, carol)], takes=["nothing"], leaf=1))
    assert ((await bob.get_run(RUN)).step, (await bob.get_run(RUN)).entries) == (1, 0)
    assert await nothing_for(carol)
    await bob.commit_run(delivery, step(2, entries=[entry(1)], leaf=1))


async def test_a_commit_that_is_repeated_is_done_once(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 22: its answer was lost; under the same lease and number it is told again."""
    commit = step(1, entries=[entry(1, key="once")], tasks=[part(10, bob), part(11, carol)], begins=[uid(10)], leaf=1)
    delivery, first = await begin(alice, bob, commit)
    assert list(first.leases) == [uid(10)]
    assert await bob.commit_run(delivery, commit) == first
    assert (await bob.get_run(RUN)).entries == 1
    assert (await take(carol)).task.id == uid(11)
    assert await nothing_for(carol)
    waiting = step(2, wait=APPROVE)
    parked = await bob.commit_run(delivery, waiting)
    assert parked.parked
    assert await bob.commit_run(delivery, waiting) == parked
    await alice.signal_run(RUN, "approve")
    again = await bob.commit_run(delivery, waiting)
    assert (again.parked, again.number) == (True, 2)


async def test_an_end_that_is_repeated_is_told_again(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: also the last commit may have to be said twice."""
    delivery, _ = await begin(alice, bob)
    last = step(2, result=Result(RUN, "ok", DONE))
    ended = await bob.commit_run(delivery, last)
    assert (ended.ended, ended.parked) == (True, False)
    assert await bob.commit_run(delivery, last) == ended
    assert (await drain(alice)).content == DONE
    assert await nothing_back_for(alice)


async def test_a_commit_out_of_its_order_is_refused(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: a step follows the one before it."""
    delivery, _ = await begin(alice, bob)
    for number in (0, 3):
        with refused("wrong_step") as wrong:
            await bob.commit_run(delivery, step(number))
        assert wrong.value.details["expected"] == 2
    await bob.commit_run(delivery, step(2))


async def test_an_old_lease_commits_nothing(alice: Mailbox, bob: Mailbox, box: OpenMailbox) -> None:
    """Contract 23: after the run has parked, and after it was resumed elsewhere."""
    first = await parked_on(alice, bob, APPROVE)
    with refused("lease_superseded"):
        await bob.commit_run(first, step(2))
    await alice.signal_run(RUN, "approve")
    second = await take(bob)
    with refused("lease_superseded"):
        await bob.commit_run(first, step(2))
    other = box.of("bob@lab", incarnation="another")
    held = (await bob.get_run(RUN)).incarnation
    assert held is not None
    third = await other.resume_run(RUN, dead=held, evidence="attested", reason="the machine is gone")
    for old in (first.lease_id, second.lease_id):
        with refused("lease_superseded"):
            await bob.commit_run(old, step(2))
        with refused("lease_superseded"):
            await bob.load_run(old)
    assert (await other.commit_run(third.lease_id, step(2))).number == 2


async def test_a_lease_of_another_agent_is_unknown(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 27: a commit by who does not hold the run."""
    delivery, _ = await begin(alice, bob)
    for stranger in (carol, alice):
        with refused("unknown_lease"):
            await stranger.commit_run(delivery.lease_id, step(2))


async def test_what_a_run_remembers_is_loaded_by_its_next_holder(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 20: the steps since the last checkpoint, with the outcomes that they name."""
    told = Memo("now", value=raw({"ms": 5}))
    commit = step(1, memos=[told, memo(10)], tasks=[part(10, carol)], wait=Wait(tasks=parts(10)))
    await begin(alice, bob, commit)
    await answered(carol)
    loaded = await bob.load_run(await take(bob))
    assert (loaded.task_id, loaded.step, loaded.next, loaded.checkpoints) == (RUN, 1, None, 0)
    (seen,) = loaded.steps
    assert [(one.key, one.task) for one in seen.memos] == [("now", None), ("task 10", uid(10))]
    assert plainly(seen.memos[0].value) == {"ms": 5}
    assert [(one.task_id, one.status, one.content) for one in seen.outcomes] == [(uid(10), "ok", DONE)]


async def test_a_checkpoint_forgets_what_lies_before_it(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 20: its state is kept, and the leaf at which it was made."""
    commit = step(1, entries=[entry(1)], memos=[Memo("one")], leaf=1)
    delivery, _ = await begin(alice, bob, commit)
    await bob.commit_run(delivery, step(2, checkpoint=raw({"phase": "write"}), leaf=1))
    await bob.commit_run(delivery, step(3, memos=[Memo("two")], entries=[entry(2, parent=1)], leaf=2))
    loaded = await bob.load_run(delivery)
    assert (loaded.step, loaded.checkpoints, loaded.leaf, plainly(loaded.state)) == (3, 1, 1, {"phase": "write"})
    assert [(one.number, [kept.key for kept in one.memos]) for one in loaded.steps] == [(3, ["two"])]


async def test_what_a_run_remembers_comes_in_pages(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 20: `next` is where the following page begins, and none is missed."""
    delivery, _ = await begin(alice, bob)
    for number in range(2, 2 + 5):
        await bob.commit_run(delivery, step(number, memos=[Memo(f"m{number}")]))
    pages = [await bob.load_run(delivery, after) for after in (0, 3, 6)]
    assert [[one.number for one in page.steps] for page in pages] == [[2, 3, 4, 5, 6], [4, 5, 6], []]


@pytest.mark.parametrize("wait", [Wait(tasks=parts(10)), APPROVE, Wait(until_ms=2**50)], ids=["task", "signal", "time"])
async def test_a_run_survives_a_restart(
    alice: Mailbox, bob: Mailbox, carol: Mailbox, reopen: Reopen, wait: Wait, clock: ManualClock
) -> None:
    """Contract 1, 22: entries, memos, state, signals and the wait."""
    delivery, _ = await begin(alice, bob, step(1, entries=[entry(1, "said")], memos=[Memo("m", raw(1))], leaf=1))
    await bob.signal_run(RUN, "other", {"n": 1}, key="k")
    await bob.commit_run(delivery, step(2, tasks=[part(10, carol)], memos=[memo(10)], leaf=1, wait=wait))
    before = await bob.get_run(RUN)
    box = await reopen()
    alice, bob, carol = (box.of(name) for name in ("alice@lab", "bob@lab", "carol@lab"))
    assert await bob.get_run(RUN) == before
    assert plainly((await bob.run_entries(RUN)).entries[0].content) == "said"
    assert (await bob.signal_run(RUN, "other", {"n": 1}, key="k")).duplicate
    await answered(carol)
    await alice.signal_run(RUN, "approve")
    if wait.until_ms is not None:
        await bob.wake_run(RUN)
    loaded = await bob.load_run(await take(bob))
    assert [one.number for one in loaded.steps] == [1, 2]


# --- parking -----------------------------------------------------------------------------------------------


async def test_a_run_parks_when_nothing_is_there(alice: Mailbox, bob: Mailbox, box: OpenMailbox) -> None:
    """Contract 23: it holds no lease, nobody gets it, and it is never stale."""
    await parked_on(alice, bob, APPROVE)
    entry = await bob.get_task(RUN)
    assert (entry.state, entry.lease_id, entry.leased_to, entry.attempt) == (TaskState.PARKED, None, None, 1)
    assert await nothing_for(bob)
    assert [one.task.id for one in (await box.task_queue(state="parked")).tasks] == [RUN]


async def test_a_run_does_not_park_when_its_task_has_ended(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 22: the outcome comes with the answer to the commit."""
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(10, carol)]))
    await answered(carol)
    standing = await bob.commit_run(delivery, step(2, wait=Wait(tasks=parts(10))))
    assert (standing.parked, [one.task_id for one in standing.outcomes]) == (False, [uid(10)])
    assert (await bob.get_task(RUN)).state is TaskState.IN_FLIGHT


async def test_a_run_does_not_park_when_its_signal_is_there(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: it came before the run waited for it."""
    delivery, _ = await begin(alice, bob)
    await alice.signal_run(RUN, "approve", {"by": "alice"})
    standing = await bob.commit_run(delivery, step(2, wait=APPROVE))
    assert not standing.parked
    (heard,) = standing.signals
    assert (heard.name, plainly(heard.value)) == ("approve", {"by": "alice"})


async def test_a_run_does_not_park_when_its_time_has_come(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 22: a moment that has passed is not waited for."""
    _, standing = await begin(alice, bob, step(1, wait=Wait(until_ms=clock.now_ms())))
    assert not standing.parked and standing.now_ms == clock.now_ms()


async def test_a_run_that_is_to_stop_does_not_park(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 7: its holder hears of the cancel instead."""
    delivery, _ = await begin(alice, bob)
    await alice.cancel_task(RUN, reason="too late", graceful=True)
    standing = await bob.commit_run(delivery, step(2, wait=APPROVE))
    assert (standing.parked, standing.cancel_requested, standing.cancel_reason) == (False, True, "too late")
    assert (await bob.load_run(delivery)).cancel_requested


async def test_a_holder_looks_around_without_a_commit(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 22: what of this is there, now."""
    delivery, _ = await begin(alice, bob, step(1, tasks=[part(10, carol), part(11, carol)]))
    wait = Wait(tasks=parts(10, 11), signals=("go",))
    assert (await bob.look_around(delivery, wait)).outcomes == []
    await answered(carol)
    await alice.signal_run(RUN, "go", 1)
    seen = await bob.look_around(delivery, wait)
    assert ([one.task_id for one in seen.outcomes], [one.name for one in seen.signals]) == ([uid(10)], ["go"])
    assert seen.number == 1 and (await bob.get_run(RUN)).step == 1


@pytest.mark.parametrize(
    "wait",
    [Wait(), Wait(tasks=frozenset(("x",))), Wait(signals=("",)), Wait(until_ms=-1), Wait(doubt="charge")],
    ids=["nothing", "no id", "blank", "no time", "no decision"],
)
async def test_a_wait_that_makes_no_sense_is_refused(alice: Mailbox, bob: Mailbox, wait: Wait) -> None:
    """Contract 22: before anything is stored."""
    delivery, _ = await begin(alice, bob)
    with refused("invalid_input"):
        await bob.commit_run(delivery, step(2, wait=wait))
    with refused("invalid_input"):
        await bob.look_around(delivery, wait)
    assert (await bob.get_run(RUN)).step == 1


async def test_a_run_waits_for_its_own_tasks_only(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 22: another's would never wake it."""
    await bob.send_task(plain(carol, id=uid(20)))
    delivery, _ = await begin(alice, bob)
    for other in (20, 21):
        with refused("result_gone"):
            await bob.commit_run(delivery, step(2, wait=Wait(tasks=parts(other))))


# --- waking ------------------------------------------------------------------------------------------------


async def test_a_run_that_waits_for_all_is_woken_by_the_last(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 22: a failure counts as an end like any other."""
    await parked_on(alice, bob, Wait(tasks=parts(10, 11)), tasks=[part(10, carol), part(11, carol)])
    await answered(carol, "error")
    assert await nothing_for(bob)
    assert (await bob.get_run(RUN)).status is RunStatus.AWAITING_WORK
    await answered(carol)
    assert (await bob.get_run(RUN)).status is RunStatus.WOKEN
    assert (await take(bob)).task.id == RUN


async def test_a_run_that_waits_for_the_first_is_woken_by_it(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 22: and by it alone."""
    await parked_on(alice, bob, Wait(tasks=parts(10, 11), first=True), tasks=[part(10, carol), part(11, carol)])
    await answered(carol)
    delivery = await take(bob)
    await answered(carol)
    assert await nothing_for(bob)
    standing = await bob.commit_run(delivery, step(2, wait=Wait(tasks=parts(10, 11), first=True)))
    assert [one.task_id for one in standing.outcomes] == [uid(10), uid(11)]


async def test_a_run_that_fails_fast_is_woken_by_the_first_failure(
    alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 22: a success is not enough."""
    wait = Wait(tasks=parts(10, 11, 12), fail_fast=True)
    await parked_on(alice, bob, wait, tasks=[part(number, carol) for number in (10, 11, 12)])
    await answered(carol)
    assert await nothing_for(bob)
    await answered(carol, "error")
    assert (await take(bob)).task.id == RUN


async def test_a_run_that_waits_for_several_things_is_woken_by_any(
    alice: Mailbox, bob: Mailbox, carol: Mailbox, clock: ManualClock
) -> None:
    """Contract 22: a task, or a signal, or a time."""
    wait = Wait(tasks=parts(10), signals=("go",), until_ms=clock.now_ms() + 1000)
    await parked_on(alice, bob, wait, tasks=[part(10, carol)])
    await alice.signal_run(RUN, "go")
    standing = await bob.commit_run(await take(bob), step(2, takes=[], wait=wait))
    assert [one.name for one in standing.signals] == ["go"]
    clock.advance(2000)
    assert await nothing_for(bob)


@pytest.mark.parametrize("pattern", ["approve.*", "approve.**", "*.plan", "**"])
async def test_a_run_is_woken_by_a_signal_that_its_pattern_fits(alice: Mailbox, bob: Mailbox, pattern: str) -> None:
    """Contract 22: `*` is one segment of a name, `**` one or more."""
    await parked_on(alice, bob, Wait(signals=(pattern,)))
    if pattern != "**":
        for other in ("approve", "reject.all", "approval.x"):
            await alice.signal_run(RUN, other)
        assert await nothing_for(bob)
    await alice.signal_run(RUN, "approve.plan")
    assert (await take(bob)).task.id == RUN


async def test_a_run_is_woken_by_its_time(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 22: by a timer, not by who looks; and not before."""
    await parked_on(alice, bob, Wait(until_ms=clock.now_ms() + 1000))
    assert (await bob.get_run(RUN)).until_ms == clock.now_ms() + 1000
    clock.advance(999)
    assert await nothing_for(bob)
    clock.advance(1)
    assert (await take(bob)).task.id == RUN


async def test_a_time_that_passes_while_the_store_is_closed_wakes_the_run(
    alice: Mailbox, bob: Mailbox, clock: ManualClock, reopen: Reopen
) -> None:
    """Contract 22: no wake-up is lost."""
    await parked_on(alice, bob, Wait(until_ms=clock.now_ms() + 1000))
    clock._now_ms += 5000
    bob = (await reopen()).of("bob@lab")
    assert (await take(bob)).task.id == RUN


async def test_a_run_is_woken_by_a_message(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 20, 22: what the sender says is what the run hears."""
    await parked_on(alice, bob, Wait(signals=("message",)))
    await alice.add_message(RUN, says("shorter, please"))
    standing = await bob.commit_run(await take(bob), step(2, wait=Wait(signals=("message",))))
    (heard,) = standing.signals
    assert heard.message is not None and heard.message.parts[0].text == "shorter, please"
    assert (heard.name, heard.said) == ("message", 1)


async def test_its_own_agent_wakes_a_run(alice: Mailbox, bob: Mailbox, carol: Mailbox, box: OpenMailbox) -> None:
    """Contract 23: it may have more to do than wait; nobody else may say so but the operator."""
    await parked_on(alice, bob, APPROVE)
    with refused("not_permitted"):
        await alice.wake_run(RUN)
    with refused("unknown_task"):
        await carol.wake_run(RUN)
    before = (await bob.get_task(RUN)).generation
    assert (await bob.wake_run(RUN)).generation == before
    assert (await bob.wake_run(RUN)).generation == before
    delivery = await take(bob)
    await bob.wake_run(RUN)
    assert (await bob.commit_run(delivery, step(2, wait=APPROVE))).parked
    await box.wake_run(RUN)
    assert (await take(bob)).attempt == 1


# --- what the protocol shows ---------------------------------------------------------------------------------


async def stands(box: Mailbox) -> tuple[TaskState, Asks | None, int, int]:
    entry = await box.get_task(RUN)
    return entry.state, entry.asks, entry.generation, entry.attempt


async def test_parked_for_work_nothing_changes(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 23: neither parking, nor waking, nor taking it up moves the generation or the attempt."""
    await parked_on(alice, bob, Wait(tasks=parts(10)), tasks=[part(10, carol)])
    assert await stands(alice) == (TaskState.PARKED, None, 2, 1)
    await answered(carol)
    assert await stands(alice) == (TaskState.PARKED, None, 2, 1)
    delivery = await take(bob)
    assert (delivery.attempt, delivery.generation) == (1, 2)
    assert await stands(alice) == (TaskState.IN_FLIGHT, None, 2, 1)


async def test_parked_for_input_is_input_required(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 14, 23: one event when it asks, one when it is told; taking it up is none."""
    await parked_on(alice, bob, APPROVE)
    assert await stands(alice) == (TaskState.PARKED, Asks.INPUT, 3, 1)
    assert (await alice.get_run(RUN)).status is RunStatus.AWAITING_INPUT
    assert (await alice.signal_run(RUN, "approve")).generation == 4
    assert await stands(alice) == (TaskState.PARKED, None, 4, 1)
    delivery = await take(bob)
    assert (delivery.attempt, delivery.generation) == (1, 4)


async def test_a_signal_that_nobody_waits_for_changes_nothing(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 14: it lies in the inbox."""
    await parked_on(alice, bob, APPROVE)
    assert (await alice.signal_run(RUN, "other")).generation == 3
    assert await stands(alice) == (TaskState.PARKED, Asks.INPUT, 3, 1)
    assert (await bob.get_run(RUN)).signals == ["other"]


async def test_a_time_that_ends_a_question_is_one_event(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 14: INPUT_REQUIRED to WORKING."""
    await parked_on(alice, bob, Wait(signals=("approve",), until_ms=clock.now_ms() + 1000))
    assert await stands(alice) == (TaskState.PARKED, Asks.INPUT, 3, 1)
    clock.advance(1000)
    assert (await take(bob)).generation == 4
    assert await stands(alice) == (TaskState.IN_FLIGHT, None, 4, 1)


async def test_a_message_that_answers_is_one_event(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 14: the message itself ends INPUT_REQUIRED."""
    await parked_on(alice, bob, APPROVE)
    assert (await alice.add_message(RUN, says("yes", signal="approve"), if_generation=3)).generation == 4
    assert await stands(alice) == (TaskState.PARKED, None, 4, 1)
    with refused("generation_mismatch"):
        await alice.add_message(RUN, "no", if_generation=3)
    standing = await bob.commit_run(await take(bob), step(2, wait=APPROVE))
    assert [(one.name, one.said) for one in standing.signals] == [("approve", 1)]


async def test_a_message_that_does_not_answer_leaves_the_question(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 14, 22: it names another signal or none, and the run goes on waiting for its own."""
    await parked_on(alice, bob, APPROVE)
    await alice.add_message(RUN, says("by the way", signal="note"))
    await alice.add_message(RUN, "hello")
    assert await stands(alice) == (TaskState.PARKED, Asks.INPUT, 5, 1)
    assert await nothing_for(bob)
    await alice.add_message(RUN, says("go on", signal="approve"))
    assert await stands(alice) == (TaskState.PARKED, None, 6, 1)
    standing = await bob.commit_run(await take(bob), step(2, wait=Wait(signals=("note", "approve", "message"))))
    assert [one.name for one in standing.signals] == ["note", "approve", "message"]


async def test_what_a_run_says_is_an_event_each(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 14: as of any holder; the last word before a question stands beside it."""
    _, standing = await begin(
        alice,
        bob,
        step(1, entries=[entry(1, says=says("one")), entry(2, parent=1, says=says("two"))], leaf=2, wait=APPROVE),
    )
    assert (standing.parked, standing.generation) == (True, 5)
    assert await stands(alice) == (TaskState.PARKED, Asks.INPUT, 5, 1)


async def test_the_end_of_a_run_is_a_final_result(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 14: an artifact and a status; without content, the status alone."""
    delivery, _ = await begin(alice, bob)
    standing: Standing = await bob.commit_run(delivery, step(2, result=Result(RUN, "ok", DONE)))
    assert (standing.generation, standing.ended) == (4, True)
    answer = await drain(alice)
    assert (answer.generation, answer.attempt, answer.content) == (4, 1, DONE)
    assert (await alice.get_task(RUN)).outcome is Outcome.ANSWERED
    run = await alice.get_run(RUN)
    assert (run.status, run.outcome) == (RunStatus.ENDED, "answered")


async def test_a_run_that_ends_does_not_wait(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 22: a commit has one of the two; and the end is no partial result."""
    delivery, _ = await begin(alice, bob)
    with refused("malformed"):
        await bob.commit_run(delivery, step(2, result=Result(RUN, "ok", DONE), wait=APPROVE))
    with refused("malformed"):
        await bob.commit_run(delivery, step(2, result=Result(RUN, "partial", DONE)))
    assert (await bob.get_task(RUN)).outcome is None
