"""The retry scheduler: only when asked for, through the door, one pass after the other, and never silent."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant import Limits, RetryPolicy, TaskState
from covenant.exchange.scheduler import PREFIX, SCAN_ROW, RetryPlan, Scheduler, plan_from
from covenant.model import command as c
from covenant.model.error import BadSetting, CovenantError
from covenant.model.limits import SPAN_MS_MAX
from covenant.model.peer import Caller, Scope
from covenant.model.query import ListGrants
from covenant.store.clock import ManualClock
from covenant.store.journal.engine import Journal
from tests.conformance.support import keyed, lease_many, plain, stale, take, uid
from tests.exchange import Site, site
from tests.journal.support import FailingFiles
from tests.until import until

INTERVAL_MS = 60_000
FIVE_MINUTES_MS = 300_000
NUMBERS = ("INTERVAL_MS", "MIN_LEASE_AGE_MS", "MAX_ATTEMPTS", "MAX_REQUEUES", "SCAN_LIMIT")


# --- the six variables -------------------------------------------------------------------------------------


def env(**variables: str) -> dict[str, str]:
    return {PREFIX + name: value for name, value in variables.items()}


def test_an_empty_environment_means_off_and_the_documented_bounds() -> None:
    assert plan_from({}) == RetryPlan(
        interval_ms=60_000,
        policy=RetryPolicy(enabled=False, min_lease_age_ms=300_000, max_attempts=3, max_requeues=1, scan_limit=100),
    )


def test_each_variable_says_its_part_of_the_plan() -> None:
    told = env(
        SCHEDULER="1", INTERVAL_MS="7", MIN_LEASE_AGE_MS="0", MAX_ATTEMPTS="9", MAX_REQUEUES=" 8 ", SCAN_LIMIT="5"
    )
    policy = RetryPolicy(enabled=True, min_lease_age_ms=0, max_attempts=9, max_requeues=8, scan_limit=5)
    assert plan_from(told) == RetryPlan(interval_ms=7, policy=policy)


@pytest.mark.parametrize("word", ["1", "true", "yes", "on", " ON ", "True", "yEs\n"])
def test_these_words_switch_it_on(word: str) -> None:
    assert plan_from(env(SCHEDULER=word)).policy.enabled


@pytest.mark.parametrize("word", ["0", "false", "no", "off", " OFF ", "False"])
def test_these_words_switch_it_off(word: str) -> None:
    assert not plan_from(env(SCHEDULER=word)).policy.enabled


@pytest.mark.parametrize("word", ["", " ", "2", "enable", "y", "truee", "on off"])
def test_any_other_word_is_an_error_that_names_the_variable(word: str) -> None:
    with pytest.raises(BadSetting) as refused:
        plan_from(env(SCHEDULER=word))
    assert refused.value.details["name"] == "COVENANT_A2A_AUTO_RETRY_SCHEDULER"


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1e3", "1_000", "٣", "9" * 19, "9" * 5000])
@pytest.mark.parametrize("variable", NUMBERS)
def test_what_is_no_number_is_an_error_also_when_it_is_off(variable: str, text: str, switch: str) -> None:
    with pytest.raises(BadSetting) as refused:
        plan_from(env(SCHEDULER=switch, **{variable: text}))
    assert refused.value.details["name"] == PREFIX + variable


def test_an_interval_of_nothing_is_an_error() -> None:
    with pytest.raises(BadSetting) as refused:
        plan_from(env(INTERVAL_MS="0"))
    assert refused.value.details["name"] == "COVENANT_A2A_AUTO_RETRY_INTERVAL_MS"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("INTERVAL_MS", str(SPAN_MS_MAX + 1)),
        ("MIN_LEASE_AGE_MS", str(SPAN_MS_MAX + 1)),
        ("MAX_ATTEMPTS", "0"),
        ("MAX_ATTEMPTS", "1"),  # a lease is an attempt
        ("MAX_REQUEUES", "0"),
        ("SCAN_LIMIT", "0"),
    ],
)
@pytest.mark.parametrize("switch", ["on", "off"])
def test_what_would_never_requeue_anything_is_an_error(variable: str, text: str, switch: str) -> None:
    """Contract 34: also on the day before it is switched on."""
    with pytest.raises(BadSetting) as refused:
        plan_from(env(SCHEDULER=switch, **{variable: text}))
    assert refused.value.details["name"] == PREFIX + variable


@pytest.mark.parametrize(
    ("variable", "field", "most"),
    [
        ("MIN_LEASE_AGE_MS", "min_lease_age_ms", SPAN_MS_MAX),
        ("MAX_ATTEMPTS", "max_attempts", 2**31),
        ("MAX_REQUEUES", "max_requeues", 7),
        ("SCAN_LIMIT", "scan_limit", 9),
    ],
)
async def test_a_bound_is_that_of_the_gate(variable: str, field: str, most: int, clock: ManualClock) -> None:
    limits = Limits(step_records_max=7, page_max=9)
    usual = {"MAX_REQUEUES": "1", "SCAN_LIMIT": "1"}
    async with site(clock, limits=limits) as s:
        await s.box.retry_stale(plan_from(env(**{**usual, variable: str(most)}), limits).policy)
        with pytest.raises(CovenantError):
            await s.box.retry_stale(stale(**{"max_requeues": 1, "scan_limit": 1, field: most + 1}))
    with pytest.raises(BadSetting) as refused:
        plan_from(env(**{**usual, variable: str(most + 1)}), limits)
    assert refused.value.details["name"] == PREFIX + variable


# --- passes ------------------------------------------------------------------------------------------------


@pytest.fixture
async def s(clock: ManualClock) -> AsyncIterator[Site]:
    async with site(clock) as made:
        yield made


def scheduler(s: Site, clock: ManualClock, **bounds: Any) -> Scheduler:
    plan = RetryPlan(interval_ms=INTERVAL_MS, policy=stale(**bounds))
    return Scheduler(s.exchange, plan, clock, lambda: s.operator)


async def state_of(s: Site, number: int) -> TaskState:
    return (await s.box.get_task(uid(number))).state


async def test_a_pass_requeues_and_leaves_the_check_the_requeue_and_the_summary(s: Site, clock: ManualClock) -> None:
    await s.alice.send_task(keyed(s.bob, id=uid(1)))
    held = await take(s.bob)
    clock.advance(FIVE_MINUTES_MS)
    await scheduler(s, clock, min_lease_age_ms=FIVE_MINUTES_MS).run_pass()
    assert await state_of(s, 1) is TaskState.QUEUED
    (scan,) = await s.rows(SCAN_ROW)
    assert scan.counts == {"considered": 1, "requeued": 1, "would_requeue": 0, "skipped": 0, "exhausted": 0}
    assert (scan.actor, scan.reason) == ("operator", None)
    (requeue,) = await s.rows("repair")
    assert (requeue.action, requeue.task_id, requeue.lease_id) == ("auto_requeue", uid(1), held.lease_id)
    (check,) = await s.rows("capability_check")
    assert (check.action, check.passed) == ("a2a.repair.requeue", True)


async def test_a_pass_that_finds_nothing_has_its_row(s: Site, clock: ManualClock) -> None:
    await scheduler(s, clock).run_pass()
    (scan,) = await s.rows(SCAN_ROW)
    assert (scan.counts["considered"], scan.counts["requeued"]) == (0, 0)


async def test_without_the_grant_a_pass_is_refused_and_says_so(s: Site, clock: ManualClock) -> None:
    """Contract 12 and 26: the capability is never bypassed, and its revocation holds at the next pass."""
    await s.alice.send_task(keyed(s.bob, id=uid(1)))
    await take(s.bob)
    passes = scheduler(s, clock)
    await revoke_requeue(s)
    await passes.run_pass()
    assert await state_of(s, 1) is TaskState.IN_FLIGHT
    (denied,) = await s.rows("capability_check")
    assert (denied.action, denied.passed) == ("a2a.repair.requeue", False)
    (scan,) = await s.rows(SCAN_ROW)
    assert (scan.reason, scan.counts) == ("missing_capability", {})

    await s.exchange.trust.grant(s.operator, "operator@local", "a2a.repair.requeue", Scope(), None, False, None)
    await passes.run_pass()
    assert await state_of(s, 1) is TaskState.QUEUED
    assert [row.reason for row in await s.rows(SCAN_ROW)] == ["missing_capability", None]


async def revoke_requeue(s: Site) -> None:
    grants = await s.exchange.ask(s.operator, ListGrants(None, 100))
    (grant,) = [grant for grant in grants.capabilities if grant.action == "a2a.repair.requeue"]
    await s.exchange.run(s.operator, c.RevokeCapability(None, grant.id, "not now"))


async def test_a_grant_for_one_task_reaches_no_other(s: Site, clock: ManualClock) -> None:
    await lease_many(s.alice, s.bob, [keyed(s.bob, str(number), id=uid(number)) for number in (1, 2)])
    await revoke_requeue(s)
    scope = Scope(task_id=uid(2))
    await s.exchange.trust.grant(s.operator, "operator@local", "a2a.repair.requeue", scope, None, False, None)
    await scheduler(s, clock).run_pass()
    assert [await state_of(s, number) for number in (1, 2)] == [TaskState.IN_FLIGHT, TaskState.QUEUED]
    (scan,) = await s.rows(SCAN_ROW)
    assert scan.counts["skipped.capability_scope_mismatch"] == 1


async def test_passes_together_look_at_every_lease(s: Site, clock: ManualClock) -> None:
    """Leases that may not be retried stand before one that may; the passes get there, and begin anew."""
    tasks = [plain(s.bob, id=uid(number)) for number in range(1, 6)]
    await lease_many(s.alice, s.bob, [*tasks, keyed(s.bob, id=uid(6))])
    passes = scheduler(s, clock, scan_limit=2)
    for _ in range(2):
        await passes.run_pass()
    assert await state_of(s, 6) is TaskState.IN_FLIGHT
    await passes.run_pass()
    assert await state_of(s, 6) is TaskState.QUEUED
    for _ in range(3):
        await passes.run_pass()
    assert [row.counts["considered"] for row in await s.rows(SCAN_ROW)] == [2, 2, 2, 0, 2, 2]


async def test_a_pass_goes_on_where_the_bound_stopped_the_one_before(s: Site, clock: ManualClock) -> None:
    await lease_many(s.alice, s.bob, [keyed(s.bob, str(number), id=uid(number)) for number in range(1, 7)])
    passes = scheduler(s, clock, scan_limit=3, max_requeues=1)
    for done in range(1, 7):
        await passes.run_pass()
        queued = [number for number in range(1, 7) if await state_of(s, number) is TaskState.QUEUED]
        assert queued == list(range(1, done + 1))


async def test_a_bound_of_no_requeues_does_not_hold_the_passes_up(s: Site, clock: ManualClock) -> None:
    await lease_many(s.alice, s.bob, [keyed(s.bob, str(number)) for number in range(3)])
    passes = scheduler(s, clock, scan_limit=2, max_requeues=0)
    for _ in range(2):
        await passes.run_pass()
    assert [row.counts["considered"] for row in await s.rows(SCAN_ROW)] == [2, 1]


# --- the timer ---------------------------------------------------------------------------------------------


async def scans(s: Site, count: int) -> None:
    async def are_there() -> bool:
        return len(await s.rows(SCAN_ROW)) >= count

    await until(are_there)
    assert len(await s.rows(SCAN_ROW)) == count


async def test_there_is_a_pass_every_interval_and_none_before_the_first(s: Site, clock: ManualClock) -> None:
    passes = scheduler(s, clock)
    passes.start()
    clock.advance(INTERVAL_MS - 1)
    await asyncio.sleep(0)
    await scans(s, 0)
    clock.advance(1)
    await scans(s, 1)
    clock.advance(INTERVAL_MS)
    await scans(s, 2)
    await passes.stop()
    clock.advance(INTERVAL_MS)
    await asyncio.sleep(0)
    await scans(s, 2)


async def test_a_clock_that_was_set_back_does_not_stop_the_passes(s: Site, clock: ManualClock) -> None:
    passes = scheduler(s, clock)
    passes.start()
    await asyncio.sleep(0)
    clock.advance(-24 * 60 * 60 * 1000)
    for _, _, timer in list(clock._timers):
        timer.fire()  # the system's clock is looked at in slices, so that a jump is noticed
    await scans(s, 1)
    clock.advance(INTERVAL_MS)
    await scans(s, 2)
    await passes.stop()


async def test_passes_never_overlap(s: Site, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, running, most = asyncio.Event(), 0, 0
    run = s.exchange.run

    async def slow(caller: Caller, command: c.Command) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        return await run(caller, command)

    monkeypatch.setattr(s.exchange, "run", slow)
    passes = scheduler(s, clock)
    passes.start()
    for _ in range(5):
        clock.advance(INTERVAL_MS)
        await until(lambda: running == 1)
    gate.set()
    await scans(s, 1)
    clock.advance(INTERVAL_MS)
    await scans(s, 2)
    assert most == 1
    await passes.stop()


async def test_an_unforeseen_error_does_not_end_the_passes(
    s: Site, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:

        async def fails(caller: Caller, command: c.Command) -> Any:
            raise RuntimeError("a defect")

        broken.setattr(s.exchange, "run", fails)
        passes = scheduler(s, clock)
        passes.start()
        clock.advance(INTERVAL_MS)
        await until(lambda: "a defect" in caplog.text)
    await asyncio.sleep(0)
    clock.advance(INTERVAL_MS)
    await scans(s, 1)
    await passes.stop()


async def test_a_store_that_is_down_for_a_while_is_outlived_and_told_of(
    clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Passes fail while the disk does; the row of the first that can be written counts them."""
    async with site(clock, f"file:{tmp_path}/data") as s:
        store = s.daemon.store
        assert isinstance(store, Journal)
        files = FailingFiles(tmp_path / "data", 0, errno.EIO)
        await s.alice.send_task(keyed(s.bob, id=uid(1)))
        await take(s.bob)
        passes = scheduler(s, clock)
        await _lose_the_disk(s, store, files)
        for _ in range(3):
            await passes.run_pass()
        assert caplog.text.count("came to nothing") == 3
        clock.advance(store.limits.reopen_delay_ms)
        await until(lambda: store.is_up)
        await passes.run_pass()
        assert await state_of(s, 1) is TaskState.QUEUED
        worked, failed = await s.rows(SCAN_ROW)
        assert (worked.reason, worked.counts["requeued"]) == (None, 1)
        assert (failed.reason, failed.counts) == ("store_unavailable", {"not_written": 2})


