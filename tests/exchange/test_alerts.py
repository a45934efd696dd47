"""Alerts: told once when something begins, once when it ends, and never in anybody's way."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from covenant import ForceError, Limits, RepairRequest, Result, RetryPolicy
from covenant.exchange import alerts as alerts_module
from covenant.exchange.alerts import AlertSummary, IncidentKind, Thresholds
from covenant.exchange.scheduler import RetryPlan
from covenant.model.error import BadSetting, StoreUnavailable
from covenant.model.limits import SPAN_MS_MAX
from covenant.store.clock import ManualClock
from tests.conformance.support import DONE, answer_next, keyed, lease_many, plain, requeue, soon, stale, take, uid
from tests.exchange import Site, site
from tests.until import until

STALE_MS = 300_000
THRESHOLDS = Thresholds(every_ms=30_000, stale_ms=STALE_MS, queue_depth=3)

Told = Callable[[], list[tuple[str, str]]]


@pytest.fixture
async def s(clock: ManualClock) -> AsyncIterator[Site]:
    async with site(clock, alerts=THRESHOLDS) as made:
        yield made


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """What was told since the last time that was asked: the incident, and whether it begins or ends."""
    caplog.set_level(logging.INFO, "covenant.alerts")

    def since() -> list[tuple[str, str]]:
        lines = [record.getMessage().split()[:2] for record in caplog.records if record.name == "covenant.alerts"]
        caplog.clear()
        return [(incident, state.rstrip(":")) for incident, state in lines]

    return since


# --- leases ------------------------------------------------------------------------------------------------


async def test_a_stale_lease_is_told_once_and_once_more_when_it_is_over(
    s: Site, clock: ManualClock, told: Told
) -> None:
    await s.alice.send_task(plain(s.bob, id=uid(1)))
    held = await take(s.bob)
    clock.advance(STALE_MS - 1)
    await s.daemon.alerts.check()
    assert told() == []
    clock.advance(1)
    await s.daemon.alerts.check()
    assert told() == [("stale_lease", "open")]
    for _ in range(3):
        clock.advance(STALE_MS)
        await s.daemon.alerts.check()
    assert told() == []
    assert s.daemon.alerts.summary().open[IncidentKind.STALE_LEASE] == 1
    await s.bob.send_result(Result.ok(held, DONE))
    await s.daemon.alerts.check()
    assert told() == [("stale_lease", "resolved")]
    await s.daemon.alerts.check()
    assert told() == []
    assert s.daemon.alerts.summary() == AlertSummary(dict.fromkeys(IncidentKind, 0))


async def test_a_sign_of_life_ends_the_incident_and_silence_begins_another(
    s: Site, clock: ManualClock, told: Told
) -> None:
    await s.alice.send_task(plain(s.bob))
    held = await take(s.bob)
    clock.advance(STALE_MS)
    await s.daemon.alerts.check()
    await s.bob.heartbeat(held)
    await s.daemon.alerts.check()
    clock.advance(STALE_MS)
    await s.daemon.alerts.check()
    assert told() == [("stale_lease", "open"), ("stale_lease", "resolved"), ("stale_lease", "open")]


async def test_who_waits_for_input_is_no_incident_and_hides_none(clock: ManualClock, told: Told) -> None:
    """Contract 12: a holder waiting for input is not stale; what is behind it still is."""
    policy = stale(max_attempts=1, min_lease_age_ms=STALE_MS)
    async with site(clock, alerts=THRESHOLDS, limits=Limits(page_max=2), retry=RetryPlan(policy=policy)) as s:
        waiting = await lease_many(s.alice, s.bob, [keyed(s.bob, str(number)) for number in range(3)])
        for delivery in waiting:
            await s.bob.ask(delivery)
        await lease_many(s.alice, s.bob, [keyed(s.bob, "silent")])
        clock.advance(STALE_MS)
        await s.daemon.alerts.check()
        assert told() == [("stale_lease", "open"), ("task_exhausted", "open")]
        await s.alice.add_message(waiting[0].task.id, "red")  # from here on it is the holder's turn
        await s.daemon.alerts.check()
        assert told() == []
        clock.advance(STALE_MS)
        await s.daemon.alerts.check()
        assert told() == [("stale_lease", "open"), ("task_exhausted", "open")]


async def test_every_stale_lease_is_an_incident_of_its_own(s: Site, clock: ManualClock, told: Told) -> None:
    """More than one page of them; and those that are young are none."""
    await lease_many(s.alice, s.bob, [plain(s.bob, id=uid(number)) for number in range(1, 251)])
    clock.advance(STALE_MS)
    await lease_many(s.alice, s.bob, [plain(s.bob) for _ in range(20)])
    await s.daemon.alerts.check()
    assert told() == [("stale_lease", "open")] * 250
    await s.box.repair_task(RepairRequest(uid(7), ForceError("gone"), "gone"))
    await s.daemon.alerts.check()
    assert told() == [("stale_lease", "resolved")]


async def test_a_check_tells_of_no_more_leases_than_its_bound(
    s: Site, clock: ManualClock, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stalest come first, and the others when there is room."""
    monkeypatch.setattr(alerts_module, "_LEASES_MAX", 100)
    leased = await lease_many(s.alice, s.bob, [plain(s.bob) for _ in range(130)])
    clock.advance(STALE_MS)
    await s.daemon.alerts.check()
    await s.daemon.alerts.check()
    assert told() == [("stale_lease", "open")] * 100
    for delivery in leased[:10]:
        await s.bob.send_result(Result.ok(delivery, DONE))
    await s.daemon.alerts.check()
    assert sorted(told()) == [("stale_lease", "open")] * 10 + [("stale_lease", "resolved")] * 10


