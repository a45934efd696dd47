"""Stores with a past: filled with many tasks, queued, resolved or both, then measured; and how long they take to open.

The filled store stays open in its process, so that the parent can take turns between a large and a small one; its
memory is read after the fill, before any cycle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import psutil

from bench.covenant_cycle import run_clients, url_of
from bench.work import INTENT, REPLY, Figures
from covenant import CovenantError, Delivery, Mailbox, Result, Task, Text

EVENTS_PER_CYCLE: Final = 4
_SETTLE_S: Final = 1.0  # for what the engine does behind its replies

Turns: TypeAlias = AsyncIterator[None]
T = TypeVar("T")


async def filled(
    folder: Path, scheme: str, past: str, tasks: int, clients: int, warm_s: float, seconds: float, turns: Turns
) -> AsyncIterator[Figures]:
    """First the figures of the fill, then those of the cycles of each turn."""
    async with Mailbox.open(url_of(folder, scheme)) as box:
        yield await _fill(box, past, tasks)
        async for _ in turns:
            yield await run_clients(box, clients, warm_s, seconds)


async def made(folder: Path, scheme: str, past: str, events: int) -> Figures:
    """A folder with so many events in its journal, closed; with the snapshots that housekeeping happened to make."""
    tasks = events if past == "queued" else events // EVENTS_PER_CYCLE
    async with Mailbox.open(url_of(folder, scheme)) as box:
        return await _fill(box, past, tasks)


async def snapped(folder: Path, scheme: str) -> Figures:
    """The same folder with a snapshot at the end of its journal."""
    async with Mailbox.open(url_of(folder, scheme)) as box:
        await box.compact()
        return {"rss_mib": _rss_mib()}


async def opened(folder: Path, scheme: str) -> Figures:
    """How long the store takes to open, and what it weighs then. A store that does not take its snapshot removes it:
    then the figure would be that of a replay, and is refused."""
    snapshots = snapshots_in(folder)
    start = time.perf_counter()
    async with Mailbox.open(url_of(folder, scheme)):
        seconds = time.perf_counter() - start
        if not snapshots <= snapshots_in(folder):
            raise RuntimeError("the store did not start from its snapshot")
        return {"seconds": seconds, "rss_mib": _rss_mib()}


def snapshots_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("snapshot-*")}


async def _fill(box: Mailbox, past: str, tasks: int) -> Figures:
    start = time.perf_counter()
    batch = box.limits.batch_max
    for done in range(0, tasks, batch):
        count = min(batch, tasks - done)
        resolved = {"queued": 0, "mixed": count // 10, "resolved": count}[past]
        await _queue(box, count - resolved)
        await _resolve(box, resolved)
    seconds = time.perf_counter() - start
    await asyncio.sleep(_SETTLE_S)
    return {"tasks": tasks, "seconds": seconds, "rss_mib": _rss_mib()}


async def _queue(box: Mailbox, count: int) -> None:
    """For a recipient that nobody serves."""
    if count == 0:
        return
    sender, recipient = box.of("filler"), box.of("nobody")
    _sound(await sender.send_tasks([Task(recipient=recipient.agent, intent_text=INTENT) for _ in range(count)]))


async def _resolve(box: Mailbox, count: int) -> None:
    if count == 0:
        return
    sender, worker = box.of("filler"), box.of("finisher")
    _sound(await sender.send_tasks([Task(recipient=worker.agent, intent_text=INTENT) for _ in range(count)]))
    deliveries: list[Delivery] = await worker.recv_tasks(count)
    content = (Text(REPLY),)
    await asyncio.gather(*(worker.send_result(Result.ok(delivery, content)) for delivery in deliveries))
    answers = await sender.recv_results(count)
    if not len(deliveries) == len(answers) == count:
        raise RuntimeError(f"{count} tasks, {len(deliveries)} deliveries, {len(answers)} answers")


def _sound(replies: list[T | CovenantError]) -> None:
    for reply in replies:
        if isinstance(reply, CovenantError):
            raise reply


def _rss_mib() -> float:
    rss: int = psutil.Process().memory_info().rss
    return rss / 1024 / 1024