async def _lose_the_disk(s: Site, store: Journal, files: FailingFiles) -> None:
    """The next sync fails, and the journal is closed until its clock says that it may try again."""
    sync = store._writer._file
    assert sync is not None

    def fails() -> None:
        files.tick("sync")

    files.fail_at = 1
    sync.sync = fails  # type: ignore[method-assign]
    with pytest.raises(CovenantError) as refused:
        await s.alice.send_task(plain(s.bob))
    assert refused.value.code == "store_unavailable"
    assert not store.is_up


# --- in the daemon -----------------------------------------------------------------------------------------


async def test_a_daemon_runs_the_scheduler_that_it_is_told_to(clock: ManualClock) -> None:
    plan = plan_from(env(SCHEDULER="on", INTERVAL_MS="1000", MIN_LEASE_AGE_MS="500"))
    async with site(clock, retry=plan) as s:
        await s.alice.send_task(keyed(s.bob, id=uid(1)))
        await take(s.bob)
        clock.advance(1000)
        await scans(s, 1)
        assert await state_of(s, 1) is TaskState.QUEUED


async def test_a_daemon_that_is_not_told_runs_none(clock: ManualClock) -> None:
    async with site(clock, retry=plan_from(env(INTERVAL_MS="1000"))) as s:
        clock.advance(10_000)
        await asyncio.sleep(0)
        await scans(s, 0)


async def test_the_scheduler_survives_a_rotation_of_the_operators_token(clock: ManualClock) -> None:
    async with site(clock, retry=plan_from(env(SCHEDULER="on", INTERVAL_MS="1000"))) as s:
        await s.exchange.trust.rotate(s.operator, None)
        clock.advance(1000)
        await scans(s, 1)
        assert [row.reason for row in await s.rows(SCAN_ROW)] == [None]
