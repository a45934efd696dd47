"""A clock that is wrong: nobody's tasks are ended, expired or buried by it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from covenant import AgentId, Limits, Mailbox, Result, TaskState
from covenant.model.error import ClockAstray
from covenant.store.clock import ManualClock, SystemClock
from covenant.store.postgres import pulse as pulses
from covenant.store.postgres import rounds
from covenant.store.postgres.rows import DUE
from tests.conformance.support import DONE, drain, plain, take, uid
from tests.postgres import settle, store_url
from tests.postgres.support import engine_of, until

ALICE, BOB = AgentId.named("alice@lab"), AgentId.named("bob@lab")
MONTH_MS = 31 * 24 * 3600 * 1000


class Shifted(SystemClock):
    def __init__(self, by_ms: int = 0) -> None:
        self.by_ms = by_ms

    def now_ms(self) -> int:
        return super().now_ms() + self.by_ms


@pytest.mark.parametrize("by_ms", [MONTH_MS, 10_000, -10_000])
async def test_a_daemon_with_a_wrong_clock_does_not_start(by_ms: int) -> None:
    url = store_url()
    async with Mailbox.open(url) as box:
        with pytest.raises(ClockAstray, match=r"s (ahead of|behind) the database's") as refused:
            await Mailbox.open(url, clock=Shifted(by_ms))
        assert abs(refused.value.details["skew_ms"] - by_ms) < 2_000
        assert len(await engine_of(box).daemons()) == 1
    async with Mailbox.open(url, clock=Shifted(by_ms // abs(by_ms) * 3_000)):
        pass


async def test_a_clock_that_goes_wrong_ends_nothing_until_it_is_right_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pulses, "BEAT_S", 0.05)
    monkeypatch.setattr(pulses, "SILENCE_BEATS", 100)
    monkeypatch.setattr(rounds, "POLL_S", 0.05)
    monkeypatch.setattr(rounds, "TIDY_S", 0.05)
    url, clock = store_url(), Shifted()
    async with Mailbox.open(url) as right, Mailbox.open(url, clock=clock, limits=Limits()) as box:
        alice, bob, engine = box.of(ALICE), box.of(BOB), engine_of(box)
        engine.join("key of the realm", lambda pubkey: None)
        await until(engine.leads)
        done = await alice.send_task(plain(bob))
        await bob.send_result(Result.ok(await take(bob), DONE))
        await drain(alice)
        due = await alice.send_task(plain(bob, deadline_ms=int(time.time() * 1000) + 3_600_000))
        clock.by_ms = MONTH_MS
        assert not engine.is_on_time  # before the next beat can tell
        await until(lambda: not engine.is_up)
        assert engine.ails == "clock_astray" and not engine.leads()
        await until(lambda: not engine._pulse.leads)  # so another may
        with pytest.raises(ClockAstray):
            await box.compact()
        looks = 0
        look = engine._rounds.look

        async def noted() -> None:
            nonlocal looks
            await look()
            looks += 1

        monkeypatch.setattr(engine._rounds, "look", noted)
        await alice.send_task(plain(bob))
        await until(lambda: looks > 2)
        for task_id, state in ((done.task_id, TaskState.RESOLVED), (due.task_id, TaskState.QUEUED)):
            assert (await right.get_task(task_id)).state is state
        clock.by_ms = 0
        await until(lambda: engine.is_up and engine.leads())
    told = [row.getMessage() for row in caplog.records if "clock" in row.getMessage() and row.levelno > logging.INFO]
    assert len(told) == 2 and "left to others" in told[0] and "right again" in told[1]


async def test_a_slow_answer_is_no_wrong_clock() -> None:
    async with Mailbox.open(store_url()) as box:
        pulse = engine_of(box)._pulse
        now = int(time.time() * 1000)
        for before, there, skew in ((now - 9_000, now - 8_000, 0), (now - 9_000, now - 9_500, 500)):
            pulse._learn_skew(before, there)
            assert pulse._skew_ms == skew


@pytest.mark.parametrize("when", ["slow look", "expiry"])
async def test_a_time_that_is_set_during_a_look_at_times_is_kept(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the look found may be older than what was committed meanwhile."""
    monkeypatch.setattr(rounds, "POLL_S", 3_600)
    clock = ManualClock()
    async with Mailbox.open(store_url(), clock=clock) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        engine = engine_of(box)
        now = clock.now_ms()
        await alice.send_task(plain(bob, not_before_ms=now + 1_000))
        await alice.send_task(plain(bob, not_before_ms=now + 60_000))
        fetch = engine._reader.fetch

        async def slow(sql: str, *values: Any) -> Any:
            found = await fetch(sql, *values)
            if DUE in values:
                monkeypatch.setattr(engine._reader, "fetch", fetch)
                await alice.send_task(plain(bob, id=uid(7), not_before_ms=now + 30_000))
            return found

        if when == "expiry":
            monkeypatch.setattr(engine._reader, "fetch", slow)
            clock.advance(1_000)
            await settle(engine)
        else:
            clock.advance(1_000)
            await settle(engine)
            monkeypatch.setattr(engine._reader, "fetch", slow)
            await engine._rounds.look()
        await take(bob)
        waiting = asyncio.create_task(take(bob))
        await until(lambda: engine.waking.ready.count == 1 and engine.queue.free == len(engine._lanes))
        clock.advance(30_000)
        assert (await waiting).task.id == uid(7)
