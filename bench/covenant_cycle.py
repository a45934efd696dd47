"""Covenant's own cycles: send, receive, answer, drain, each a single call that returns when it is durable.

A client is a coroutine that plays both sides in turn: agent p<i> sends and drains, agent w<i> receives and answers.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

from bench.work import INTENT, REPLY, Figures, Tally, Window
from covenant import Mailbox, Result, Task, Text

LINE_KINDS: Final = ("sent", "leased", "answered", "drained")
_WARM_UP_CYCLES: Final = 50


def url_of(folder: Path, scheme: str) -> str:
    """A store in this folder, or without a disk; a database has a URL of its own."""
    if "://" in scheme:
        return scheme
    return "memory:" if scheme == "memory" else f"file:{folder}"


async def cycles(folder: Path, scheme: str, clients: int, warm_s: float, seconds: float) -> Figures:
    """A fresh store, so many clients."""
    async with Mailbox.open(url_of(folder, scheme)) as box:
        return await run_clients(box, clients, warm_s, seconds)


async def run_clients(box: Mailbox, clients: int, warm_s: float, seconds: float, first: int = 0) -> Figures:
    """`rate` counts cycles; the times are those of one reply, `cycle_ms` is the mean of a whole cycle and `cpu_us` what
    it takes of this process. Clients are numbered from `first`: those of several processes are not the same agents."""
    window = Window(warm_s, seconds)
    replies = Tally(window)
    before, cpu_s = _stats(box), time.process_time()
    await asyncio.gather(*(client(box, number, replies) for number in range(first, first + clients)))
    after, cpu_s = _stats(box), time.process_time() - cpu_s
    figures = replies.figures()
    figures["rate"] /= len(LINE_KINDS)
    figures["cycle_ms"] = clients / figures["rate"] * 1000
    figures["cpu_us"] = cpu_s / (figures["rate"] * (warm_s + seconds)) * 1e6
    if before is not None and after is not None and after[1] > before[1]:
        figures["events_per_sync"] = (after[0] - before[0]) / (after[1] - before[1])
    return figures


async def client(box: Mailbox, number: int, replies: Tally, cycles: int | None = None) -> None:
    """Play both sides in turn until the window ends, or for so many cycles."""
    sender, worker = box.of(f"p{number}"), box.of(f"w{number}")
    task = Task(recipient=worker.agent, intent_text=INTENT)
    content = (Text(REPLY),)
    clock, end = time.perf_counter, replies.window.end
    start, left = clock(), cycles
    while start < end and left != 0:
        if left is not None:
            left -= 1
        await sender.send_task(task)
        sent = clock()
        replies.note(start, sent)
        delivery = await worker.recv_task()
        leased = clock()
        replies.note(sent, leased)
        await worker.send_result(Result.ok(delivery, content))
        answered = clock()
        replies.note(leased, answered)
        await sender.recv_result()
        drained = clock()
        replies.note(answered, drained)
        start = drained


def _stats(box: Mailbox) -> tuple[int, int] | None:
    """Events and syncs so far, if the engine counts them."""
    stats: Any = getattr(box._engine, "stats", None)
    return None if stats is None else (int(stats.events), int(stats.syncs))


async def line_sizes(folder: Path, scheme: str) -> Figures:
    """The mean bytes of each of the four journal lines of a cycle, read from the journal of some cycles."""
    async with Mailbox.open(url_of(folder, scheme)) as box:
        sender, worker = box.of("p0"), box.of("w0")
        for _ in range(_WARM_UP_CYCLES):
            await sender.send_task(Task(recipient=worker.agent, intent_text=INTENT))
            await worker.send_result(Result.ok(await worker.recv_task(), (Text(REPLY),)))
            await sender.recv_result()
    lines = _journal_lines(folder)
    return {kind: _mean_size(lines, kind) for kind in LINE_KINDS}


def _journal_lines(folder: Path) -> list[bytes]:
    return [line for path in sorted(folder.glob("journal-*.jsonl")) for line in path.read_bytes().splitlines(True)]


def _mean_size(lines: list[bytes], kind: str) -> float:
    sizes = [len(line) for line in lines if b'"type":"%b"' % kind.encode() in line]
    if len(sizes) != _WARM_UP_CYCLES:
        raise RuntimeError(f"{len(sizes)} journal lines of kind {kind} for {_WARM_UP_CYCLES} cycles")
    return sum(sizes) / len(sizes)
