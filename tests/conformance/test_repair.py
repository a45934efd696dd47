"""Repair by hand: explicit, with a reason, on record."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covenant import ForceError, Idempotency, Mailbox, OpenMailbox, Outcome, RepairRequest, Requeue, Result, TaskState
from covenant.store.clock import ManualClock

from .support import (
    DONE,
    Reopen,
    answer_next,
    decisions,
    drain,
    keyed,
    nothing_back_for,
    nothing_for,
    plain,
    refused,
    take,
    uid,
)

REQUEUE = RepairRequest(uid(1), Requeue("operator_accepted"), "the worker is gone")
FORCE = RepairRequest(uid(1), ForceError("given up"), "nobody will do it")


async def test_a_requeued_task_keeps_its_id_and_its_attempts(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: requeue returns the task to the queue and preserves the attempt counter."""
    await alice.send_task(plain(bob, id=uid(1)))
    old = await take(bob)
    outcome = await box.repair_task(REQUEUE)
    assert (outcome.task_id, outcome.action, outcome.state, outcome.attempt) == (uid(1), "requeued", "queued", 1)
    entry = await box.get_task(uid(1))
    assert (entry.state, entry.attempt, entry.lease_id, entry.leased_to) == (TaskState.QUEUED, 1, None, None)
    new = await take(bob)
    assert (new.task, new.attempt) == (old.task, 2)
    assert new.lease_id != old.lease_id
    assert await nothing_for(bob)


