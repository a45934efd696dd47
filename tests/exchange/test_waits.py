"""Waits that end by themselves, when the exchange says so, and not before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covenant.exchange.waits import Waits
from covenant.model.error import RateLimited


async def waiter(waits: Waits, peer: str = "p", until: asyncio.Future[None] | None = None) -> str:
    with waits.timed(peer):
        await (until or asyncio.get_running_loop().create_future())
        return "woken"
    return "over"


async def test_all_waits_end_with_their_time() -> None:
    waits = Waits(100, wait_ms_max=10)
    async with asyncio.timeout(10):
        first = [asyncio.ensure_future(waiter(waits)) for _ in range(3)]
        assert await asyncio.gather(*first) == ["over"] * 3
        second = [asyncio.ensure_future(waiter(waits)) for _ in range(3)]
        assert await asyncio.gather(*second) == ["over"] * 3
    assert waits.total == 0


async def test_a_wait_that_begins_later_ends_later(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, waits = asyncio.get_running_loop(), Waits(100, wait_ms_max=60_000)
    now = loop.time()
    first = asyncio.ensure_future(waiter(waits))
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "time", lambda: now + 30)
    second = asyncio.ensure_future(waiter(waits))
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "time", lambda: now + 61)
    waits._look()
    assert await first == "over"
    assert not second.done()
    monkeypatch.setattr(loop, "time", lambda: now + 91)
    waits._look()
    assert await second == "over"


async def test_the_timer_is_set_anew_for_those_who_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, waits, armed = asyncio.get_running_loop(), Waits(100, wait_ms_max=60_000), []
    now, call_at = loop.time(), loop.call_at

    def noted(due: float, *said: Any) -> asyncio.TimerHandle:
        armed.append(due - now)
        return call_at(due, *said)

    monkeypatch.setattr(loop, "call_at", noted, raising=False)
    for later in (0, 30, 61):
        monkeypatch.setattr(loop, "time", lambda at=now + later: at)
        waiting = asyncio.ensure_future(waiter(waits))
        await asyncio.sleep(0)
    waits._look()
    assert armed == pytest.approx([60, 90])
    waits.end()
    await waiting


async def test_one_timer_looks_after_all_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, waits, armed = asyncio.get_running_loop(), Waits(100, wait_ms_max=60_000), 0
    call_at = loop.call_at

    def counted(*said: object) -> asyncio.TimerHandle:
        nonlocal armed
        armed += 1
        return call_at(*said)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_at", counted, raising=False)
    for _ in range(5):
        until = loop.create_future()
        waiting = asyncio.ensure_future(waiter(waits, until=until))
        await asyncio.sleep(0)
        until.set_result(None)
        assert await waiting == "woken"
    assert armed == 1


async def test_a_peer_that_is_thrown_out_waits_no_longer() -> None:
    waits = Waits(100, wait_ms_max=60_000)
    until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    eve = asyncio.ensure_future(waiter(waits, "eve"))
    bob = asyncio.ensure_future(waiter(waits, "bob", until))
    await asyncio.sleep(0)
    waits.end("eve")
    assert await eve == "over"
    until.set_result(None)
    assert await bob == "woken"


async def test_who_is_cancelled_by_others_as_well_is_cancelled() -> None:
    waits = Waits(100, wait_ms_max=60_000)
    waiting = asyncio.ensure_future(waiter(waits))
    await asyncio.sleep(0)
    waits.end()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert waits.total == 0


async def test_there_is_room_for_so_many() -> None:
    waits = Waits(1, wait_ms_max=60_000)
    until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(waiter(waits, until=until))
    await asyncio.sleep(0)
    assert not waits.has_room("p") and waits.has_room("q")
    with pytest.raises(RateLimited):
        await waiter(waits)
    until.set_result(None)
    assert await waiting == "woken"
    assert waits.has_room("p")
