"""Very many requests that wait, each for a task of its own, in one daemon: what they weigh, and whom an event wakes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from bench.serve.client import NEXT_PATH, SEND_PATH, HttpCaller, HttpConnection, http_request, itself
from bench.serve.load import HOST
from bench.serve.seats import Seat, Served, raise_open_files
from bench.work import INTENT, Figures, percentile
from covenant import Task
from covenant.serve import wire as w

_WAIT_MS: Final = 25_000
_BATCH: Final = 1000
_AT_ONCE: Final = 200
_SPARE_FILES: Final = 100
_PARK_S: Final = 60.0
_WAKE_S: Final = 10.0
_QUIET_S: Final = 0.5  # in which anybody who was woken without a reason would be heard
_WAITS: Final = b'covenant_open{what="waits"} '
_reply_of_task: Final = msgspec.json.Decoder(w.TaskReply)


async def polls(folder: Path, server: str, polls: int, events: int) -> Figures:
    """As many polls as the open files allow. Each event is a lease of one of the tasks: one poll hears of it."""
    served = Served.read(Path(server))
    polls = min(polls, raise_open_files() - _SPARE_FILES)
    seat, process = served.seats[0], psutil.Process(served.pid)
    _, caller = await asyncio.get_running_loop().create_connection(HttpCaller, HOST, served.port)
    tasks = await _send(caller, seat, polls)
    before = process.memory_info().rss
    heard: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
    start = time.perf_counter()
    waiting = await _open(served, seat, tasks, heard)
    await _parked(caller, seat, polls)
    seconds = time.perf_counter() - start
    after = process.memory_info().rss
    times = [await _wake(caller, seat, heard) for _ in range(events)]
    await asyncio.sleep(_QUIET_S)
    times.sort()
    figures = {
        "polls": polls,
        "open_s": seconds,
        "rss_mib": after / 1024 / 1024,
        "growth_mib": (after - before) / 1024 / 1024,
        "kib_per_poll": (after - before) / 1024 / polls,
        "events": events,
        "replies": events + heard.qsize(),
        "wake_p50_ms": percentile(times, 50) * 1000,
        "wake_p99_ms": percentile(times, 99) * 1000,
    }
    for poll in waiting:
        poll.close()
    caller.close()
    return figures


async def _send(caller: HttpCaller, seat: Seat, count: int) -> list[str]:
    task = msgspec.to_builtins(Task(recipient=seat.agent, intent_text=INTENT))
    found: list[str] = []
    while len(found) < count:
        body = msgspec.json.encode({"tasks": [task] * min(_BATCH, count - len(found))})
        reply: Any = msgspec.json.decode(await caller.ask(http_request("POST", f"{SEND_PATH}/batch", seat.token, body)))
        found += [item["sent"]["task_id"] for item in reply["items"]]
    return found


async def _open(served: Served, seat: Seat, tasks: list[str], heard: asyncio.Queue[tuple[str, float]]) -> list[_Poll]:
    loop = asyncio.get_running_loop()
    found: list[_Poll] = []
    for at in range(0, len(tasks), _AT_ONCE):
        some = [_Poll(seat, task, heard) for task in tasks[at : at + _AT_ONCE]]
        await asyncio.gather(*(loop.create_connection(itself(poll), HOST, served.port) for poll in some))
        found += some
    return found


async def _parked(caller: HttpCaller, seat: Seat, polls: int) -> None:
    """Until the daemon says that all of them wait."""
    async with asyncio.timeout(_PARK_S):
        while True:
            page = await caller.ask(http_request("GET", "/metrics", seat.token))
            at = page.index(_WAITS) + len(_WAITS)
            if float(page[at : page.index(b"\n", at)]) == polls:
                return
            await asyncio.sleep(0.05)


async def _wake(caller: HttpCaller, seat: Seat, heard: asyncio.Queue[tuple[str, float]]) -> float:
    """Seconds from the lease of a task until the poll of this very task has its reply."""
    start = time.perf_counter()
    leasing = caller.ask(http_request("GET", NEXT_PATH, seat.token))
    async with asyncio.timeout(_WAKE_S):
        task, stop = await heard.get()
        leased: Any = msgspec.json.decode(await leasing)
    if leased["task"]["id"] != task:
        raise RuntimeError(f"the lease of {leased['task']['id']} woke the poll of {task}")
    return stop - start


class _Poll(HttpConnection):
    """Waits for a change of its task, and then for the next one. A wait that ends in vain is begun again."""

    def __init__(self, seat: Seat, task: str, heard: asyncio.Queue[tuple[str, float]]) -> None:
        super().__init__()
        self._seat = seat
        self._task = task
        self._heard = heard
        self._generation = 1

    def fail(self, wrong: Exception) -> None:
        """A poll that is lost is missed when it should be woken."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._ask()

    def replied(self, body: bytes) -> None:
        now = time.perf_counter()
        generation = _reply_of_task.decode(body).entry.generation
        if generation != self._generation:
            self._generation = generation
            self._heard.put_nowait((self._task, now))
        self._ask()

    def _ask(self) -> None:
        query = f"current_generation={self._generation}&wait_ms={_WAIT_MS}"
        self.write(http_request("GET", f"{SEND_PATH}/{self._task}?{query}", self._seat.token))
