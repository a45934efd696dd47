"""Runs behind the door: whom they may send to, and what is written down of it. (Contract 26, 28.)"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from covenant import AgentId, AuditRow, CovenantError, Delivery, Mailbox, OpenMailbox, Task
from covenant.model.limits import Limits
from covenant.model.peer import Scope
from covenant.model.run import RunCommit, RunStatus, Wait
from covenant.serve import wire as w
from covenant.serve.daemon import Daemon
from covenant.store.clock import ManualClock
from tests.conformance.support import plain, refused, take, uid
from tests.daemons import Realmful, enrolled, start_daemon


class House:
    """Dan runs durable agents. He may answer alice, and nothing else."""

    def __init__(self, daemon: Daemon, box: OpenMailbox, dan: OpenMailbox) -> None:
        self.daemon = daemon
        self.box = box
        self.dan = dan
        self.alice = box.of("alice@lab")
        self.bob = box.of("bob@lab")

    async def begin(self) -> Delivery:
        await self.alice.send_task(plain(self.dan, id=uid(1)))
        delivery = await take(self.dan)
        await self.dan.commit_run(delivery, RunCommit(number=1))
        return delivery

    async def grant(self, action: str, subject: str = "dan@lab", scope: Scope | None = None) -> str:
        engine = self.box._engine
        request = w.Grant(subject=subject, action=action, scope=scope or Scope())
        granted: w.Granted = await engine.call(request, w.Granted)  # type: ignore[attr-defined]
        return granted.capability.id

    async def revoke(self, grant_id: str) -> None:
        await self.box._engine.call(w.Revoke(grant_id=grant_id), w.Revoked)  # type: ignore[attr-defined]

    async def why(self, task_id: str) -> w.StoryReply:
        return await self.box._engine.call(w.Story(task_id=task_id), w.StoryReply)  # type: ignore[attr-defined,no-any-return]

    async def rows(self, kind: str) -> list[AuditRow]:
        return [row for row in await self.box.recent_audit(200) if row.kind == kind]


@pytest.fixture
async def house(clock: ManualClock) -> AsyncIterator[House]:
    daemon = await start_daemon("memory:", Limits(), clock)
    realm = Realmful()
    await realm.enroll(daemon)
    async with realm.open(daemon, "unix") as box:
        token = (await enrolled(box, "dan@lab", "a2a.respond.*")).token
        async with Mailbox.open(f"unix:{daemon.settings.ipc}", token=token) as dan:
            yield House(daemon, box, dan)
    await daemon.stop()


def part(number: int, to: Mailbox) -> Task:
    return Task(id=uid(number), recipient=to.agent, intent_text="part")


async def test_a_task_of_a_run_needs_the_grant_to_send_it(house: House) -> None:
    """Contract 26: a run is no way around the door; what is refused leaves no part of the commit, and a row."""
    delivery = await house.begin()
    commit = RunCommit(number=2, tasks=[part(10, house.bob)])
    with refused("missing_capability"):
        await house.dan.commit_run(delivery, commit)
    denied = [row for row in await house.rows("capability_check") if row.passed is False]
    assert [(row.action, row.actor) for row in denied] == [("a2a.send.bob@lab", "dan@lab")]
    assert (await house.dan.get_run(uid(1))).step == 1
    await house.grant("a2a.send.bob@lab")
    await house.dan.commit_run(delivery, commit)
    assert (await take(house.bob)).task.sender == house.dan.agent
    allowed = [row for row in await house.rows("capability_check") if row.action == "a2a.send.bob@lab" and row.passed]
    assert [row.scope_id for row in allowed] == ["a2a-send:bob@lab"]


async def test_a_commit_whose_answer_was_lost_is_told_again_whatever_was_revoked_meanwhile(house: House) -> None:
    """Contract 22, 26: what was done was done; what is new needs its grant."""
    delivery = await house.begin()
    grant = await house.grant("a2a.send.bob@lab")
    commit = RunCommit(number=2, tasks=[part(10, house.bob)], wait=Wait(tasks=frozenset((uid(10),))))
    told = await house.dan.commit_run(delivery, commit)
    await house.revoke(grant)
    again = await house.dan.commit_run(delivery, commit)
    assert (again.number, again.parked, again.generation) == (told.number, told.parked, told.generation) == (2, True, 2)
    assert [row for row in await house.rows("capability_check") if row.passed is False] == []
    await house.dan.wake_run(uid(1))
    delivery = await take(house.dan)
    with refused("missing_capability"):
        await house.dan.commit_run(delivery, RunCommit(number=3, tasks=[part(11, house.bob)]))


async def test_a_run_sends_to_itself_without_a_grant(house: House) -> None:
    """Contract 26: what stays within one agent is its own affair; so is the answer to it."""
    delivery = await house.begin()
    standing = await house.dan.commit_run(
        delivery, RunCommit(number=2, tasks=[part(10, house.dan), part(11, house.dan)], begins=[uid(10)])
    )
    assert list(standing.leases) == [uid(10)]
    assert (await take(house.dan)).task.id == uid(11)


async def test_a_run_begins_with_a_signal_only_where_its_agent_takes_tasks_of_the_sender(house: House) -> None:
    """Contract 26: to begin a run is to send; where the gate is on, its agent must have agreed. A run that is there is
    told what it was begun for."""
    house.daemon.store.context.recv_gate = True
    start = Task(recipient=house.dan.agent, intent_text="live")
    with refused("recipient_refused"):
        await house.alice.signal_run(uid(5), "go", start=start)
    with refused("unknown_task"):
        await house.box.get_task(uid(5))
    grant = await house.grant("a2a.recv.alice@lab")
    assert (await house.alice.signal_run(uid(5), "go", start=start)).started
    await house.revoke(grant)
    assert not (await house.alice.signal_run(uid(5), "go", start=start)).started
    with refused("recipient_refused"):
        await house.alice.signal_run(uid(6), "go", start=start)
    gate = [row for row in await house.rows("capability_check") if row.action == "a2a.recv.alice@lab"]
    assert [(row.scope_id, row.passed) for row in gate] == [
        ("a2a-recv:dan@lab", False),
        ("a2a-recv:dan@lab", True),
        ("a2a-recv:dan@lab", False),
    ]


@pytest.mark.parametrize("label", ["dan@lab", "nobody@lab"])
async def test_a_start_under_the_id_of_others_is_refused_as_any_send(house: House, label: str) -> None:
    """Contract 26, 27: whom the recipient does not take tasks of is not told that an id is in use."""
    await house.begin()
    house.daemon.store.context.recv_gate = True
    start = Task(recipient=AgentId(label), intent_text="live")
    told = set()
    for task_id in (uid(1), uid(5)):  # that of others, and a free one
        for verb in (
            house.bob.send_task(msgspec.structs.replace(start, id=task_id)),
            house.bob.signal_run(task_id, "go", start=start),
        ):
            with pytest.raises(CovenantError) as refusal:
                await verb
            told.add((refusal.value.code, refusal.value.message))
    assert [code for code, _ in told] == ["recipient_refused" if label == "dan@lab" else "unknown_peer"]


async def test_the_operator_begins_a_run_with_a_signal(house: House) -> None:
    """Contract 25: as who it is."""
    assert (await house.box.signal_run(uid(5), "go", start=Task(recipient=house.dan.agent, intent_text="x"))).started
    sender = (await house.box.get_task(uid(5))).task.sender
    assert sender is not None and sender.display == "operator@local"


async def test_a_run_that_may_not_send_does_not_learn_whose_a_key_is(house: House) -> None:
    """Contract 27: the refusal has the caller's own words."""
    delivery = await house.begin()
    said = AgentId("said@lab", house.bob.agent.pubkey)
    task = msgspec.structs.replace(part(10, house.bob), recipient=said)
    with refused("missing_capability") as refusal:
        await house.dan.commit_run(delivery, RunCommit(number=2, tasks=[task]))
    assert refusal.value.details["action"] == "a2a.send.said@lab" and "bob" not in refusal.value.message


