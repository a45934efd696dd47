"""Those who wait in a store: whoever goes away leaves nothing behind, however it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from covenant.store.waiters import Waiters

NUMBER = 1000


async def cancelled(waiters: Waiters, waiting: list[asyncio.Task[str | None]]) -> None:
    for task in waiting:
        task.cancel()


async def cancelled_when_woken(waiters: Waiters, waiting: list[asyncio.Task[str | None]]) -> None:
    waiters.wake_all("bob")
    for task in waiting:
        task.cancel()


async def woken_one_by_one(waiters: Waiters, waiting: list[asyncio.Task[str | None]]) -> None:
    for _ in waiting:
        waiters.wake_one("bob")


async def woken_together(waiters: Waiters, waiting: list[asyncio.Task[str | None]]) -> None:
    waiters.wake_everyone()


async def out_of_time(waiters: Waiters, waiting: list[asyncio.Task[str | None]]) -> None:
    """Each has its own."""


@pytest.mark.parametrize("go", [cancelled, cancelled_when_woken, woken_one_by_one, woken_together, out_of_time])
async def test_a_waiter_that_has_gone_is_waited_for_by_nobody(
    go: Callable[[Waiters, list[asyncio.Task[str | None]]], Awaitable[None]],
) -> None:
    waiters = Waiters(NUMBER)
    wait_s = 0.0 if go is out_of_time else None
    waiting = [asyncio.create_task(waiters.wait("bob", wait_s)) for _ in range(NUMBER)]
    await asyncio.sleep(0)
    assert (waiters.names(), waiters.count) == (["bob"], NUMBER)
    await go(waiters, waiting)
    await asyncio.wait(waiting)
    assert (waiters.names(), waiters.count) == ([], 0)


@pytest.mark.parametrize("is_woken_first", [False, True])
async def test_a_waiter_that_is_cancelled_does_not_take_what_is_for_the_next(is_woken_first: bool) -> None:
    waiters = Waiters(NUMBER)
    gone, next_one = (asyncio.create_task(waiters.wait("bob")) for _ in range(2))
    await asyncio.sleep(0)
    if is_woken_first:
        waiters.wake_one("bob", "letter")
        gone.cancel()  # before it has noticed
    else:
        gone.cancel()
        waiters.wake_one("bob", "letter")
    with pytest.raises(asyncio.CancelledError):
        await gone
    await asyncio.sleep(0)
    assert next_one.done()
    assert await next_one == "letter"