async def test_a_task_out_of_attempts_is_told_until_somebody_decides(s: Site, clock: ManualClock, told: Told) -> None:
    """Contract 12: exhausted as the retry gate reports it, with the attempts that it is given by default."""
    await s.alice.send_task(keyed(s.bob, id=uid(1)))
    for _ in range(2):
        await take(s.bob)
        await requeue(s.box, uid(1))
    await take(s.bob)
    clock.advance(STALE_MS)
    await s.daemon.alerts.check()
    await s.daemon.alerts.check()
    assert told() == [("stale_lease", "open"), ("task_exhausted", "open")]
    assert list((await s.box.retry_stale(RetryPolicy())).exhausted) == [uid(1)]
    await requeue(s.box, uid(1))
    await s.daemon.alerts.check()
    assert sorted(told()) == [("stale_lease", "resolved"), ("task_exhausted", "resolved")]


async def test_an_unsafe_task_is_never_exhausted(s: Site, clock: ManualClock, told: Told) -> None:
    """No attempt of it is the gate's to give."""
    await s.alice.send_task(plain(s.bob, id=uid(1)))
    for _ in range(5):
        await take(s.bob)
        await requeue(s.box, uid(1))
    await take(s.bob)
    clock.advance(STALE_MS)
    await s.daemon.alerts.check()
    assert told() == [("stale_lease", "open")]


async def test_the_attempts_are_those_of_the_schedulers_plan(clock: ManualClock, told: Told) -> None:
    plan = RetryPlan(policy=stale(max_attempts=1, min_lease_age_ms=1000))
    async with site(clock, alerts=THRESHOLDS, retry=plan) as s:
        await s.alice.send_task(keyed(s.bob))
        await take(s.bob)
        clock.advance(1000)
        await s.daemon.alerts.check()
        assert told() == [("task_exhausted", "open")]


async def test_exhausted_tasks_are_found_behind_many_others(clock: ManualClock, told: Told) -> None:
    async with site(
        clock, alerts=THRESHOLDS, limits=Limits(page_max=10), retry=RetryPlan(policy=stale(max_attempts=1))
    ) as s:
        await lease_many(s.alice, s.bob, [*(plain(s.bob) for _ in range(35)), keyed(s.bob)])
        clock.advance(1)
        await s.daemon.alerts.check()
        assert told() == [("task_exhausted", "open")]


# --- queues ------------------------------------------------------------------------------------------------


async def test_a_queue_that_grows_over_its_threshold_is_told_and_its_end_too(s: Site, told: Told) -> None:
    for _ in range(3):
        await s.alice.send_task(plain(s.bob))
    await s.daemon.alerts.check()
    assert told() == []
    await s.alice.send_task(plain(s.bob))
    await s.daemon.alerts.check()
    await s.daemon.alerts.check()
    assert told() == [("queue_growing", "open")]
    await answer_next(s.bob)
    await s.daemon.alerts.check()
    assert told() == [("queue_growing", "resolved")]