async def test_why_says_which_task_is_in_doubt_and_where_to_look(house: House, clock: ManualClock) -> None:
    """Contract 23: a run that waits for what nobody knows says so, and leads to what decides."""
    delivery = await house.begin()
    await house.dan.commit_run(delivery, RunCommit(number=2, tasks=[part(10, house.dan)], begins=[uid(10)]))
    wait = Wait(tasks=frozenset((uid(10),)))
    assert (await house.dan.commit_run(delivery, RunCommit(number=3, wait=wait))).parked
    assert (await house.why(uid(1))).reason == "awaiting_work"
    clock.advance(house.box.limits.run_lapse_ms)
    why = await house.why(uid(1))
    assert (why.reason, why.command) == ("child_in_doubt", f"covenant why {uid(10)}")
    assert uid(10) in why.explanation and "may not simply be done again" in why.explanation
    child = await house.why(uid(10))
    assert child.command is not None and child.command.startswith(f"covenant a2a requeue {uid(10)}")


async def test_a_run_whose_worker_lives_and_does_not_go_on_says_since_when(house: House, clock: ManualClock) -> None:
    """Contract 23: a sign of life is no step. A step is one, and so is to be taken up."""
    delivery = await house.begin()
    since = clock.now_ms()
    clock.advance(600_000)
    await house.dan.heartbeat(delivery)
    run = await house.dan.get_run(uid(1))
    assert (run.since_ms, run.heartbeat_ms) == (since, clock.now_ms())
    why = await house.why(uid(1))
    assert why.reason == "held" and f"without a step since Unix time {since} ms" in why.explanation
    await house.dan.commit_run(delivery, RunCommit(number=2, wait=Wait(signals=("go",))))
    assert (await house.dan.get_run(uid(1))).since_ms is None
    clock.advance(600_000)
    await house.alice.signal_run(uid(1), "go")
    delivery = await take(house.dan)
    assert (await house.dan.get_run(uid(1))).since_ms == clock.now_ms()
    clock.advance(1)
    await house.dan.commit_run(delivery, RunCommit(number=3))
    assert (await house.dan.get_run(uid(1))).since_ms == clock.now_ms()


