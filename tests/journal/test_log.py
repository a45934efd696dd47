"""The log read back: every commit is found, whatever its length and its neighbours'."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covenant import Limits, Mailbox, OpenMailbox, Result, Task, Text
from covenant.exchange.history import recent_rows, story
from covenant.model import event as e
from covenant.model.audit import AuditRow, Logged
from covenant.serve.daemon import Daemon
from covenant.store.journal import housekeeping
from covenant.store.journal import log as log_module
from covenant.store.journal.archive import Archive
from covenant.store.journal.engine import Journal
from covenant.store.journal.files import Files, ReadFile
from covenant.store.journal.log import STRETCH_BYTES_MAX, Log
from covenant.store.journal.segment import Position, Reader, segment_names
from covenant.store.journal.writer import Writer
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon
from tests.journal.support import journal_of
from tests.until import until

PATIENCE_S = 20
TASK = "00000000-0000-4000-8000-000000000001"


class Commits:
    """A folder of segments, written commit by commit."""

    def __init__(self, folder: Path) -> None:
        self.files = Files(folder)
        self.seq = 0
        self.files.make_folder()
        self._writer = Writer(self.files, Position(), lambda: None)
        self._writer.begin_segment(1)

    @property
    def end(self) -> Position:
        return self._writer.position

    def add(self, size: int, events: int = 1, text: str = "x", key: str = TASK, prev: int | None = None) -> None:
        """A commit whose line is somewhat longer than this. Unless told otherwise, it touches what the last one did."""
        before = (self.seq if prev is None else prev,) * events
        rows = (AuditRow("cache", reason=(text * (size // len(text) + 1))[:size]),)
        self._writer.add(self.seq + 1, 5, "x", (e.Drained(key),) * events, before, rows)
        self.seq += max(1, events)

    def write(self) -> None:
        batch = self._writer.take()
        self._writer.write(batch)
        self._writer.written(batch)

    def begin_segment(self) -> None:
        self.write()
        self._writer.begin_segment(1)

    def naive(self) -> list[Logged]:
        return [line.logged() for line in Reader(self.files)]

    def close(self) -> None:
        self.write()
        self._writer.close()

    def log(self) -> Log:
        return Log(self.files, self.end.file, self.end.offset)


# Of the row in a line: shorter and longer than what is read at once, and just about that long.
PROBE, BLOCK = 256, 1024
SIZES = st.one_of(st.integers(0, 40), st.integers(0, 2 * BLOCK), st.integers(4 * BLOCK, 8 * BLOCK))
TEXTS = st.sampled_from(["x", '\n{"seq":7,', '{"seq":7,', "é", "\\"])
LINES = st.lists(st.tuples(SIZES, st.sampled_from([0, 1, 1, 2, 5]), TEXTS, st.booleans()), min_size=1, max_size=25)


@given(LINES, st.integers(1, 4), st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_every_commit_is_found_between_short_and_very_long_lines(
    lines: list[tuple[int, int, str, bool]], limit: int, torn: int
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(log_module, "_PROBE", PROBE),
        patch.object(log_module, "_BLOCK", BLOCK),
    ):
        commits = Commits(Path(folder))
        for size, events, text, is_last_of_segment in lines:
            commits.add(size, events, text)
            if is_last_of_segment:
                commits.begin_segment()
        commits.close()
        naive = commits.naive()
        assert commits.end.file is not None
        with open(commits.files.folder / commits.end.file, "ab") as file:
            file.write(b'{"seq":%d,' % (commits.seq + 1) + b"z" * torn)  # on its way, and not durable yet
        with commits.log() as log:
            for seq in range(-1, commits.seq + 3):
                assert log.after(seq, limit) == [one for one in naive if one.last > seq][:limit]
                assert log.before(seq, limit) == [one for one in reversed(naive) if one.seq < seq][:limit]
                assert log.trail(seq, TASK, 1) == [one for one in naive if one.seq <= seq <= one.last]
                assert log.trail(seq, TASK, 50) == chained(log, seq)
            assert log.before(None, limit) == naive[::-1][:limit]


def chained(log: Log, seq: int) -> list[Logged]:
    """A trail, each commit of it looked for on its own."""
    found: list[Logged] = []
    while one := log.trail(seq, TASK, 1):
        found += one
        seq = one[0].previous(TASK)
    return found


@pytest.mark.parametrize("apart", [1, 5])
def test_a_trail_of_commits_close_together_is_read_in_one_go(tmp_path: Path, apart: int) -> None:
    commits = Commits(tmp_path)
    last = 0
    for seq in range(1, 2001):
        is_touched = seq % apart == 0
        commits.add(300, key=TASK if is_touched else f"other-{seq}", prev=last)
        last = seq if is_touched else last
    commits.close()
    reads: list[int] = []
    read_at = ReadFile.read_at

    def counted(file: ReadFile, start: int, size: int) -> bytes:
        reads.append(size)
        return read_at(file, start, size)

    with patch.object(ReadFile, "read_at", counted), commits.log() as log:
        assert len(log.trail(last, TASK, 10_000)) == 2000 // apart
    assert len(reads) < 100
    assert sum(reads) < 2 * commits.end.offset


def test_a_line_costs_no_more_than_its_length(tmp_path: Path) -> None:
    """Of many small blocks, so that both lines fit into the caches of a busy machine."""
    costs = []
    for folder, size in (("short", 64 << 10), ("long", 2 << 20)):
        commits = Commits(tmp_path / folder)
        commits.add(size)
        commits.close()
        with (
            patch.object(log_module, "_PROBE", PROBE),
            patch.object(log_module, "_BLOCK", BLOCK),
            commits.log() as log,
        ):
            costs.append(min(_cost_of_one(log) for _ in range(9)))
    assert costs[1] < 4 * 32 * costs[0]  # 32 times the length, and a thousand times if it were squared


def _cost_of_one(log: Log) -> float:
    started = time.thread_time()
    assert len(log.before(None, 10)) == 1
    return time.thread_time() - started


def test_a_stretch_is_bounded_in_bytes_and_holds_one_commit_at_least(tmp_path: Path) -> None:
    commits = Commits(tmp_path)
    sizes = [100, STRETCH_BYTES_MAX + 1, *[STRETCH_BYTES_MAX // 3] * 8, 100]
    for size in sizes:
        commits.add(size)
    commits.close()
    everything = list(range(1, len(sizes) + 1))
    with commits.log() as log:
        assert [len(stretch) for stretch in stretches(lambda last: log.after(last, 200), 0)] == [2, 3, 3, 3]
        back = list(stretches(lambda first: log.before(first, 200), commits.seq + 1))
        trail = list(stretches(lambda seq: log.trail(seq - 1, TASK, 200), commits.seq + 1))
    assert back == trail
    assert [len(stretch) for stretch in back] == [4, 3, 3, 1]
    assert [seq for stretch in back for seq in stretch] == everything[::-1]


def stretches(read: Callable[[int], list[Logged]], start: int) -> Iterator[list[int]]:
    """One after the other, each from where the one before it ended."""
    while stretch := [logged.seq for logged in read(start)]:
        yield stretch
        start = stretch[-1]


def test_a_trail_goes_from_commit_to_commit_of_one_record(tmp_path: Path) -> None:
    commits = Commits(tmp_path)
    touched = [2, 3, 40, 900, 901]
    for seq in range(1, 1001):
        before = [earlier for earlier in touched if earlier < seq]
        commits.add(10, key=TASK if seq in touched else f"other-{seq}", prev=before[-1] if before else 0)
        if seq % 100 == 0:
            commits.begin_segment()
    commits.close()
    with commits.log() as log:
        assert [logged.seq for logged in log.trail(901, TASK, 1000)] == touched[::-1]
        assert [logged.seq for logged in log.trail(901, TASK, 2)] == [901, 900]
        for name in segment_names(commits.files)[:1]:
            commits.files.remove(name)
        assert [logged.seq for logged in log.trail(901, TASK, 1000)] == [901, 900]


def test_segments_that_go_while_the_log_is_read_are_gone(tmp_path: Path) -> None:
    commits = Commits(tmp_path)
    for _ in range(4):
        for _ in range(5):
            commits.add(10)
        commits.begin_segment()
    commits.add(10)
    commits.close()
    with commits.log() as log:
        for name in segment_names(commits.files)[:2]:
            commits.files.remove(name)
        assert [logged.seq for logged in log.after(0, 100)] == list(range(11, 22))
        assert [logged.seq for logged in log.before(None, 100)] == list(range(21, 10, -1))
        assert log.before(9, 100) == []
        assert log.trail(9, TASK, 100) == []


# --- of a mailbox ------------------------------------------------------------------------------------------


async def send(box: OpenMailbox, text: str = "work") -> str:
    return (await box.of("ann@lab").send_task(Task(recipient=box.of("bob@lab").agent, intent_text=text))).task_id


async def test_the_newest_rows_are_found_in_stretches_of_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Mailbox.open(f"file:{tmp_path}/data") as box:
        for number in range(20):
            await send(box, f"work {number}")
        whole = await box.recent_audit(15)
        monkeypatch.setattr(log_module, "STRETCH_BYTES_MAX", 1)
        assert await box.recent_audit(15) == whole
        assert [row.seq for row in whole] == list(range(6, 21))


async def test_a_last_segment_that_is_dropped_before_it_is_read_is_no_error(tmp_path: Path) -> None:
    """The read begins; then its last segment is full, another begins, and retention drops the old one."""
    async with Mailbox.open(f"file:{tmp_path}/data") as box:
        await send(box)
        engine = journal_of(box)
        first = engine._writer.position.file
        assert first is not None

        def drop(log: Log) -> list[Logged]:
            if engine._files.exists(first):
                engine._files.remove(first)
                raise FileNotFoundError(first)
            return log.before(None, 10)

        reading = asyncio.create_task(engine._read_log(drop))
        engine._writer.begin_segment(0)
        assert await reading == []
        await send(box)
        assert [logged.seq for logged in await engine.log_back(None, 10)] == [2]


async def test_reads_of_the_log_and_housekeeping_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    busy: list[int] = []

    def slow(*_: object) -> int:
        busy.append(1)
        assert goes_on.wait(PATIENCE_S)
        return 0

    async with Mailbox.open(f"file:{tmp_path}/data") as box, asyncio.timeout(PATIENCE_S):
        await send(box)
        engine = journal_of(box)
        reading = [asyncio.create_task(engine._read_log(slow)) for _ in range(8)]
        try:
            await box.compact()
            assert not any(read.done() for read in reading)
        finally:
            goes_on.set()
        await asyncio.gather(*reading)

        goes_on.clear()
        busy.clear()
        monkeypatch.setattr(housekeeping, "write_snapshot", slow)
        monkeypatch.setattr(Archive, "store", slow)
        compacting = [asyncio.create_task(box.compact()) for _ in range(8)]
        try:
            await until(lambda: bool(busy))
            assert await box.recent_audit(10)
            assert not any(compaction.done() for compaction in compacting)
        finally:
            goes_on.set()
        await asyncio.gather(*compacting)


# --- of a daemon -------------------------------------------------------------------------------------------


async def test_a_short_stretch_is_not_the_end_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = await start_daemon(f"file:{tmp_path}/data", Limits())
    realm = Realmful()
    await realm.enroll(daemon)
    exchange, operator = daemon.exchange, daemon.exchange.authenticate(OPERATOR_TOKEN)
    try:
        async with realm.open(daemon, "unix") as box, aiohttp.ClientSession() as session:
            alice, bob = box.of("alice@lab"), box.of("bob@lab")
            sent = await alice.send_task(Task(recipient=bob.agent, intent_text="work"))
            delivery = await bob.recv_task()
            for number in range(10):
                await bob.send_result(Result.partial(delivery, [Text(f"part {number}")]))
            await bob.send_result(Result.ok(delivery, [Text("whole")]))

            async def told() -> list[Any]:
                url = f"{daemon.url}/a2a/events?after=0"
                async with asyncio.timeout(PATIENCE_S), session.get(url, headers=headers) as response:
                    assert response.status == 200
                    events = b""
                    while b"event: answered" not in events:
                        events += await response.content.readline()
                rows, cursor = await recent_rows(exchange.store, 1000, None, lambda row: row.kind != "head_signed")
                whole_story = await story(exchange, operator, sent.task_id)
                return [[row for row in rows if row.seq <= last], cursor, whole_story[1:], events]

            headers = {"Authorization": f"Bearer {OPERATOR_TOKEN}"}
            last = (await journal_of_daemon(daemon).head()).seq
            whole = await told()
            assert len(whole[2][0]) > 12
            monkeypatch.setattr(log_module, "STRETCH_BYTES_MAX", 1)
            assert await told() == whole
    finally:
        await daemon.stop()


def journal_of_daemon(daemon: Daemon) -> Journal:
    assert isinstance(daemon.store, Journal)
    return daemon.store
