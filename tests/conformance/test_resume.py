"""After a crash: a run is resumed by a command of its own, and what nobody can know is in doubt, not guessed."""

from __future__ import annotations

import pytest

from covenant import AuditRow, Delivery, Limits, Mailbox, OpenMailbox, Result, TaskState
from covenant.model import command as c
from covenant.model.run import Memo, RunStatus, Verdict, Wait
from covenant.store.clock import ManualClock

from .runs import DONE, RUN, begin, memo, parked_on, part, parts, plainly, step
from .support import Reopen, drain, nothing_for, plain, refused, take, uid

LAPSE_MS = Limits().run_lapse_ms
CHARGE = Wait(signals=("effect:charge#1",), doubt="charge")


@pytest.fixture
def second(box: OpenMailbox) -> Mailbox:
    """Another worker of bob's."""
    return box.of("bob@lab", incarnation="second")


async def dead_holder(bob: Mailbox) -> str:
    held = (await bob.get_run(RUN)).incarnation
    assert held is not None
    return held


async def decided(box: OpenMailbox, kind: str) -> list[AuditRow]:
    return [row for row in await box.recent_audit(100) if row.kind == kind]


# --- resume ------------------------------------------------------------------------------------------------


async def test_a_run_of_a_living_worker_is_not_resumed(
    alice: Mailbox, bob: Mailbox, second: Mailbox, clock: ManualClock
) -> None:
    """Contract 23: a sign of life is a sign of life: a heartbeat, and a commit."""
    delivery, _ = await begin(alice, bob)
    dead = await dead_holder(bob)
    for sign in (bob.heartbeat(delivery), bob.commit_run(delivery, step(2))):
        clock.advance(LAPSE_MS * 3 // 4)
        with refused("not_proven_dead") as alive:
            await second.resume_run(RUN, dead=dead, reason="it is silent")
        assert alive.value.details["lapse_ms"] == LAPSE_MS
        await sign
    clock.advance(LAPSE_MS * 3 // 4)
    with refused("not_proven_dead"):
        await second.resume_run(RUN, dead=dead, reason="it is silent")


async def test_a_run_of_a_silent_worker_is_resumed(
    alice: Mailbox, bob: Mailbox, second: Mailbox, clock: ManualClock, box: OpenMailbox
) -> None:
    """Contract 23: same agent, new incarnation; no new attempt, no new generation, and a row that says why."""
    delivery, _ = await begin(alice, bob, step(1, memos=[Memo("one")]))
    dead = await dead_holder(bob)
    clock.advance(LAPSE_MS)
    resumed = await second.resume_run(RUN, dead=dead, reason="it is silent")
    assert (resumed.task.id, resumed.attempt, resumed.generation) == (RUN, 1, 2)
    assert resumed.lease_id != delivery.lease_id
    run = await bob.get_run(RUN)
    assert (run.incarnation, run.resumes, run.lease_id) == ("second", 1, resumed.lease_id)
    with refused("lease_superseded"):
        await bob.heartbeat(delivery)
    assert [one.number for one in (await second.load_run(resumed.lease_id)).steps] == [1]
    (row,) = await decided(box, "resume")
    assert (row.action, row.subject, row.task_id, row.reason) == ("lapsed", dead, RUN, "it is silent")
    assert (row.lease_id, row.actor) == (delivery.lease_id, "bob@lab")


async def test_an_agent_vouches_for_the_death_of_its_own(alice: Mailbox, bob: Mailbox, second: Mailbox) -> None:
    """Contract 23: who knows need not wait."""
    await begin(alice, bob)
    resumed = await second.resume_run(RUN, dead=await dead_holder(bob), evidence="attested", reason="I killed it")
    await second.commit_run(resumed.lease_id, step(2, result=Result(RUN, "ok", DONE)))
    assert (await drain(alice)).attempt == 1


async def test_a_resume_names_who_is_dead(alice: Mailbox, bob: Mailbox, second: Mailbox, clock: ManualClock) -> None:
    """Contract 23: not whoever holds it by now, and not who asks."""
    await begin(alice, bob)
    dead = await dead_holder(bob)
    clock.advance(LAPSE_MS)
    with refused("lease_mismatch"):
        await second.resume_run(RUN, dead="somebody else", reason="it is silent")
    with refused("malformed"):
        await bob.resume_run(RUN, dead=dead, reason="it is me")
    for blank in ({"dead": "", "reason": "x"}, {"dead": dead, "reason": " "}):
        with refused("invalid_input"):
            await second.resume_run(RUN, **blank)  # type: ignore[arg-type]
    with refused("invalid_input"):
        await second.resume_run(RUN, dead=dead, reason="x", evidence="guessed")  # type: ignore[arg-type]


async def test_a_resume_that_is_repeated_is_told_again(
    alice: Mailbox, bob: Mailbox, second: Mailbox, clock: ManualClock, box: OpenMailbox
) -> None:
    """Contract 23: its answer was lost; another worker does not get the run for that."""
    await begin(alice, bob)
    dead = await dead_holder(bob)
    clock.advance(LAPSE_MS)
    first = await second.resume_run(RUN, dead=dead, reason="it is silent")
    again = await second.resume_run(RUN, dead=dead, reason="it is silent")
    assert (again.lease_id, again.attempt, again.generation) == (first.lease_id, 1, 2)
    assert (await bob.get_run(RUN)).resumes == 1
    assert len(await decided(box, "resume")) == 1
    with refused("lease_mismatch"):
        await box.of("bob@lab", incarnation="third").resume_run(RUN, dead=dead, reason="it is silent")


@pytest.mark.parametrize("limits", [Limits(resumes_max=2)])
async def test_a_run_that_gets_no_further_is_left_to_the_operator(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox
) -> None:
    """Contract 23: a run that kills its workers does not kill all of them; a step clears it."""
    await begin(alice, bob)
    dead = await dead_holder(bob)
    for name in ("two", "three"):
        resumed = await box.of("bob@lab", incarnation=name).resume_run(
            RUN, dead=dead, evidence="attested", reason="crash"
        )
        dead = name
    with refused("resumes_exhausted"):
        await box.of("bob@lab", incarnation="four").resume_run(RUN, dead=dead, evidence="attested", reason="crash")
    resumed = await box.resume_run(RUN, dead=dead, evidence="attested", reason="once more")
    assert (await bob.get_run(RUN)).resumes == 3
    await bob.commit_run(resumed.lease_id, step(2))
    assert (await bob.get_run(RUN)).resumes == 0


async def test_a_run_that_the_operator_resumes_waits_for_whichever_worker_comes(
    alice: Mailbox, bob: Mailbox, second: Mailbox, box: OpenMailbox
) -> None:
    """Contract 3, 23: without an incarnation nobody gets it at once. It counts, and whoever held it is superseded, also
    if it had given no sign of life under its lease."""
    await begin(alice, bob)
    dead = await dead_holder(bob)
    held = await second.resume_run(RUN, dead=dead, evidence="attested", reason="crash")
    free = c.ResumeRun(None, RUN, None, "second", "attested", "it is stuck")
    for _ in range(2):  # the answer may have been lost
        resumed = await box._engine.run(free)
        assert (resumed.lease_id, resumed.attempt, resumed.generation) == ("", 1, 2)
    run = await bob.get_run(RUN)
    assert (run.status, run.resumes, run.lease_id) == (RunStatus.WOKEN, 2, None)
    for _ in range(2):
        with refused("lease_superseded"):
            await second.heartbeat(held.lease_id)
        with refused("lease_superseded"):
            await second.commit_run(held.lease_id, step(2))
    delivery = await take(bob)
    assert (delivery.task.id, delivery.attempt) == (RUN, 1)
    await bob.commit_run(delivery, step(2))


async def test_a_run_that_was_not_begun_is_resumed_by_its_agent(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, second: Mailbox
) -> None:
    """Contract 23: a worker may die between its lease and its first commit. It counts as any other time."""
    await alice.send_task(plain(bob, id=RUN))
    await take(bob)
    dead = (await bob.get_task(RUN)).incarnation
    assert dead is not None
    with refused("not_a_run"):
        await box.resume_run(RUN, dead=dead, evidence="attested", reason="x")
    resumed = await second.resume_run(RUN, dead=dead, evidence="attested", reason="x")
    again = await second.resume_run(RUN, dead=dead, evidence="attested", reason="x")
    assert again.lease_id == resumed.lease_id
    assert (await alice.get_run(RUN)).resumes == 1
    assert (await second.commit_run(resumed.lease_id, step(1))).number == 1


async def test_what_is_no_run_in_flight_is_not_resumed(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, second: Mailbox, carol: Mailbox
) -> None:
    """Contract 23: a parked one waits for nobody's death; a task that nobody has begun goes through repair."""
    await alice.send_task(plain(bob, id=uid(2)))
    held = await take(bob)
    with refused("not_a_run"):
        await box.resume_run(uid(2), dead="x", reason="x")
    await bob.send_result(Result.ok(held, DONE))
    await parked_on(alice, bob, Wait(signals=("go",)))
    with refused("not_leased"):
        await second.resume_run(RUN, dead="x", reason="x")
    with refused("unknown_task"):
        await carol.resume_run(RUN, dead="x", reason="x")
    with refused("not_permitted"):
        await alice.resume_run(RUN, dead="x", reason="x")


async def test_a_run_is_resumed_after_a_restart(
    alice: Mailbox, bob: Mailbox, clock: ManualClock, reopen: Reopen
) -> None:
    """Contract 2, 23: a lease survives a restart, and is not redelivered by itself."""
    await begin(alice, bob)
    dead = await dead_holder(bob)
    box = await reopen()
    again = box.of("bob@lab", incarnation="second")
    assert await nothing_for(again)
    clock.advance(LAPSE_MS)
    resumed = await again.resume_run(RUN, dead=dead, reason="it is silent")
    assert (await again.commit_run(resumed.lease_id, step(2))).number == 2


# --- what the dead worker was at ----------------------------------------------------------------------------


async def doing_two(alice: Mailbox, bob: Mailbox) -> Delivery:
    """Bob's run does two tasks itself: 10 may be done twice, 11 may not."""
    tasks = [part(10, bob, key="ten"), part(11, bob)]
    delivery, standing = await begin(
        alice, bob, step(1, tasks=tasks, begins=[uid(10), uid(11)], memos=[memo(10), memo(11)])
    )
    assert set(standing.leases) == parts(10, 11)
    return delivery


async def test_what_may_be_done_twice_is_done_again(alice: Mailbox, bob: Mailbox, second: Mailbox) -> None:
    """Contract 12, 23: a leased child of the dead worker that is idempotent goes to who resumes it, at its next
    attempt; the resume of the run leaves it alone."""
    await doing_two(alice, bob)
    dead = await dead_holder(bob)
    resumed = await second.resume_run(RUN, dead=dead, evidence="attested", reason="crash")
    assert list(resumed.requeued) == []
    again = await second.resume_run(uid(10), dead=dead, evidence="attested", reason="crash")
    assert (again.task.id, again.attempt) == (uid(10), 2)
    assert await nothing_for(second)
    await second.send_result(Result(uid(10), "ok", DONE, None, again.lease_id))


async def test_a_task_that_is_done_again_is_told_again(
    alice: Mailbox, bob: Mailbox, second: Mailbox, box: OpenMailbox
) -> None:
    """Contract 23: the answer to a resume of a task may be lost, too; nobody else would do it then."""
    await doing_two(alice, bob)
    dead = await dead_holder(bob)
    first = await second.resume_run(uid(10), dead=dead, evidence="attested", reason="crash")
    again = await second.resume_run(uid(10), dead=dead, evidence="attested", reason="crash")
    assert (again.lease_id, again.attempt, again.generation) == (first.lease_id, 2, first.generation)
    assert len(await decided(box, "resume")) == 1
    with refused("lease_mismatch"):
        await box.of("bob@lab", incarnation="third").resume_run(uid(10), dead=dead, evidence="attested", reason="crash")
    with refused("malformed"):
        await second.resume_run(uid(10), dead="second", evidence="attested", reason="it is me")


async def test_a_commit_that_is_repeated_does_not_hand_over_what_another_does(
    alice: Mailbox, bob: Mailbox, second: Mailbox
) -> None:
    """Contract 2: a task that was taken from a silent holder meanwhile has one holder, the new one."""
    commit = step(1, tasks=[part(10, bob, key="ten"), part(11, bob)], begins=[uid(10), uid(11)])
    delivery, standing = await begin(alice, bob, commit)
    assert set(standing.leases) == parts(10, 11)
    await second.resume_run(uid(10), dead=await dead_holder(bob), evidence="attested", reason="it is silent")
    again = await bob.commit_run(delivery, commit)
    assert (again.leases, again.attempts) == ({uid(11): standing.leases[uid(11)]}, {uid(11): 1})


async def test_what_may_not_be_done_twice_is_in_doubt(
    alice: Mailbox, bob: Mailbox, second: Mailbox, clock: ManualClock, box: OpenMailbox
) -> None:
    """Contract 23: nobody knows whether it was done: the run says so, and waits for a decision."""
    await doing_two(alice, bob)
    resumed = await second.resume_run(RUN, dead=await dead_holder(bob), evidence="attested", reason="crash")
    standing = await second.commit_run(resumed.lease_id, step(2, wait=Wait(tasks=parts(11))))
    assert standing.parked
    assert (await bob.get_run(RUN)).status is RunStatus.AWAITING_WORK
    clock.advance(LAPSE_MS)
    run = await bob.get_run(RUN)
    assert (run.status, run.doubts) == (RunStatus.CHILD_IN_DOUBT, [uid(11)])
    assert [one.task_id for one in (await box.list_runs(status="child_in_doubt")).runs] == [RUN]
    assert (await bob.get_task(uid(11))).state is TaskState.IN_FLIGHT


async def test_what_may_not_be_done_twice_is_not_resumed(
    alice: Mailbox, bob: Mailbox, second: Mailbox, box: OpenMailbox
) -> None:
    """Contract 12, 23: nor does its own agent take a task for a run that nobody has begun."""
    await doing_two(alice, bob)
    dead = await dead_holder(bob)
    for who in (second, box):
        with refused("not_a_run"):
            await who.resume_run(uid(11), dead=dead, evidence="attested", reason="crash")
    entry = await bob.get_task(uid(11))
    assert (entry.state, entry.attempt, entry.incarnation) == (TaskState.IN_FLIGHT, 1, dead)


async def test_what_a_living_worker_does_is_left_to_it(
    alice: Mailbox, bob: Mailbox, second: Mailbox, carol: Mailbox, box: OpenMailbox
) -> None:
    """Contract 23: only what the dead one held is taken from it."""
    await begin(alice, bob, step(1, tasks=[part(10, bob, key="a"), part(12, carol, key="b")]))
    other = await take(box.of("bob@lab", incarnation="another"))
    assert other.task.id == uid(10)
    await take(carol)
    dead = await dead_holder(bob)
    await second.resume_run(RUN, dead=dead, evidence="attested", reason="crash")
    with refused("lease_mismatch"):
        await second.resume_run(uid(10), dead=dead, evidence="attested", reason="crash")
    with refused("not_permitted"):
        await second.resume_run(uid(12), dead=dead, evidence="attested", reason="crash")


# --- effects -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "value"), [("done", {"receipt": 7}), ("failed", "declined"), ("retry", None)])
async def test_an_effect_in_doubt_waits_for_a_verdict(
    alice: Mailbox, bob: Mailbox, box: OpenMailbox, verdict: Verdict, value: object
) -> None:
    """Contract 21: it is no question to the sender; the run hears the decision, which has a row."""
    await parked_on(alice, bob, CHARGE, memos=[Memo("charge", begun="charge")])
    run = await bob.get_run(RUN)
    assert (run.status, run.doubts, run.awaits) == (RunStatus.EFFECT_IN_DOUBT, ["charge"], [])
    before = await bob.get_task(RUN)
    assert before.asks is None and await nothing_for(bob)
    moved = await bob.judge_effect(RUN, "charge", verdict, reason="I looked", value=value)
    assert moved.generation == before.generation
    assert (await bob.get_run(RUN)).status is RunStatus.WOKEN
    standing = await bob.commit_run(await take(bob), step(2, wait=CHARGE))
    (heard,) = standing.signals
    assert (heard.name, plainly(heard.value)) == ("effect:charge#1", {"verdict": verdict, "value": value})
    (row,) = await decided(box, "effect")
    assert (row.action, row.subject, row.task_id, row.reason) == (verdict, "charge", RUN, "I looked")


async def test_only_what_is_in_doubt_is_judged(alice: Mailbox, bob: Mailbox, carol: Mailbox, box: OpenMailbox) -> None:
    """Contract 21: that effect, once, by its own agent or the operator, with a reason."""
    await parked_on(alice, bob, CHARGE)
    with refused("not_in_doubt"):
        await bob.judge_effect(RUN, "other", "done", reason="x")
    with refused("blank_text"):
        await bob.judge_effect(RUN, "charge", "done", reason="")
    with refused("malformed"):
        await bob.judge_effect(RUN, "charge", "maybe", reason="x")  # type: ignore[arg-type]
    with refused("unknown_task"):
        await carol.judge_effect(RUN, "charge", "done", reason="x")
    with refused("not_permitted"):
        await alice.judge_effect(RUN, "charge", "done", reason="x")
    await box.judge_effect(RUN, "charge", "retry", reason="it is safe")
    with refused("not_in_doubt"):
        await bob.judge_effect(RUN, "charge", "done", reason="x")
