"""Covenant on PostgreSQL: the same cycles as on the disk, by one engine per process; and agents that only wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from bench.covenant_cycle import run_clients
from bench.work import INTENT, Figures
from covenant import Mailbox, Task

_PATIENCE_S: Final = 30


async def cycles(
    folder: Path, url: str, clients: int, first: int, warm_s: float, seconds: float, turns: AsyncIterator[None]
) -> AsyncIterator[Figures]:
    """First that the store is open, then the figures of each turn. Without clients, it is open and idle."""
    async with Mailbox.open(url) as box:
        yield {}
        async for _ in turns:
            yield await run_clients(box, clients, warm_s, seconds, first)


async def waiting(folder: Path, url: str, steps: list[int], turns: AsyncIterator[None]) -> AsyncIterator[Figures]:
    """At each turn so many agents wait for a task as the next step says; at the last turn all of them are woken."""
    async with Mailbox.open(url) as box:
        yield {}
        waiters: list[asyncio.Task[object]] = []
        left = iter(steps)
        try:
            async for _ in turns:
                count = next(left, None)
                if count is None:
                    yield await _woken(box, waiters)
                    return
                boxes = (box.of(f"w{number}") for number in range(len(waiters), count))
                waiters += [asyncio.create_task(waiter.recv_task()) for waiter in boxes]
                yield {"waiters": len(waiters)}
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)


async def _woken(box: Mailbox, waiters: list[asyncio.Task[object]]) -> Figures:
    """They were waiting indeed: each gets the task that is sent to it now."""
    sender = box.of("sender")
    recipients = [box.of(f"w{number}").agent for number in range(len(waiters))]
    tasks = [Task(recipient=recipient, intent_text=INTENT) for recipient in recipients]
    await sender.send_tasks(tasks)
    done, _ = await asyncio.wait(waiters, timeout=_PATIENCE_S)
    return {"woken": len(done)}
