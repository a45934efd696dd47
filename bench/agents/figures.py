"""What else is measured of agents: how soon one goes on, what a resume costs, and what a pause leaves behind."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

from msgspec.json import encode

from bench.agents.script import entry_of, found
from bench.serve.seats import Served
from bench.work import Figures
from covenant import Mailbox, Result, Task, Text
from covenant.agents import Agent, AgentContext, AgentWorker, Local, RunHandle, agent
from covenant.model.content import Json
from covenant.model.error import NotARun
from covenant.model.run import RunStatus
from covenant.store.journal.snapshot import PLAIN

_RUN: Final = str(uuid.UUID(int=2))
_BATCH: Final = 50


async def wakes(folder: Path, server: str, times: int) -> Figures:
    """From the moment in which a worker posts the result of a task to the next line of the agent that waits for it; the
    three are processes or connections of their own, on one machine."""
    served = Served.read(Path(server))
    first, second = served.seats[:2]
    url = f"unix:{served.socket}"
    posted: list[float] = []
    gone_on: list[float] = []

    @agent("waiter")
    async def waiter(ctx: AgentContext, count: int) -> int:
        for number in range(count):
            await ctx.task("echo", number, recipient=second.agent)
            gone_on.append(time.perf_counter())
        return count

    async with (
        Mailbox.open(url, token=first.token) as mine,
        Mailbox.open(url, token=second.token) as other,
        AgentWorker(mine, agents=[waiter]),
    ):
        await other.send_task(
            Task(recipient=first.agent, intent_text="wait", task_kind="waiter", content=(Json(times),))
        )
        for _ in range(times):
            delivery = await other.recv_task()
            posted.append(time.perf_counter())
            await other.send_result(Result.ok(delivery, [Text("done")]))
        await other.recv_result()
    spans = sorted(1000 * (on - post) for post, on in zip(posted, gone_on, strict=True))
    return {"p50_ms": median(spans), "p99_ms": spans[int(len(spans) * 0.99)]}


def _teller() -> Agent:
    @agent("teller")
    async def teller(ctx: AgentContext, entries: int) -> int:
        for number in range(entries):
            await ctx.append("tool_result", entry_of(number, found(number)))
            if number % _BATCH == _BATCH - 1:
                await ctx.run(f"pause {number}", _nothing)  # its start is committed first
        await ctx.wait_for_signal("go")
        return entries

    return teller


def _nothing() -> None:
    pass


async def _until_it_waits(handle: RunHandle, entries: int) -> None:
    """Nobody is told when a run parks: it is asked."""
    while True:
        with suppress(NotARun):
            run = await handle.status()
            if run.entries == entries and run.status is RunStatus.AWAITING_INPUT:
                return
        await asyncio.sleep(0.01)


async def resumed(folder: Path, entries: int) -> Figures:
    """A run with so many entries and no checkpoint is taken up by a process that does not know it: from the signal that
    wakes it to its end."""
    told = _teller()
    url = f"file:{folder / 'data'}"
    async with Local(url, agents=[told]) as house:
        handle = await house.start(told, entries, run_id=_RUN)
        await _until_it_waits(handle, entries)
    async with Local(url, agents=[told]) as house:
        handle = house.find(told, _RUN)
        start = time.perf_counter()
        await handle.signal("go")
        await handle.result()
        seconds = time.perf_counter() - start
    return {"seconds": seconds}


async def paused(folder: Path, pauses: int) -> Figures:
    """What the snapshot holds of a run after so many pauses with an entry each, beside the entries themselves."""
    raw = 0

    @agent("sleeper")
    async def sleeper(ctx: AgentContext, count: int) -> None:
        nonlocal raw
        for number in range(count):
            content: dict[str, Any] = entry_of(number, found(number))
            raw += len(encode({"role": "tool_result", "content": content}))
            await ctx.append("tool_result", content)
            await ctx.sleep(1)
        await ctx.wait_for_signal("never")

    data = folder / "data"
    async with Local(f"file:{data}", agents=[sleeper], warm_max=1000) as house:
        handle = await house.start(sleeper, pauses, run_id=_RUN)
        await _until_it_waits(handle, pauses)
        engine: Any = house.box._engine
        await engine._keeper._save(PLAIN)
        size = max(path.stat().st_size for path in data.glob("snapshot-*.jsonl"))
    return {"snapshot_bytes": float(size), "raw_bytes": float(raw)}