async def test_a_run_does_not_send_under_a_bounded_grant(house: House) -> None:
    """Contract 26: its uses could not be counted one by one."""
    delivery = await house.begin()
    await house.grant("a2a.send.bob@lab", scope=Scope(max_uses=5))
    with refused("not_permitted"):
        await house.dan.commit_run(delivery, RunCommit(number=2, tasks=[part(10, house.bob)]))


async def test_who_may_repair_judges_and_resumes(house: House) -> None:
    """Contract 26: the sender with the grant, in its own name."""
    delivery = await house.begin()
    dead = (await house.dan.get_run(uid(1))).incarnation
    assert dead is not None
    with refused("missing_capability"):
        await house.alice.resume_run(uid(1), dead=dead, evidence="attested", reason="x")
    await house.dan.commit_run(delivery, RunCommit(number=2, wait=Wait(signals=("effect:pay",), doubt="pay")))
    with refused("missing_capability"):
        await house.alice.judge_effect(uid(1), "pay", "done", reason="x")
    await house.grant("a2a.repair.requeue", "alice@lab")
    await house.alice.judge_effect(uid(1), "pay", "done", reason="I was charged")
    assert (await house.dan.get_run(uid(1))).status is RunStatus.WOKEN
    (row,) = await house.rows("effect")
    assert (row.actor, row.action, row.subject, row.reason) == ("alice@lab", "done", "pay", "I was charged")


async def test_what_a_run_does_is_told_in_rows(house: House) -> None:
    """Contract 28: each with its task; what the run keeps for itself is none."""
    delivery = await house.begin()
    await house.dan.commit_run(delivery, RunCommit(number=2, wait=Wait(signals=("message",))))
    await house.alice.add_message(uid(1), "go")
    await take(house.dan)
    rows = [row for row in await house.box.recent_audit(200) if row.task_id == uid(1) and row.passed is None]
    assert [row.kind for row in rows] == [
        *("sent", "leased", "begun", "stepped", "stepped", "parked"),
        *("messaged", "signaled", "woken", "taken_up"),
    ]
    assert [row for row in await house.box.recent_audit(200) if row.task_id is None and row.actor == "dan@lab"] == [
        row for row in await house.rows("capability_check") if row.actor == "dan@lab"
    ]
