"""Work that is done again and again: at its time, also where the clock fires early or is set back."""

from __future__ import annotations

import asyncio

from covenant.exchange.scheduler import Rounds, sleep_until
from covenant.store.clock import ManualClock


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_sleep_ends_when_its_time_has_come_and_not_before(clock: ManualClock) -> None:
    """The clock of the tests fires early, again and again."""
    sleeping = asyncio.create_task(sleep_until(clock, clock.now_ms() + 1000))
    await turns()
    for _ in range(9):
        clock.advance(111)
        await turns()
        assert not sleeping.done()
    clock.advance(1)
    await turns()
    assert sleeping.done()


async def test_a_sleep_ends_when_the_clock_was_set_back(clock: ManualClock) -> None:
    """Nobody knows how long it would be; it is seen when the clock fires early."""
    sleeping = asyncio.create_task(sleep_until(clock, clock.now_ms() + 1000))
    await turns()
    clock.advance(-3_600_000)
    for _ in range(20):
        clock.advance(0)
        await turns()
    assert sleeping.done()


async def test_each_round_comes_an_interval_behind_the_last(clock: ManualClock) -> None:
    began: list[int] = []
    start_ms = clock.now_ms()

    async def work() -> None:
        began.append(clock.now_ms() - start_ms)

    rounds = Rounds(clock, 1000, work)
    rounds.start()
    await turns()
    for _ in range(350):
        clock.advance(10)
        await turns()
    await rounds.stop()
    assert began == [1000, 2000, 3000]
