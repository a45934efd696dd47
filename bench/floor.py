"""The floor: what the disk and the event loop give when there is no mailbox at all.

`bare` appends a record and waits for fdatasync, one after the other. `group` lets coroutines append the four lines of a
cycle, with the same sizes, into one growing file: whoever is ready in the same turn of the loop shares one fdatasync.
It exists in two forms, with the sync inline on the loop and with the sync in a thread while the next batch fills; the
faster one is the floor.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from bench.work import Figures, Tally, Window

RECORD_BYTES: Final = 600
FORMS: Final = ("inline", "thread")


def bare(folder: Path, warm_s: float, seconds: float) -> Figures:
    """One writer: append, fdatasync, again."""
    fd = _create(folder / "bare")
    record = _record(RECORD_BYTES)
    window = Window(warm_s, seconds)
    tally = Tally(window)
    stop = time.perf_counter()
    while stop < window.end:
        start = time.perf_counter()
        os.write(fd, record)
        os.fdatasync(fd)
        stop = time.perf_counter()
        tally.note(start, stop)
    os.close(fd)
    return tally.figures()


def paced(folder: Path, size: int, gap_s: float, warm_s: float, seconds: float) -> Figures:
    """The same as a busy store meets it: a batch of this size, after so much work that is not for the disk. The disk
    and the file system rest in between, and take longer."""
    fd = _create(folder / "paced")
    record = _record(size)
    window = Window(warm_s, seconds)
    tally = Tally(window)
    stop = time.perf_counter()
    while stop < window.end:
        while time.perf_counter() < stop + gap_s:
            pass
        start = time.perf_counter()
        os.write(fd, record)
        os.fdatasync(fd)
        stop = time.perf_counter()
        tally.note(start, stop)
    os.close(fd)
    return tally.figures()


async def group(folder: Path, writers: int, sizes: list[int], form: str, warm_s: float, seconds: float) -> Figures:
    """Many writers: `rate` counts cycles of four records, the times are those of one record."""
    fd = _create(folder / "group")
    log: _Log = _InlineLog(fd) if form == "inline" else _ThreadLog(fd)
    records = [_record(size) for size in sizes]
    window = Window(warm_s, seconds)
    tally = Tally(window)
    await asyncio.gather(*(_write(log, records, tally) for _ in range(writers)))
    log.close()
    figures = tally.figures()
    figures["rate"] /= len(records)
    figures["per_sync"] = log.records / log.syncs
    return figures


async def _write(log: _Log, records: list[bytes], tally: Tally) -> None:
    stop = time.perf_counter()
    while stop < tally.window.end:
        for record in records:
            start = time.perf_counter()
            await log.append(record)
            stop = time.perf_counter()
            tally.note(start, stop)


class _Log(ABC):
    """A file and the batch that is filling: its bytes, and the future that all its writers wait for."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._filling: list[bytes] = []
        self._durable: asyncio.Future[None] = self._loop.create_future()
        self.records = 0
        self.syncs = 0

    def append(self, record: bytes) -> asyncio.Future[None]:
        """What to await until the record is durable."""
        if not self._filling:
            self._first()
        self._filling.append(record)
        return self._durable

    @abstractmethod
    def _first(self) -> None:
        """A batch has begun: see to it that it is flushed."""

    def close(self) -> None:
        os.close(self._fd)

    def _take(self) -> tuple[bytes, asyncio.Future[None]]:
        batch, durable = self._filling, self._durable
        self._filling, self._durable = [], self._loop.create_future()
        self.records += len(batch)
        self.syncs += 1
        return b"".join(batch), durable

    def _put(self, data: bytes) -> None:
        os.write(self._fd, data)
        os.fdatasync(self._fd)


class _InlineLog(_Log):
    def _first(self) -> None:
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        data, durable = self._take()
        self._put(data)
        durable.set_result(None)


class _ThreadLog(_Log):
    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._pool = ThreadPoolExecutor(1)
        self._busy = False

    def close(self) -> None:
        self._pool.shutdown()
        super().close()

    def _first(self) -> None:
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        data, durable = self._take()
        self._pool.submit(self._put_and_tell, data, durable)

    def _put_and_tell(self, data: bytes, durable: asyncio.Future[None]) -> None:
        self._put(data)
        self._loop.call_soon_threadsafe(self._flushed, durable)

    def _flushed(self, durable: asyncio.Future[None]) -> None:
        durable.set_result(None)
        if self._filling:
            self._loop.call_soon(self._flush)  # after the writers that were just woken
        else:
            self._busy = False


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)


def _record(size: int) -> bytes:
    return b"r" * (size - 1) + b"\n"