async def test_a_requeued_task_goes_to_the_back_of_the_queue(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: it does not push in before those who wait."""
    await alice.send_tasks([plain(bob, id=uid(number)) for number in (1, 2, 3)])
    await take(bob)
    await box.repair_task(REQUEUE)
    await alice.send_task(plain(bob, id=uid(4)))
    assert [(await take(bob)).task.id for _ in range(4)] == [uid(2), uid(3), uid(1), uid(4)]


@pytest.mark.parametrize(
    ("idempotency", "declared"),
    [
        (None, "unsafe"),
        (Idempotency("unsafe", "key"), "unsafe"),
        (Idempotency("idempotent", "key"), "idempotent"),
    ],
    ids=["none", "unsafe", "idempotent"],
)
@pytest.mark.parametrize("risk", ["idempotent", "operator_accepted"])
async def test_the_audit_row_has_both_risks(
    box: OpenMailbox,
    alice: Mailbox,
    bob: Mailbox,
    clock: ManualClock,
    idempotency: Idempotency | None,
    declared: str,
    risk: Any,
) -> None:
    """Contract 13: the operator's posture stands beside what the task declares, in one row."""
    await alice.send_task(plain(bob, id=uid(1), idempotency=idempotency))
    delivery = await take(bob)
    clock.advance(7)
    await box.repair_task(RepairRequest(uid(1), Requeue(risk), "the worker is gone"))
    (row,) = await decisions(box)
    assert (row.kind, row.action, row.actor, row.at_ms) == ("repair", "requeue", "operator", clock.now_ms())
    assert (row.task_id, row.lease_id, row.attempt) == (uid(1), delivery.lease_id, 1)
    assert (row.duplicate_risk, row.declared, row.reason) == (risk, declared, "the worker is gone")


async def test_a_forced_error_answers_the_sender(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: force_error clears the lease and posts an error result."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    outcome = await box.repair_task(FORCE)
    assert (outcome.action, outcome.state, outcome.attempt) == ("forced_error", "result_pending", 1)
    assert outcome.result is not None
    assert (outcome.result.status, outcome.result.error_message) == ("error", "given up")
    answer = await drain(alice)
    assert (answer.task_id, answer.status, answer.error_message) == (uid(1), "error", "given up")
    assert list(answer.content) == []
    assert (await alice.get_task(uid(1))).outcome == Outcome.FORCED
    with refused("task_terminal"):
        await bob.heartbeat(delivery)
    assert await nothing_for(bob)
    assert await nothing_back_for(alice)
    (row,) = await decisions(box)
    assert (row.kind, row.action, row.reason, row.declared) == ("repair", "force_error", "nobody will do it", "unsafe")


@pytest.mark.parametrize("order", [Requeue("operator_accepted"), ForceError("given up")], ids=["requeue", "force"])
async def test_a_repair_needs_a_reason(box: OpenMailbox, alice: Mailbox, bob: Mailbox, order: Any) -> None:
    """Contract 13: a blank reason, or a blank message, is refused, and the lease stays."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    for reason in ("", "  \n"):
        with refused("blank_text"):
            await box.repair_task(RepairRequest(uid(1), order, reason))
    with refused("blank_text"):
        await box.repair_task(RepairRequest(uid(1), ForceError(" "), "reason"))
    assert (await bob.heartbeat(delivery)).attempt == 1
    assert await decisions(box) == []


@pytest.mark.parametrize("kind", ["requeue", "force"])
async def test_a_guard_keeps_a_newer_lease_from_being_repaired(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, kind: str
) -> None:
    """Contract 13: `lease_id` names the lease that the operator looked at."""

    def repair(lease_id: str) -> RepairRequest:
        guarded = Requeue("idempotent", lease_id) if kind == "requeue" else ForceError("given up", lease_id)
        return RepairRequest(uid(1), guarded, "stuck")

    await alice.send_task(keyed(bob, id=uid(1)))
    old = await take(bob)
    await box.repair_task(REQUEUE)
    new = await take(bob)
    with refused("lease_mismatch") as caught:
        await box.repair_task(repair(old.lease_id))
    assert (caught.value.details["expected"], caught.value.details["actual"]) == (old.lease_id, new.lease_id)
    assert (await bob.heartbeat(new)).attempt == 2
    assert len(await decisions(box)) == 1
    await box.repair_task(repair(new.lease_id))
    assert len(await decisions(box)) == 2


async def test_of_two_guarded_repairs_at_once_one_is_done(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: two operators do not requeue one lease twice."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    request = RepairRequest(uid(1), Requeue("operator_accepted", delivery.lease_id), "stuck")
    replies = await asyncio.gather(*(box.repair_task(request) for _ in range(4)), return_exceptions=True)
    assert [isinstance(reply, Exception) for reply in replies].count(False) == 1
    assert len(await decisions(box)) == 1
    assert (await take(bob)).attempt == 2


async def test_only_what_is_in_flight_can_be_repaired(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: neither a queued task nor one that has ended."""
    await alice.send_task(plain(bob, id=uid(1)))
    for request in (REQUEUE, FORCE):
        with refused("not_leased"):
            await box.repair_task(request)
    await answer_next(bob)
    for request in (REQUEUE, FORCE):
        with refused("not_leased"):
            await box.repair_task(request)
    with refused("unknown_task"):
        await box.repair_task(RepairRequest(uid(2), Requeue("idempotent"), "stuck"))
    assert (await drain(alice)).status == "ok"
    assert await decisions(box) == []


async def test_a_peer_does_not_repair(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 13: who sees the task may not, and who does not see it learns nothing."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    for request in (REQUEUE, FORCE):
        for party in (alice, bob):
            with refused("not_permitted"):
                await party.repair_task(request)
        with refused("unknown_task"):
            await carol.repair_task(request)
    assert (await bob.heartbeat(delivery)).attempt == 1
    with refused("not_permitted"):
        await carol.recent_audit()


@pytest.mark.parametrize(
    "request_",
    [
        None,
        "requeue",
        RepairRequest(uid(1), None, "stuck"),  # type: ignore[arg-type]
        RepairRequest(uid(1), Requeue("unsafe"), "stuck"),  # type: ignore[arg-type]
        RepairRequest(uid(1), Requeue(None), "stuck"),  # type: ignore[arg-type]
        RepairRequest(uid(1), ForceError(None), "stuck"),  # type: ignore[arg-type]
        RepairRequest(uid(1), Requeue("idempotent"), 5),  # type: ignore[arg-type]
    ],
    ids=["none", "text", "no command", "no such posture", "no posture", "no message", "no reason"],
)
async def test_a_malformed_repair_is_refused(box: OpenMailbox, alice: Mailbox, bob: Mailbox, request_: Any) -> None:
    """Contract 13: the posture is one of two, and a request is a request."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    with refused("malformed"):
        await box.repair_task(request_)
    assert (await bob.heartbeat(delivery)).attempt == 1


async def test_repairs_and_their_rows_survive_a_restart(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, reopen: Reopen
) -> None:
    """Contract 13: the change and the row that describes it are both there."""
    await alice.send_task(plain(bob, id=uid(1)))
    await take(bob)
    await box.repair_task(REQUEUE)
    await take(bob)
    await box.repair_task(FORCE)
    rows = await decisions(box)
    box = await reopen()
    assert await decisions(box) == rows
    assert [row.action for row in rows] == ["requeue", "force_error"]
    answer = await drain(box.of("alice@lab"))
    assert (answer.error_message, answer.attempt) == ("given up", 2)


async def test_recent_audit_shows_the_newest_rows(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: a limit leaves out the oldest."""
    await alice.send_task(plain(bob, id=uid(1)))
    for number in range(4):
        await take(bob)
        await box.repair_task(RepairRequest(uid(1), Requeue("operator_accepted"), f"reason {number}"))
    rows = [row for row in await box.recent_audit(8) if row.kind != "capability_check"][-4:]
    assert [row.kind for row in rows] == ["requeued", "leased", "repair", "requeued"]
    assert [row.reason for row in rows] == ["reason 2", None, "reason 3", "reason 3"]
    assert [row.actor for row in rows] == ["operator", "bob@lab", "operator", "operator"]
    assert await box.recent_audit(0) == []


async def test_a_requeued_idempotent_task_is_answered_once(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: two workers may have done it, the sender hears of one."""
    await alice.send_task(keyed(bob, id=uid(1)))
    old = await take(bob)
    await box.repair_task(RepairRequest(uid(1), Requeue("idempotent"), "silent"))
    await answer_next(bob)
    with refused("lease_superseded"):
        await bob.send_result(Result.ok(old, DONE))
    assert (await drain(alice)).attempt == 2
    assert await nothing_back_for(alice)