async def test_only_tasks_that_are_ready_count(s: Site, clock: ManualClock, told: Told) -> None:
    """Neither those that wait for their time, nor followers, nor what is for somebody else."""
    for _ in range(4):
        await s.alice.send_task(plain(s.bob, not_before_ms=clock.now_ms() + 1000))
        await s.alice.send_task(keyed(s.bob))
    for _ in range(2):
        await s.bob.send_task(plain(s.alice))
        await s.alice.send_task(plain(s.bob))
    await s.daemon.alerts.check()
    assert told() == []
    clock.advance(1000)
    await s.daemon.alerts.check()
    assert told() == [("queue_growing", "open")]


async def test_a_queue_is_counted_to_its_end_however_many_tasks_stand_before_it(clock: ManualClock, told: Told) -> None:
    """No page and no bound of a listing comes into it."""
    async with site(clock, alerts=THRESHOLDS, limits=Limits(page_max=2, scan_max=2)) as s:
        carol = s.box.of("carol@lab")
        await s.box.of("alice@lab").send_tasks([plain(s.bob) for _ in range(500)])
        await s.alice.send_tasks([plain(carol) for _ in range(4)])
        await s.daemon.alerts.check()
        assert told() == [("queue_growing", "open")] * 2
        await answer_next(carol)
        await s.daemon.alerts.check()
        assert told() == [("queue_growing", "resolved")]


# --- restarts ----------------------------------------------------------------------------------------------


@pytest.fixture
def restarted(clock: ManualClock, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Site]]:
    """One daemon after the other in the same home."""

    def again(**settings: Any) -> AbstractAsyncContextManager[Site]:
        store, file = f"file:{tmp_path / 'data'}", tmp_path / "alerts.json"
        return site(clock, store, alerts=THRESHOLDS, alerts_file=file, **settings)

    return again


async def test_what_was_told_is_not_told_again_by_the_next_daemon(
    restarted: Callable[..., AbstractAsyncContextManager[Site]], clock: ManualClock, told: Told
) -> None:
    async with restarted() as s:
        held = await be_stale(s, clock)
        await s.alice.send_tasks([plain(s.bob) for _ in range(4)])
        await s.daemon.alerts.check()
        assert told() == [("stale_lease", "open"), ("queue_growing", "open")]
    for _ in range(2):
        clock.advance(1000)
        async with restarted() as s:
            assert s.daemon.alerts.summary().open[IncidentKind.STALE_LEASE] == 1
            await s.daemon.alerts.check()
            assert told() == []
    async with restarted() as s:
        await s.bob.send_result(Result.ok(held, DONE))
        await answer_next(s.bob)
    async with restarted() as s:  # it ended, and the daemon too before it looked
        await s.daemon.alerts.check()
        assert sorted(told()) == [("queue_growing", "resolved"), ("stale_lease", "resolved")]
    async with restarted() as s:
        await s.daemon.alerts.check()
        assert told() == []


async def test_an_incident_has_the_same_id_before_and_after_a_restart(
    restarted: Callable[..., AbstractAsyncContextManager[Site]], clock: ManualClock, receiver: Receiver
) -> None:
    async with restarted(alert_url=receiver.url) as s:
        await s.alice.send_tasks([plain(s.bob) for _ in range(4)])
        await s.daemon.alerts.check()
        await posts(s, posted=1)
    clock.advance(1000)
    async with restarted(alert_url=receiver.url) as s:
        await answer_next(s.bob)
        await s.daemon.alerts.check()
        await posts(s, posted=1)
    began, ended = receiver.got
    assert (began["state"], ended["state"]) == ("open", "resolved")
    assert (began["id"], began["since_ms"]) == (ended["id"], ended["since_ms"])


