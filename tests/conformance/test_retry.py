"""The retry gate: off unless asked for, bounded, and never silent."""

from __future__ import annotations

from typing import Any

import pytest

from covenant import Idempotency, Mailbox, OpenMailbox, Result, RetryPolicy, SkipReason, TaskState
from covenant.store.clock import ManualClock

from .support import DONE, Reopen, decisions, keyed, lease_many, nothing_for, plain, refused, requeue, stale, take, uid

MINUTES_5_MS = 300_000


async def test_the_gate_is_off_unless_enabled(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 12: by default it tells what it would do, and does nothing."""
    await alice.send_task(keyed(bob, id=uid(1)))
    delivery = await take(bob)
    clock.advance(MINUTES_5_MS)
    before = await box.get_task(uid(1))
    report = await box.retry_stale()
    assert list(report.requeued) == []
    (would,) = report.would_requeue
    assert (would.task_id, would.lease_id, would.attempt) == (uid(1), delivery.lease_id, 1)
    assert (would.idempotency_key, would.lease_age_ms) == ("key", MINUTES_5_MS)
    assert await box.get_task(uid(1)) == before
    assert await decisions(box) == []
    assert await nothing_for(bob)


async def test_the_defaults_are_those_of_the_policy() -> None:
    """Contract 12: the bounds that the policy names."""
    assert RetryPolicy() == RetryPolicy(
        enabled=False, min_lease_age_ms=300_000, max_attempts=3, max_requeues=1, scan_limit=100
    )


async def test_a_stale_idempotent_task_is_requeued_under_its_id(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 12: same id, next attempt, an `auto_requeue` row, and the old holder is superseded."""
    await alice.send_task(keyed(bob, id=uid(1)))
    old = await take(bob)
    clock.advance(MINUTES_5_MS)
    report = await box.retry_stale(RetryPolicy(enabled=True))
    assert [candidate.task_id for candidate in report.requeued] == [uid(1)]
    assert list(report.would_requeue) == []
    entry = await box.get_task(uid(1))
    assert (entry.state, entry.attempt, entry.generation) == (TaskState.QUEUED, 1, old.generation + 1)
    (row,) = await decisions(box)
    assert (row.kind, row.action, row.task_id, row.lease_id) == ("repair", "auto_requeue", uid(1), old.lease_id)
    assert (row.duplicate_risk, row.declared, row.attempt) == ("idempotent", "idempotent", 1)
    assert row.reason
    assert row.at_ms == clock.now_ms()
    new = await take(bob)
    assert (new.task, new.attempt) == (old.task, 2)
    with refused("lease_superseded"):
        await bob.send_result(Result.ok(old, DONE))


async def test_a_preview_is_exactly_what_an_enabled_pass_does(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 12: disabled, it shows exactly what it would do, skips and all."""
    tasks = [
        keyed(bob, f"{number}", id=uid(number)) if number % 3 else plain(bob, id=uid(number)) for number in range(12)
    ]
    await lease_many(alice, bob, tasks)
    await requeue(box, uid(1))
    await take(bob)
    clock.advance(1000)
    bounds: dict[str, Any] = {"min_lease_age_ms": 500, "max_requeues": 3, "max_attempts": 2, "scan_limit": 11}
    preview = await box.retry_stale(stale(enabled=False, **bounds))
    done = await box.retry_stale(stale(**bounds))
    assert list(preview.would_requeue) == list(done.requeued)
    assert (list(preview.skipped), list(preview.exhausted)) == (list(done.skipped), list(done.exhausted))
    assert (preview.considered, preview.cursor) == (done.considered, done.cursor)
    assert [candidate.task_id for candidate in done.requeued] == [uid(2), uid(4), uid(5)]


async def test_a_lease_is_stale_from_the_minimum_age_on(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 12: younger than the minimum is too young, and a heartbeat makes it young again."""
    await alice.send_task(keyed(bob))
    delivery = await take(bob)
    policy = stale(min_lease_age_ms=1000, enabled=False)
    clock.advance(999)
    (skip,) = (await box.retry_stale(policy)).skipped
    assert (skip.reason, skip.lease_age_ms) == (SkipReason.LEASE_TOO_YOUNG, 999)
    clock.advance(1)
    assert len((await box.retry_stale(policy)).would_requeue) == 1
    await bob.heartbeat(delivery)
    assert len((await box.retry_stale(policy)).would_requeue) == 0


async def test_every_skip_has_its_reason(box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 12: a task that is left alone says why, and stays as it is."""
    unsafe = plain(bob, id=uid(2), idempotency=Idempotency("unsafe", "key"))
    leased = await lease_many(alice, bob, [plain(bob, id=uid(1)), unsafe, keyed(bob, "3", id=uid(3))])
    await alice.cancel_task(uid(3), graceful=True)
    await alice.send_task(keyed(bob, "4", id=uid(4)))
    await take(bob)
    await requeue(box, uid(4))
    await take(bob)
    await lease_many(alice, bob, [keyed(bob, str(number), id=uid(number)) for number in (5, 6)])
    clock.advance(1000)
    await lease_many(alice, bob, [keyed(bob, "7", id=uid(7))])
    report = await box.retry_stale(stale(min_lease_age_ms=1000, max_attempts=2, max_requeues=1))
    assert [(skip.task_id, skip.reason) for skip in report.skipped] == [
        (uid(1), SkipReason.MISSING_IDEMPOTENCY),
        (uid(2), SkipReason.UNSAFE_DUPLICATE_SAFETY),
        (uid(3), SkipReason.CANCEL_REQUESTED),
        (uid(4), SkipReason.MAX_ATTEMPTS_REACHED),
        (uid(6), SkipReason.LIMIT_REACHED),
        (uid(7), SkipReason.LEASE_TOO_YOUNG),
    ]
    assert [candidate.task_id for candidate in report.requeued] == [uid(5)]
    assert report.considered == 7
    assert (await bob.heartbeat(leased[0])).attempt == 1


async def test_the_reasons_are_stable_slugs() -> None:
    """Contract 12: programs read them."""
    assert {reason.value for reason in SkipReason} == {
        "lease_too_young",
        "missing_idempotency",
        "unsafe_duplicate_safety",
        "max_attempts_reached",
        "limit_reached",
        "capability_scope_mismatch",
        "cancel_requested",
        "waiting_for_input",
    }


async def test_a_task_out_of_attempts_stays_listed_as_exhausted(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 12: until someone decides, in every pass."""
    await alice.send_task(keyed(bob, id=uid(1)))
    for _ in range(2):
        await take(bob)
        assert len((await box.retry_stale(stale(max_attempts=3))).requeued) == 1
    assert (await take(bob)).attempt == 3
    for enabled in (True, False, True):
        report = await box.retry_stale(stale(max_attempts=3, enabled=enabled))
        assert list(report.exhausted) == [uid(1)]
        assert list(report.requeued) == list(report.would_requeue) == []
    await requeue(box, uid(1))
    assert list((await box.retry_stale(stale(max_attempts=3))).exhausted) == []


async def test_max_requeues_bounds_a_pass(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 12: so many and no more, the oldest first; zero means none."""
    await lease_many(alice, bob, [keyed(bob, str(number), id=uid(number)) for number in range(5)])
    assert list((await box.retry_stale(stale(max_requeues=0))).requeued) == []
    report = await box.retry_stale(stale(max_requeues=2))
    assert [candidate.task_id for candidate in report.requeued] == [uid(0), uid(1)]
    assert [skip.reason for skip in report.skipped] == [SkipReason.LIMIT_REACHED] * 3


async def test_queued_tasks_do_not_starve_the_gate(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 12: it scans leases, oldest first, however many tasks are queued before them."""
    await alice.send_task(keyed(bob, id=uid(1)))
    await take(bob)
    await alice.send_tasks([plain(bob) for _ in range(200)])
    report = await box.retry_stale(stale(scan_limit=10))
    assert (report.considered, [candidate.task_id for candidate in report.requeued]) == (1, [uid(1)])


async def test_leases_that_may_not_be_retried_do_not_hide_one_that_may(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """Contract 12: the cursor goes on behind what a pass has looked at."""
    await lease_many(alice, bob, [*(plain(bob) for _ in range(150)), keyed(bob, id=uid(1))])
    first = await box.retry_stale(stale(scan_limit=100))
    assert (first.considered, list(first.requeued)) == (100, [])
    assert first.cursor is not None
    second = await box.retry_stale(stale(scan_limit=100), cursor=first.cursor)
    assert (second.considered, [candidate.task_id for candidate in second.requeued]) == (51, [uid(1)])
    assert second.cursor is None


async def test_the_order_of_the_scan_is_the_last_sign_of_life(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 12: who was silent longest comes first, also after a heartbeat."""
    leased = await lease_many(alice, bob, [keyed(bob, str(number), id=uid(number)) for number in range(3)])
    await bob.heartbeat(leased[0])
    report = await box.retry_stale(stale(max_requeues=1))
    assert [candidate.task_id for candidate in report.requeued] == [uid(1)]


async def test_the_scan_is_the_same_after_a_restart(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, reopen: Reopen
) -> None:
    """Contract 12: age and order of the leases survive."""
    leased = await lease_many(alice, bob, [keyed(bob, str(number), id=uid(number)) for number in range(4)])
    await bob.heartbeat(leased[1])
    before = await box.retry_stale(stale(enabled=False, scan_limit=3))
    assert await (await reopen()).retry_stale(stale(enabled=False, scan_limit=3)) == before


@pytest.mark.parametrize("enabled", [False, True], ids=["disabled", "enabled"])
async def test_every_scheduled_pass_leaves_a_row(box: OpenMailbox, alice: Mailbox, bob: Mailbox, enabled: bool) -> None:
    """Contract 12: an `a2a_auto_retry_scheduler_scan` row sums up each pass of the scheduler, an empty one too."""
    await box.retry_stale(stale(enabled=enabled), scheduled=True)
    await lease_many(alice, bob, [plain(bob), keyed(bob, "2"), keyed(bob, "3")])
    await box.retry_stale(stale(enabled=enabled, max_requeues=1), scheduled=True)
    rows = await decisions(box)
    scans = [row for row in rows if row.kind == "a2a_auto_retry_scheduler_scan"]
    assert [row.counts["considered"] for row in scans] == [0, 3]
    counts = scans[1].counts
    assert (counts["requeued"], counts["would_requeue"]) == ((1, 0) if enabled else (0, 1))
    assert (counts["skipped"], counts["skipped.missing_idempotency"], counts["skipped.limit_reached"]) == (2, 1, 1)
    assert [row.action for row in rows if row.kind == "repair"] == (["auto_requeue"] if enabled else [])


async def test_only_the_operator_runs_the_gate(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 12: a peer does not requeue, nor look at the leases of others."""
    await alice.send_task(keyed(bob, id=uid(1)))
    delivery = await take(bob)
    for peer in (alice, bob):
        for enabled in (True, False):
            with refused("not_permitted"):
                await peer.retry_stale(stale(enabled=enabled))
    assert (await bob.heartbeat(delivery)).attempt == 1


async def test_a_clock_set_back_makes_no_lease_stale(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 12: an age is never negative, and never wraps."""
    await alice.send_task(keyed(bob))
    await take(bob)
    clock.advance(-MINUTES_5_MS)
    (skip,) = (await box.retry_stale(stale(min_lease_age_ms=1))).skipped
    assert (skip.reason, skip.lease_age_ms) == (SkipReason.LEASE_TOO_YOUNG, 0)
    assert (await box.task_queue(state="in_flight", min_lease_age_ms=1)).tasks == []


@pytest.mark.parametrize(
    ("bounds", "code"),
    [
        ({"max_requeues": -1}, "malformed"),
        ({"max_attempts": True}, "malformed"),
        ({"min_lease_age_ms": 1.5}, "malformed"),
        ({"enabled": "yes"}, "malformed"),
        ({"scan_limit": 10**9}, "too_large"),
        ({"max_requeues": 10**9}, "too_large"),
    ],
    ids=str,
)
async def test_a_policy_without_bounds_is_refused(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, bounds: dict[str, Any], code: str
) -> None:
    """Contract 12: every bound is a number within its own bound."""
    await alice.send_task(keyed(bob, id=uid(1)))
    delivery = await take(bob)
    with refused(code):
        await box.retry_stale(stale(**bounds))
    assert (await bob.heartbeat(delivery)).attempt == 1


@pytest.mark.parametrize("cursor", ["", "x", "-1", "1" * 40, "task:1", 5], ids=repr)
async def test_a_foreign_cursor_is_refused(box: OpenMailbox, cursor: Any) -> None:
    """Contract 12: a pass does not start just anywhere."""
    with refused("bad_cursor"):
        await box.retry_stale(stale(), cursor=cursor)
