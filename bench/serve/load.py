"""The load, in a process of its own: full cycles from many clients, and wake-ups of one that waits."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from bench.floor import RECORD_BYTES
from bench.history import Turns
from bench.serve.client import (
    NEXT_PATH,
    VERBS,
    Cycle,
    HttpCaller,
    HttpLoad,
    IpcLoad,
    Load,
    http_request,
    itself,
    over_http,
    over_ipc,
)
from bench.serve.seats import Served
from bench.work import Figures, Tally, Window

HOST: Final = "127.0.0.1"
WAKE_ALLOWANCE_MS: Final = 1.5
_OVERTIME_S: Final = 30.0
_STAGGER_S: Final = 0.004
_PARK_S: Final = 0.003  # after this the waiting request has long arrived
_WAIT_MS: Final = 20_000


async def http(
    folder: Path, server: str, connections: int, warm_s: float, seconds: float, turns: Turns
) -> AsyncIterator[Figures]:
    """Each connection belongs to a peer of its own, and has one request under way. A turn is one window."""
    served = Served.read(Path(server))
    tallies: list[Tally] = []
    loads = [HttpLoad(Cycle(over_http(seat), tallies)) for seat in served.seats[:connections]]
    loop = asyncio.get_running_loop()
    for load in loads:
        await loop.create_connection(itself(load), HOST, served.port)
    yield {"clients": len(loads)}
    async for _ in turns:
        yield await _window(served, loads, tallies, Window(warm_s, seconds))


async def ipc(
    folder: Path, server: str, connections: int, in_flight: int, warm_s: float, seconds: float, turns: Turns
) -> AsyncIterator[Figures]:
    """Each connection belongs to a peer of its own, and has so many requests under way at once."""
    served = Served.read(Path(server))
    tallies: list[Tally] = []
    loads = [
        IpcLoad(seat.token, [Cycle(over_ipc(seat, number), tallies) for number in range(in_flight)])
        for seat in served.seats[:connections]
    ]
    loop = asyncio.get_running_loop()
    for load in loads:
        await loop.create_unix_connection(itself(load), served.socket)
        await load.ready
    yield {"clients": len(loads) * in_flight}
    async for _ in turns:
        yield await _window(served, loads, tallies, Window(warm_s, seconds))


async def _window(served: Served, loads: Sequence[Load], tallies: list[Tally], window: Window) -> Figures:
    """The tallies, one for each verb, are shared by all cycles."""
    tallies[:] = [Tally(window) for _ in VERBS]
    gc.collect()
    gc.disable()  # a pause of the load is no time of the server
    async with asyncio.timeout(window.seconds + _OVERTIME_S), asyncio.TaskGroup() as group:
        spent = group.create_task(_spent(served.pid, window))
        for number, load in enumerate(loads):
            group.create_task(_drive(load, number % len(VERBS) * _STAGGER_S))
    gc.enable()
    return _figures(tallies, window, spent.result())


async def _drive(load: Load, delay_s: float) -> None:
    """Not all at once: clients that share a sync go on in step, and would all ask for the same."""
    await asyncio.sleep(delay_s)
    load.begin()
    await load.done


async def _spent(server: int, window: Window) -> tuple[float, float]:
    """The seconds of a core that the server and the load took within the window."""
    processes = [psutil.Process(server), psutil.Process(os.getpid())]
    await asyncio.sleep(window.begin - time.perf_counter())
    before = [process.cpu_times() for process in processes]
    await asyncio.sleep(window.end - time.perf_counter())
    after = [process.cpu_times() for process in processes]
    theirs, ours = (b.user + b.system - a.user - a.system for a, b in zip(before, after, strict=True))
    return theirs, ours


def _figures(tallies: list[Tally], window: Window, spent: tuple[float, float]) -> Figures:
    total = Tally(window)
    for tally in tallies:
        total.count += tally.count
        total.times += tally.times
    figures = total.figures()
    for verb, tally in zip(VERBS, tallies, strict=True):
        if tally.count:
            of_verb = tally.figures()
            figures |= {f"{verb}_p50_ms": of_verb["p50_ms"], f"{verb}_p99_ms": of_verb["p99_ms"]}
    server_s, load_s = spent
    figures["server_us"] = server_s / total.count * 1e6
    figures["load_us"] = load_s / total.count * 1e6
    figures["server_busy"] = server_s / window.seconds
    figures["load_busy"] = load_s / window.seconds
    return figures


# --- wake-ups ----------------------------------------------------------------------------------------------


async def wakes(folder: Path, server: str, warm_s: float, seconds: float) -> Figures:
    """From just before a send until the reply that waited for it has arrived, taking turns with a bare sync."""
    served = Served.read(Path(server))
    seat = served.seats[0]
    requests = over_http(seat)
    waiting = http_request("GET", f"{NEXT_PATH}?wait_ms={_WAIT_MS}", seat.token)
    loop = asyncio.get_running_loop()
    _, waiter = await loop.create_connection(HttpCaller, HOST, served.port)
    _, sender = await loop.create_connection(HttpCaller, HOST, served.port)
    window = Window(warm_s, seconds)
    woken, synced = Tally(window), Tally(window)
    with _Bare(folder / "bare") as bare:
        async with asyncio.timeout(warm_s + seconds + _OVERTIME_S):
            while time.perf_counter() < window.end:
                await asyncio.sleep(_PARK_S)
                bare.note(synced)
                reply = waiter.ask(waiting)
                await asyncio.sleep(_PARK_S)
                start = time.perf_counter()
                sent = sender.ask(requests.send)
                lent = await reply
                woken.note(start, time.perf_counter())
                await sent
                await _finish(sender, Cycle(requests, [Tally(window) for _ in VERBS]), lent)
    waiter.close()
    sender.close()
    figures = woken.figures()
    figures["sync_p50_ms"] = synced.figures()["p50_ms"]
    figures["allowed_ms"] = 2 * figures["sync_p50_ms"] + WAKE_ALLOWANCE_MS
    return figures


async def _finish(sender: HttpCaller, cycle: Cycle, lent: bytes) -> None:
    """The answer and its drain, so that no wake-up finds more than the one before."""
    cycle.go_on(b"")
    posting = cycle.go_on(lent)
    assert posting is not None
    draining = cycle.go_on(await sender.ask(posting))
    assert draining is not None
    await sender.ask(draining)


class _Bare:
    """A file for syncs without a mailbox."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._record = b"r" * RECORD_BYTES

    def __enter__(self) -> _Bare:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def note(self, tally: Tally) -> None:
        start = time.perf_counter()
        os.write(self._fd, self._record)
        os.fdatasync(self._fd)
        tally.note(start, time.perf_counter())