async def test_what_the_receiver_did_not_get_is_posted_by_the_next_daemon(
    restarted: Callable[..., AbstractAsyncContextManager[Site]], clock: ManualClock, receiver: Receiver
) -> None:
    silence = asyncio.Event()

    async def never() -> web.Response:
        await silence.wait()
        return web.Response()

    receiver.answer = never
    async with restarted(alert_url=receiver.url) as s:
        held = await be_stale(s, clock)
        await until(lambda: len(receiver.got) == 1)  # and no answer comes
    silence.set()
    async with restarted(alert_url=receiver.url) as s:
        await s.daemon.alerts.check()
        await posts(s, posted=1)
        assert receiver.got[1]["id"] == receiver.got[0]["id"]
        silence.clear()
        await s.bob.heartbeat(held)
        await s.daemon.alerts.check()
        await until(lambda: len(receiver.got) == 3)
    silence.set()
    async with restarted(alert_url=receiver.url) as s:
        await s.daemon.alerts.check()
        await posts(s, posted=1)
    assert [alert["state"] for alert in receiver.got] == ["open", "open", "resolved", "resolved"]


async def test_a_kill_after_a_post_does_not_repeat_it(
    restarted: Callable[..., AbstractAsyncContextManager[Site]], clock: ManualClock, receiver: Receiver, tmp_path: Path
) -> None:
    async with restarted(alert_url=receiver.url) as s:
        await be_stale(s, clock)
        await posts(s, posted=1)
        await until(lambda: b"stale_lease" in (tmp_path / "alerts.json").read_bytes())


async def test_notes_that_cannot_be_read_or_written_stop_nobody(
    restarted: Callable[..., AbstractAsyncContextManager[Site]],
    clock: ManualClock,
    tmp_path: Path,
    told: Told,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "alerts.json").write_bytes(b"{")
    (tmp_path / "alerts.json").chmod(0o600)
    async with restarted() as s:
        assert "alerts.json" in caplog.text
        (tmp_path / "alerts.json.making").mkdir()
        caplog.clear()
        await be_stale(s, clock)
        assert "alerts.json" in caplog.text


# --- the check itself --------------------------------------------------------------------------------------


async def test_a_daemon_checks_by_itself(s: Site, clock: ManualClock, told: Told) -> None:
    await s.alice.send_task(plain(s.bob))
    await take(s.bob)
    clock.advance(STALE_MS)
    await until(lambda: s.daemon.alerts.summary().open[IncidentKind.STALE_LEASE] == 1)
    assert told() == [("stale_lease", "open")]


async def test_a_check_that_fails_changes_nothing_and_the_next_one_goes_on(
    s: Site, clock: ManualClock, told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await s.alice.send_task(plain(s.bob))
    held = await take(s.bob)
    clock.advance(STALE_MS)
    await s.daemon.alerts.check()
    await s.bob.heartbeat(held)
    assert told() == [("stale_lease", "open")]
    with monkeypatch.context() as down:

        async def ask(*_: Any) -> Any:
            raise StoreUnavailable("the disk is away")

        down.setattr(s.daemon.store, "ask", ask)
        clock.advance(THRESHOLDS.every_ms)
        await until(lambda: "the disk is away" in caplog.text)
    assert s.daemon.alerts.summary().open[IncidentKind.STALE_LEASE] == 1
    await asyncio.sleep(0)
    clock.advance(THRESHOLDS.every_ms)
    await until(lambda: s.daemon.alerts.summary().open[IncidentKind.STALE_LEASE] == 0)


async def test_a_check_changes_nothing_in_the_store(s: Site, clock: ManualClock) -> None:
    await s.alice.send_task(keyed(s.bob, id=uid(1)))
    await take(s.bob)
    clock.advance(STALE_MS)
    before = await s.box.get_task(uid(1)), await s.box.recent_audit(100)
    await s.daemon.alerts.check()
    assert (await s.box.get_task(uid(1)), await s.box.recent_audit(100)) == before


@pytest.mark.parametrize("depth", [1, 3])
async def test_a_queue_that_takes_no_more_is_told_below_the_threshold_too(
    clock: ManualClock, told: Told, depth: int
) -> None:
    """Contract 34: else, with a bound below the threshold, nothing would ever be told."""
    async with site(clock, alerts=THRESHOLDS, limits=Limits(queue_depth_max=depth)) as s:
        for number in range(depth - 1):
            await s.alice.send_task(plain(s.bob, id=uid(number)))
        await s.daemon.alerts.check()
        assert told() == []
        await s.alice.send_task(plain(s.bob, id=uid(depth)))
        await s.daemon.alerts.check()
        assert told() == [("queue_growing", "open")]


@pytest.mark.parametrize("name", ["every_ms", "stale_ms", "queue_depth"])
@pytest.mark.parametrize("value", [0, -1, SPAN_MS_MAX + 1, 2**53, True, 1.5])
def test_a_threshold_is_a_number_from_one(name: str, value: Any) -> None:
    with pytest.raises(BadSetting) as refused:
        Thresholds(**{name: value})
    assert refused.value.details["name"] == name


# --- the post ----------------------------------------------------------------------------------------------


class Receiver:
    """A web server that takes alerts as the test says."""

    def __init__(self) -> None:
        self.url = ""
        self.got: list[dict[str, Any]] = []
        self.asked: set[tuple[str, str]] = set()
        self.answer: Callable[[], Awaitable[web.Response]] = self._ok

    async def _ok(self) -> web.Response:
        return web.Response(status=204)

    async def take(self, request: web.Request) -> web.Response:
        self.asked.add((request.method, request.path))
        assert request.headers["Content-Type"] == "application/json"
        self.got.append(json.loads(await request.read()))
        return await self.answer()

    def answers(self, *statuses: int) -> None:
        """These, and then it takes everything."""
        left = list(statuses)

        async def answer() -> web.Response:
            return web.Response(status=left.pop(0) if left else 200, headers={"Location": "/elsewhere"})

        self.answer = answer


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", receiver.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    listening = web.TCPSite(runner, "127.0.0.1", 0)
    await listening.start()
    host, port = runner.addresses[0]
    receiver.url = f"http://{host}:{port}/hook?key=secret"
    try:
        yield receiver
    finally:
        await runner.cleanup()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as made:
        yield made


@pytest.fixture
async def posting(clock: ManualClock, receiver: Receiver) -> AsyncIterator[Site]:
    async with site(clock, alerts=THRESHOLDS, alert_url=receiver.url) as made:
        yield made


async def be_stale(s: Site, clock: ManualClock) -> Any:
    await s.alice.send_task(plain(s.bob, id=uid(1)))
    held = await take(s.bob)
    clock.advance(STALE_MS)
    await s.daemon.alerts.check()
    return held


async def posts(s: Site, **counts: int) -> None:
    """Until the courier has so many, which must be reached."""

    def are_there() -> bool:
        summary = s.daemon.alerts.summary()
        return all(getattr(summary, name) == count for name, count in counts.items())

    await until(are_there)


async def test_what_is_posted_says_what_why_and_what_to_do(
    posting: Site, clock: ManualClock, receiver: Receiver
) -> None:
    began_ms = clock.now_ms()
    held = await be_stale(posting, clock)
    await posts(posting, posted=1)
    (alert,) = receiver.got
    command = alert.pop("command")
    assert command.startswith(f"covenant a2a requeue {uid(1)} --lease-id {held.lease_id}")
    assert "bob@lab" in alert.pop("detail")
    assert alert == {
        "kind": "covenant_alert",
        "id": f"stale_lease:{held.lease_id}:{began_ms}",
        "incident": "stale_lease",
        "state": "open",
        "at_ms": clock.now_ms(),
        "since_ms": began_ms,
        "task_id": uid(1),
        "lease_id": held.lease_id,
        "recipient": "bob@lab",
    }
    clock.advance(1)
    await posting.bob.send_result(Result.ok(held, DONE))
    await posting.daemon.alerts.check()
    await posts(posting, posted=2)
    over = receiver.got[1]
    assert (over["id"], over["state"], over["at_ms"]) == (alert["id"], "resolved", clock.now_ms())
    assert (over["since_ms"], over["task_id"]) == (began_ms, uid(1))


async def test_a_queue_that_grows_names_its_recipient(posting: Site, receiver: Receiver) -> None:
    for _ in range(4):
        await posting.alice.send_task(plain(posting.bob))
    await posting.daemon.alerts.check()
    await posts(posting, posted=1)
    (alert,) = receiver.got
    assert (alert["incident"], alert["recipient"]) == ("queue_growing", "bob@lab")
    assert "task_id" not in alert and "lease_id" not in alert


async def later(clock: ManualClock, got: Callable[[], bool]) -> None:
    """Let time pass in small steps, until the courier has tried again."""

    def step() -> bool:
        if not got():
            clock.advance(100)
        return got()

    await until(step)


@pytest.mark.parametrize("status", [500, 503, 404, 302])
async def test_what_is_not_taken_is_posted_again(
    posting: Site, clock: ManualClock, receiver: Receiver, status: int
) -> None:
    receiver.answers(status, status)
    await be_stale(posting, clock)
    await later(clock, lambda: len(receiver.got) == 3)
    await posts(posting, posted=1, failed=0)
    assert receiver.got[0] == receiver.got[1] == receiver.got[2]
    assert receiver.asked == {("POST", "/hook")}


async def test_after_five_tries_an_alert_is_given_up_and_the_next_one_goes_out(
    posting: Site, clock: ManualClock, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers(*[500] * 5)
    held = await be_stale(posting, clock)
    await later(clock, lambda: posting.daemon.alerts.summary().failed == 1)
    assert len(receiver.got) == 5
    assert f"given up: stale_lease:{held.lease_id}" in caplog.text
    await posting.bob.heartbeat(held)
    await posting.daemon.alerts.check()
    await posts(posting, posted=1, failed=1)
    assert receiver.got[-1]["state"] == "resolved"


async def test_a_wait_before_a_try_is_twice_the_one_before(
    posting: Site, clock: ManualClock, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []

    async def wait(clock: ManualClock, due_ms: int) -> None:
        waits.append(due_ms - clock.now_ms())

    monkeypatch.setattr(alerts_module, "sleep_until", wait)
    receiver.answers(*[500] * 5)
    await be_stale(posting, clock)
    await posts(posting, failed=1)
    assert waits == [1000, 2000, 4000, 8000]


async def test_nobody_there_is_a_failure_like_any_other(clock: ManualClock) -> None:
    async with receiving() as gone:
        url = gone.url
    async with site(clock, alerts=THRESHOLDS, alert_url=url) as s:
        await be_stale(s, clock)
        await later(clock, lambda: s.daemon.alerts.summary().failed == 1)


async def test_a_receiver_that_never_answers_holds_nobody_up(
    clock: ManualClock, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts_module, "_TIMEOUT_S", 0.02)
    silence = asyncio.Event()

    async def never() -> web.Response:
        await silence.wait()
        return web.Response()

    receiver.answer = never
    async with site(clock, alerts=THRESHOLDS, alert_url=receiver.url) as s:
        held = await be_stale(s, clock)
        await until(lambda: len(receiver.got) == 1)
        await soon(s.bob.send_result(Result.ok(held, DONE)))
        await soon(s.daemon.alerts.check())
        await later(clock, lambda: s.daemon.alerts.summary().failed == 1)
    silence.set()


async def test_a_daemon_ends_while_an_alert_is_under_way(clock: ManualClock, receiver: Receiver) -> None:
    silence = asyncio.Event()

    async def never() -> web.Response:
        await silence.wait()
        return web.Response()

    receiver.answer = never
    async with site(clock, alerts=THRESHOLDS, alert_url=receiver.url) as s:
        await be_stale(s, clock)
        await until(lambda: len(receiver.got) == 1)
    silence.set()


async def test_when_too_many_wait_the_oldest_goes_and_is_counted(
    clock: ManualClock, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts_module, "_UNSENT_MAX", 5)
    async with site(clock, alerts=THRESHOLDS, alert_url=receiver.url) as s:
        await lease_many(s.alice, s.bob, [plain(s.bob, id=uid(number)) for number in range(8)])
        clock.advance(STALE_MS)
        await s.daemon.alerts.check()
        await posts(s, dropped=3, posted=5, waiting=0)
    assert [alert["task_id"] for alert in receiver.got] == [uid(number) for number in range(3, 8)]


@pytest.mark.parametrize("url", ["", "ftp://host/x", "host:80", "http://", "https://[bad", "http://h:99999", "file:x"])
def test_an_alert_goes_only_to_a_web_address(url: str, clock: ManualClock) -> None:
    async def idle() -> None: ...

    with pytest.raises(BadSetting) as refused:
        alerts_module.Courier(url, clock, idle)
    assert refused.value.details["name"] == "--alert-url"


async def test_the_log_does_not_tell_the_secret_in_a_url(
    posting: Site, clock: ManualClock, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "covenant")
    receiver.answers(*[500] * 5)
    await be_stale(posting, clock)
    await later(clock, lambda: posting.daemon.alerts.summary().failed == 1)
    assert "127.0.0.1" in caplog.text and "secret" not in caplog.text
