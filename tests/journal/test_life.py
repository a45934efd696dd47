"""One owner, a clean end, a slow disk, a full one, and history that goes."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from covenant import CovenantError, Idempotency, Limits, Mailbox, OpenMailbox, Result, Task, TaskState, Text
from covenant.model import command as c
from covenant.model.error import StoreClosed, StoreUnavailable
from covenant.model.record import TaskRecord
from covenant.model.run import Memo, Run, Wait, run_key, step_key
from covenant.store.clock import CountingIds, ManualClock
from covenant.store.journal.archive import Archive, ArchiveFailed, KeyFilter
from covenant.store.journal.engine import Journal
from covenant.store.journal.files import AppendFile, Files
from covenant.store.journal.verify import verify
from tests.conformance.runs import RUN, answer, parked_on, step
from tests.journal.support import SMALL, FailingFiles, RecordingFiles, busy_run, dump, journal_of, open_journal, tidy
from tests.until import until

T = TypeVar("T")


def task_for(box: OpenMailbox, text: str = "work") -> Task:
    return Task(recipient=box.of("bob@lab").agent, intent_text=text)


async def cycle(box: OpenMailbox, text: str = "work") -> str:
    """Send, lease, answer, drain."""
    eve, dan = box.of("eve@lab"), box.of("dan@lab")
    sent = await eve.send_task(Task(recipient=dan.agent, intent_text=text))
    delivery = await dan.recv_task()
    await dan.send_result(Result.ok(delivery, [Text("done")]))
    await eve.recv_result()
    return sent.task_id


async def test_a_second_opener_in_this_process_is_told_at_once(tmp_path: Path) -> None:
    async with Mailbox.open(f"file:{tmp_path}/data"):
        with pytest.raises(CovenantError) as refused:
            await Mailbox.open(f"file:{tmp_path}/data")
        assert refused.value.code == "store_locked"
    async with Mailbox.open(f"file:{tmp_path}/data"):
        pass


async def test_a_second_process_is_told_at_once_and_who_owns_the_folder(tmp_path: Path) -> None:
    script = f"import asyncio, covenant; asyncio.run(covenant.Mailbox.open('file:{tmp_path}/data').__aenter__())"
    async with Mailbox.open(f"file:{tmp_path}/data"):
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert other.returncode == 1
    assert "StoreLocked" in other.stderr
    assert "process" in other.stderr


async def test_closing_answers_those_who_wait(tmp_path: Path) -> None:
    box = await Mailbox.open(f"file:{tmp_path}/data")
    waiting = asyncio.create_task(box.of("bob@lab").recv_task())
    await asyncio.sleep(0)
    await box.close()
    with pytest.raises(CovenantError) as refused:
        await waiting
    assert refused.value.code == "store_closed"
    with pytest.raises(CovenantError) as refused:
        await box.of("ann@lab").send_task(task_for(box))
    assert refused.value.code == "store_closed"
    await box.close()


async def test_a_slow_disk_is_synced_from_a_thread_while_the_next_batch_fills(tmp_path: Path) -> None:
    async with Mailbox.open(f"file:{tmp_path}/data", limits=Limits(inline_sync_us_max=0)) as box:
        await box.of("ann@lab").send_task(task_for(box))  # from now on the disk counts as slow
        await asyncio.gather(*(box.of("ann@lab").send_task(task_for(box)) for _ in range(200)))
        for _ in range(50):
            await cycle(box)
        stats = journal_of(box).stats
        assert stats.syncs < stats.commits
    assert verify(tmp_path / "data").is_sound
    async with Mailbox.open(f"file:{tmp_path}/data") as box:
        assert len((await box.task_queue(500)).tasks) == 201


async def test_a_sync_does_not_wait_for_what_else_the_program_has_threads_do(tmp_path: Path) -> None:
    loop, free = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    async with Mailbox.open(f"file:{tmp_path}/data", limits=Limits(inline_sync_us_max=0)) as box:
        await box.of("ann@lab").send_task(task_for(box))  # from now on the disk counts as slow
        busy = loop.run_in_executor(None, free.wait)
        sending = asyncio.create_task(box.of("ann@lab").send_task(task_for(box)))
        sent, _ = await asyncio.wait([sending], timeout=20)
        free.set()
        await asyncio.gather(busy, sending)
    assert sent


class HeldDisk:
    """Holds every sync until it may go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_asked = threading.Event()
        self.may_go = threading.Event()
        sync = AppendFile.sync

        def held(file: AppendFile) -> None:
            self.is_asked.set()
            self.may_go.wait(20)
            sync(file)

        monkeypatch.setattr(AppendFile, "sync", held)


async def test_what_a_thread_writes_when_the_store_gives_up_is_written_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes the file away from it, and the store comes back behind it, once."""
    clock, limits = ManualClock(), Limits(inline_sync_us_max=0)
    async with open_journal(tmp_path / "data", limits=limits, clock=clock) as box:
        ann, engine = box.of("ann@lab"), journal_of(box)
        await ann.send_task(task_for(box))  # from now on the disk counts as slow
        disk = HeldDisk(monkeypatch)
        sending = asyncio.create_task(ann.send_task(task_for(box)))
        await until(disk.is_asked.is_set)
        engine._on_damage(ArchiveFailed(errno.EIO, "archive"))
        await until(lambda: not engine.is_up)
        clock.advance(limits.reopen_delay_ms)
        reopening = engine._reopening
        assert reopening is not None
        await asyncio.sleep(0)
        disk.may_go.set()
        sent = await sending
        await reopening
        assert (engine.is_up, engine.stats.reopened) == (True, 1)
        assert (await box.get_task(sent.task_id)).state == TaskState.QUEUED
        await cycle(box)
    assert verify(tmp_path / "data").is_sound


class FullFor(Files):
    """No room for what these names end in."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.full_for: tuple[str, ...] = ()

    def create(self, name: str) -> AppendFile:
        file = super().create(name)
        if not name.endswith(self.full_for):
            return file
        return HalfWritten(file.path, file._fd, file.size)


class HalfWritten(AppendFile):
    def write(self, data: bytes) -> None:
        super().write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_snapshot_without_room_gives_back_what_it_took(tmp_path: Path) -> None:
    """Nobody needs it, and the lines of the journal do."""
    files = FullFor(tmp_path / "data")
    async with open_journal(tmp_path / "data", files=files) as box:
        await cycle(box)
        files.full_for = (".making",)
        with pytest.raises(CovenantError) as refused:
            await box.compact()
        assert refused.value.code == "store_full"
        assert files.names("", ".making") == []
        await cycle(box)
        assert journal_of(box).stats.reopened == 0


@contextmanager
def no_room() -> Iterator[None]:
    """No file grows by more than the name of its owner."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_an_archive_that_finds_no_room_at_a_start_is_not_taken_for_damaged(tmp_path: Path) -> None:
    """To make it anew takes long, and more room."""
    folder = tmp_path / "data"
    async with open_journal(folder) as box:
        for _ in range(20):
            await cycle(box)
        await box.compact()
    there = sorted(os.listdir(folder))
    with no_room(), pytest.raises(CovenantError) as refused:
        await open_journal(folder)
    assert refused.value.code == "store_full"
    assert sorted(set(os.listdir(folder)) - {"archive.sqlite3-shm", "archive.sqlite3-wal"}) == there
    async with open_journal(folder) as box:
        assert len(await box.recent_results(100)) == 20


async def test_an_archive_that_does_not_read_while_it_is_made_anew_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with open_journal(tmp_path / "data", clock=clock) as box:
        engine = journal_of(box)
        task_id = await cycle(box)

        def unread(*values: Any) -> Any:
            monkeypatch.undo()
            raise StoreUnavailable("the archive does not read", outcome="unknown")

        monkeypatch.setattr("covenant.store.journal.engine.load", unread)
        engine._on_damage(ArchiveFailed(errno.EIO, "archive"))
        await until(lambda: not engine.is_up)
        for _ in range(2):
            clock.advance(engine.limits.reopen_delay_ms)
            assert engine._reopening is not None
            await engine._reopening
        assert (await box.get_task(task_id)).state == TaskState.RESOLVED


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_folder_that_is_replaced_under_a_living_store_is_not_written_to(tmp_path: Path, is_kept: bool) -> None:
    """As by who restores a backup, and has not stopped the daemon: another may have it open by now."""
    folder, away, clock = tmp_path / "data", tmp_path / "away", ManualClock()
    async with open_journal(folder, clock=clock) as box:
        await cycle(box)
        shutil.copytree(folder, tmp_path / "backup")
        sent = await box.of("ann@lab").send_task(task_for(box))
        if is_kept:
            folder.rename(away)
        else:
            shutil.rmtree(folder)
        shutil.copytree(tmp_path / "backup", folder)
        there = {path.name: path.read_bytes() for path in folder.iterdir()}
        for _ in range(3):
            with pytest.raises(CovenantError) as refused:
                await cycle(box, "x" * 7000)
            assert refused.value.code == "store_unavailable"
            await reopened(box, clock)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == there
        if is_kept:
            shutil.rmtree(folder)
            away.rename(folder)
            await reopened(box, clock)
            assert (await box.get_task(sent.task_id)).state == TaskState.QUEUED
            await cycle(box)


async def test_a_folder_that_is_replaced_is_noticed_also_where_there_is_no_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covenant.store.journal.files._place_of", lambda fd: None)
    folder = tmp_path / "data"
    async with open_journal(folder) as box:
        await cycle(box)
        folder.rename(tmp_path / "away")
        shutil.copytree(tmp_path / "away", folder)
        with pytest.raises(CovenantError) as refused:
            await cycle(box)
        assert refused.value.code == "store_unavailable"


@pytest.mark.parametrize("is_linked", [True, False])
async def test_a_store_stays_in_the_folder_that_it_has_locked(
    tmp_path: Path, is_linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link on the way to it is turned elsewhere, or the process goes to another folder: there is another store."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "now").symlink_to("one")
    monkeypatch.chdir(tmp_path / "one")
    async with open_journal(tmp_path / "now" / "data" if is_linked else Path("data")) as box:
        await cycle(box)
        shutil.copytree(tmp_path / "one" / "data", tmp_path / "two" / "data")
        there = {path.name: path.read_bytes() for path in (tmp_path / "two" / "data").iterdir()}
        (tmp_path / "now").unlink()
        (tmp_path / "now").symlink_to("two")
        os.chdir(tmp_path / "two")
        sent = [await cycle(box, "x" * 7000) for _ in range(3)]
        await tidy(box)
    assert {path.name: path.read_bytes() for path in (tmp_path / "two" / "data").iterdir()} == there
    async with open_journal(tmp_path / "one" / "data") as box:
        assert [(await box.get_task(task_id)).state for task_id in sent] == [TaskState.RESOLVED] * 3


async def reopened(box: OpenMailbox, clock: ManualClock) -> None:
    """As far as it can be."""
    engine = journal_of(box)
    clock.advance(engine.limits.reopen_delay_ms)
    if engine._reopening is not None:
        await engine._reopening


@pytest.mark.parametrize("is_set_back", [False, True])
async def test_a_store_that_failed_reopens_after_its_delay_and_not_before(tmp_path: Path, is_set_back: bool) -> None:
    """Also where the timer fires early, and at once where the clock was set back."""
    clock, limits = ManualClock(), Limits(reopen_delay_ms=600_000)
    async with open_journal(tmp_path / "data", limits=limits, clock=clock) as box:
        engine = journal_of(box)
        await cycle(box)
        engine._on_damage(ArchiveFailed(errno.EIO, "archive"))
        await until(lambda: not engine.is_up)
        for _ in range(10):
            clock.advance(limits.reopen_delay_ms // 10 - 1)
            await asyncio.sleep(0)
            assert not engine.is_up
            assert engine._reopening is None
        if is_set_back:
            clock.advance(-3_600_000)
            for _ in range(20):  # as often as the clock fires early
                clock.advance(0)
        else:
            clock.advance(10)
        assert engine._reopening is not None
        await engine._reopening
        await cycle(box)


async def test_housekeeping_that_failed_is_tried_again_also_when_the_clock_was_set_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, clock = FullFor(tmp_path / "data"), ManualClock()
    async with open_journal(tmp_path / "data", files=files, clock=clock) as box:
        files.full_for = (".making",)
        while "housekeeping failed" not in caplog.text:
            await cycle(box, "x" * 500)
            await tidy(box)
        files.full_for = ()
        clock.advance(-3_600_000)
        for _ in range(20):
            await cycle(box, "x" * 500)
            await tidy(box)
        assert journal_of(box).stats.snapshots > 0


async def test_a_store_that_is_closed_while_a_thread_writes_does_not_open_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may be somebody else's by then."""
    clock, limits = ManualClock(), Limits(inline_sync_us_max=0)
    box = await open_journal(tmp_path / "data", limits=limits, clock=clock)
    ann, engine = box.of("ann@lab"), journal_of(box)
    await ann.send_task(task_for(box))  # from now on the disk counts as slow
    disk = HeldDisk(monkeypatch)
    first = asyncio.create_task(ann.send_task(task_for(box)))
    await until(disk.is_asked.is_set)
    second = asyncio.create_task(ann.send_task(task_for(box)))
    await until(lambda: engine._next is not None)
    closing = asyncio.create_task(box.close())
    await asyncio.sleep(0)
    engine._on_damage(ArchiveFailed(errno.EIO, "archive"))
    await until(lambda: isinstance(engine._refusal, StoreClosed))
    disk.may_go.set()
    await closing
    await asyncio.wait([first, second])
    clock.advance(limits.reopen_delay_ms)
    assert engine._reopening is None


def test_a_loop_that_is_closed_is_not_told_of_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> tuple[Journal, HeldDisk]:
        box = await open_journal(tmp_path / "data", limits=Limits(inline_sync_us_max=0))
        await box.of("ann@lab").send_task(task_for(box))  # from now on the disk counts as slow
        disk = HeldDisk(monkeypatch)
        engine = journal_of(box)
        engine._commit(c.SendTask(box.of("ann@lab").agent, task_for(box)))
        await until(disk.is_asked.is_set)
        return engine, disk

    engine, disk = asyncio.run(leave())
    disk.may_go.set()
    engine._let_go()
    assert caplog.records == []


async def test_a_receive_that_is_woken_shares_the_sync_of_the_send(tmp_path: Path) -> None:
    async with Mailbox.open(f"file:{tmp_path}/data") as box:
        waiting = asyncio.create_task(box.of("bob@lab").recv_task())
        await asyncio.sleep(0)
        before = journal_of(box).stats.syncs
        await box.of("alice@lab").send_task(task_for(box))
        await waiting
        assert journal_of(box).stats.syncs == before + 1


async def test_commits_of_one_turn_share_one_sync(tmp_path: Path) -> None:
    async with Mailbox.open(f"file:{tmp_path}/data") as box:
        before = journal_of(box).stats.syncs
        await asyncio.gather(*(box.of("ann@lab").send_task(task_for(box)) for _ in range(64)))
        assert journal_of(box).stats.syncs == before + 1


async def test_a_durable_task_is_shown_while_others_are_written_but_never_before_it_is_durable(tmp_path: Path) -> None:
    async with Mailbox.open(f"file:{tmp_path}/data") as box:
        ann = box.of("ann@lab")
        first = await ann.send_task(task_for(box))
        before = journal_of(box).stats.syncs
        sending = asyncio.ensure_future(ann.send_task(task_for(box, "other")))
        await asyncio.sleep(0)
        assert (await ann.get_task(first.task_id)).generation == 1
        assert (journal_of(box).stats.syncs, sending.done()) == (before, False)
        await sending
        canceling = asyncio.ensure_future(ann.cancel_task(first.task_id, reason="no"))
        await asyncio.sleep(0)
        assert (await ann.get_task(first.task_id)).generation == 2
        assert journal_of(box).stats.syncs == before + 2
        await canceling


class FullFiles(FailingFiles):
    """A disk without room, until there is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 0, errno.ENOSPC)
        self.is_full = False

    def tick(self, what: str) -> None:
        if self.is_full and what in ("write", "create"):
            raise OSError(errno.ENOSPC, "no room")


async def test_a_full_disk_fails_the_callers_and_the_store_comes_back_when_there_is_room(tmp_path: Path) -> None:
    clock = ManualClock()
    files = FullFiles(tmp_path / "data")
    async with open_journal(tmp_path / "data", clock=clock, files=files) as box:
        engine = journal_of(box)
        kept = await cycle(box)
        files.is_full = True
        with pytest.raises(CovenantError) as refused:
            await box.of("ann@lab").send_task(task_for(box))
        assert (refused.value.code, refused.value.details["outcome"]) == ("store_full", "unknown")
        for _ in range(3):  # still full: it tries, fails, and says so
            with pytest.raises(CovenantError) as refused:
                await box.get_task(kept)
            assert (refused.value.code, refused.value.details["outcome"]) == ("store_full", "not_stored")
            clock.advance(engine.limits.reopen_delay_ms)
            assert engine._reopening is not None
            await engine._reopening
        files.is_full = False
        clock.advance(engine.limits.reopen_delay_ms)
        assert engine._reopening is not None
        await engine._reopening
        assert engine.stats.reopened == 1
        assert (await box.get_task(kept)).state == TaskState.RESOLVED
        await cycle(box)
    assert verify(tmp_path / "data").is_sound


async def test_segments_past_retention_go_and_everything_else_stays(tmp_path: Path) -> None:
    """Open work, cached results and remembered ids survive, also when the archive is lost afterwards."""
    clock = ManualClock()
    folder = tmp_path / "data"
    async with open_journal(folder, clock=clock) as box:
        await busy_run(box, clock, rounds=10)
        forgotten = await cycle(box, "old")
        open_task = (await box.of("ann@lab").send_task(task_for(box, "still open"))).task_id
        cached = [entry for entry in (await box.cached_results(100)).entries if entry.expires_ms is None]
        assert cached
        clock.advance(8 * 24 * 3600 * 1000)
        for _ in range(30):
            young = await cycle(box, "young " + "x" * 200)
        await box.compact()
        assert not (folder / "journal-00000000000000000001.jsonl").exists()
        assert list(folder.glob("history-*"))
        await tidy(box)
        live = dump(box)
    for lost in (False, True):
        if lost:
            for derived in [*folder.glob("archive*"), *folder.glob("snapshot-*")]:
                derived.unlink()
        async with open_journal(folder, clock=ManualClock(clock.now_ms())) as box:
            assert dump(box) == live or lost
            assert (await box.get_task(open_task)).state == TaskState.QUEUED
            assert (await box.get_task(young)).state == TaskState.RESOLVED
            assert [entry.id for entry in (await box.cached_results(100)).entries] == [entry.id for entry in cached]
            with pytest.raises(CovenantError) as refused:
                await box.get_task(forgotten)
            assert refused.value.code == "unknown_task"
            again = Task(id=forgotten, recipient=box.of("dan@lab").agent, intent_text="other")
            with pytest.raises(CovenantError) as refused:
                await box.of("eve@lab").send_task(again)
            assert refused.value.code == "task_conflict"
        assert verify(folder).is_sound


async def test_memory_is_bounded_by_open_work(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "data", limits=SMALL) as box:
        for number in range(200):
            await cycle(box, f"number {number}")
        await tidy(box)
        state = journal_of(box).state
        assert len(state.records) < SMALL.finished_tail_max + 2 * SMALL.archive_batch + 2
        recent = await box.of("eve@lab").recent_tasks(200)
        assert [task.intent_text for task in recent] == [f"number {number}" for number in reversed(range(200))]
        assert len(await box.recent_results(200)) == 200


@pytest.mark.parametrize("by", ["replay", "snapshot"])
async def test_after_a_start_agents_are_kept_once_for_all_their_tasks(tmp_path: Path, by: str) -> None:
    """Else a long queue takes twice the memory that it took before."""
    async with open_journal(tmp_path / "data") as box:
        await box.of("eve@lab").send_tasks([task_for(box, str(number)) for number in range(3)])
        if by == "snapshot":
            await box.compact()
        before = dump(box)
    async with open_journal(tmp_path / "data") as box:
        assert dump(box) == before
        queued = [
            (key, record) for key, record in journal_of(box).state.records.items() if isinstance(record, TaskRecord)
        ]
        assert len(queued) == 3
        assert len({(id(record.task.sender), id(record.task.recipient)) for _, record in queued}) == 1
        assert all(record.ready_for is record.recipient is record.task.recipient.pubkey for _, record in queued)
        assert all(key is record.task.id for key, record in queued)


async def test_each_party_lists_its_own_from_the_archive(tmp_path: Path) -> None:
    """Tasks, children and cached results at rest: all of the operator's, and those of each side."""
    root = "00000000-0000-4000-8000-00000000000f"
    pairs = [("eve", "dan"), ("dan", "eve"), ("eve", "eve"), ("amy", "dan")]
    async with open_journal(tmp_path / "data", limits=SMALL) as box:
        for number, (sender, recipient) in enumerate(pairs * 3):
            one, other = box.of(f"{sender}@lab"), box.of(f"{recipient}@lab")
            key = Idempotency("idempotent", str(number))
            await one.send_task(
                Task(recipient=other.agent, intent_text=str(number), idempotency=key, parent=root, task_kind="work")
            )
            await other.send_result(Result.ok(await other.recv_task(), [Text("done")]))
            await one.recv_result()
        await tidy(box)
        assert len([key for key in journal_of(box).state.records if key.startswith("slot:")]) < 12
        for name, mine in {"eve": (0, 1, 2), "dan": (0, 1, 3), "amy": (3,), "zoe": ()}.items():
            peer = box.of(f"{name}@lab")
            expected = [str(number) for number in range(12) if number % 4 in mine]
            assert [task.intent_text for task in await peer.recent_tasks()] == expected[::-1]
            assert [entry.cache_key.key for entry in (await peer.cached_results()).entries] == expected
            if mine:
                children = (await peer.task_tree(root)).root.children
                assert [child.entry.task.intent_text for child in children if child.entry is not None] == expected
        assert len((await box.cached_results(100)).entries) == (await box.task_tree(root)).size - 1 == 12


@pytest.mark.parametrize("version", [1, 4])
async def test_an_archive_of_another_format_is_rebuilt(tmp_path: Path, version: int) -> None:
    async with open_journal(tmp_path / "data", limits=SMALL) as box:
        ids = [await cycle(box, f"number {number}") for number in range(50)]
        await tidy(box)
    with sqlite3.connect(tmp_path / "data" / "archive.sqlite3") as archive:
        archive.execute(f"pragma user_version = {version}")
    archive.close()
    async with open_journal(tmp_path / "data", limits=SMALL) as box:
        for task_id in ids:
            assert (await box.get_task(task_id)).state == TaskState.RESOLVED


async def test_history_that_outgrows_its_room_goes_first(tmp_path: Path) -> None:
    limits = Limits(
        segment_bytes=4_000, snapshot_every_bytes=4_000, finished_tail_max=2, archive_batch=2, retention_bytes=20_000
    )
    clock = ManualClock()
    async with open_journal(tmp_path / "data", limits=limits, clock=clock) as box:
        first = await cycle(box)
        for _ in range(150):
            clock.advance(1000)
            last = await cycle(box)
        await tidy(box)
        by_itself = [row.actor for row in await box.recent_audit(1000) if row.kind == "compacted"]
        assert by_itself and set(by_itself) == {"system"}
        await box.compact()
        size = sum(path.stat().st_size for path in (tmp_path / "data").glob("journal-*"))
        assert size < limits.retention_bytes + 2 * limits.segment_bytes
        assert (await box.get_task(last)).state == TaskState.RESOLVED
        with pytest.raises(CovenantError) as refused:
            await box.get_task(first)
        assert refused.value.code == "unknown_task"


async def test_removing_the_lock_file_lets_nobody_in(tmp_path: Path) -> None:
    async with Mailbox.open(f"file:{tmp_path}/data"):
        (tmp_path / "data" / "lock").unlink()
        with pytest.raises(CovenantError) as refused:
            await Mailbox.open(f"file:{tmp_path}/data")
        assert refused.value.code == "store_locked"


def test_a_journal_says_on_another_event_loop_that_it_is_at_home_elsewhere(tmp_path: Path) -> None:
    """As a client of a daemon does; and where its own loop is closed, it can still be closed."""

    async def opened() -> OpenMailbox:
        box: OpenMailbox = await Mailbox.open(f"file:{tmp_path}/data")
        return box

    async def used(box: OpenMailbox) -> None:
        for call in (box.of("ann@lab").send_task(task_for(box)), box.recent_tasks(), box.recv_tasks(1)):
            with pytest.raises(CovenantError) as refused:
                await call
            assert refused.value.code == "malformed"
        await box.close()
        with pytest.raises(StoreClosed):
            await box.recent_tasks()
        async with Mailbox.open(f"file:{tmp_path}/data") as here:
            await cycle(here)

    asyncio.run(used(asyncio.run(opened())))
    assert verify(tmp_path / "data").is_sound


async def test_a_mailbox_that_could_not_be_closed_stays_open(tmp_path: Path) -> None:
    box = await Mailbox.open(f"file:{tmp_path}/data")

    async def close_elsewhere() -> None:
        with pytest.raises(CovenantError) as refused:
            await box.close()
        assert refused.value.code == "malformed"

    await asyncio.to_thread(asyncio.run, close_elsewhere())
    async with box:
        await cycle(box)
    assert verify(tmp_path / "data").is_sound


async def test_a_forked_child_does_not_keep_the_folder(tmp_path: Path) -> None:
    box = await Mailbox.open(f"file:{tmp_path}/data")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent is done
        os._exit(0)
    try:
        await box.close()
        async with Mailbox.open(f"file:{tmp_path}/data"):
            pass
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(child, 0)


async def test_what_a_killed_owner_had_only_written_is_synced_before_it_is_told(tmp_path: Path) -> None:
    async with Mailbox.open(f"file:{tmp_path}") as box:
        await box.of("ann@lab").send_task(Task(recipient=box.of("bob@lab").agent, intent_text="work"))
    files = RecordingFiles(tmp_path)
    journal = Journal(files.folder, Limits(), ManualClock(), CountingIds(), files)
    await journal.open()
    (last,) = files.names("journal-", ".jsonl")
    assert [op.kind for op in files.ops if op.inode is files.inodes[last]] == ["sync"]
    await journal.close()


async def test_a_folder_that_is_removed_is_noticed(tmp_path: Path) -> None:
    box = await Mailbox.open(f"file:{tmp_path}/data")
    await cycle(box)
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(CovenantError) as refused:
        await cycle(box)
    assert refused.value.code == "store_unavailable"
    await box.close()


@pytest.mark.parametrize("path", ["/proc/covenant/data", "/etc/passwd", "data\0"])
async def test_a_folder_that_cannot_be_is_refused_with_a_code(path: str) -> None:
    with pytest.raises(CovenantError) as refused:
        await Mailbox.open(f"file:{path}")
    assert refused.value.code in ("store_unavailable", "unknown_store")


async def test_a_damaged_archive_is_rebuilt_when_it_is_found_out(tmp_path: Path) -> None:
    clock = ManualClock()
    limits = Limits(finished_tail_max=2, archive_batch=2, snapshot_every_bytes=4_000)
    async with open_journal(tmp_path / "data", limits=limits, clock=clock) as box:
        ids = [await cycle(box, f"number {number}") for number in range(200)]
        await box.compact()
    path = tmp_path / "data" / "archive.sqlite3"
    content = bytearray(path.read_bytes())
    third = len(content) // 3
    content[third : 2 * third] = os.urandom(third)
    path.write_bytes(bytes(content))
    async with open_journal(tmp_path / "data", limits=limits, clock=clock) as box:
        engine = journal_of(box)
        refusals = 0
        for task_id in ids:
            try:
                await box.get_task(task_id)
            except CovenantError as refusal:
                assert refusal.code == "store_unavailable"
                refusals += 1
                await asyncio.sleep(0)
                clock.advance(limits.reopen_delay_ms)
                assert engine._reopening is not None
                await engine._reopening
        assert refusals == 1
        for task_id in ids:
            assert (await box.get_task(task_id)).state == TaskState.RESOLVED


async def in_the_end(box: OpenMailbox, clock: ManualClock, call: Callable[[], Awaitable[T]]) -> T:
    """What is answered once the archive is rebuilt, if it has to be."""
    for _ in range(3):
        try:
            return await call()
        except StoreUnavailable:
            await until(lambda: not journal_of(box).is_up)
            clock.advance(SMALL.reopen_delay_ms)
            await until(lambda: journal_of(box).is_up)
    return await call()


@pytest.mark.parametrize("page", ["zeros", "text"])
async def test_whatever_page_of_the_archive_is_lost_it_is_rebuilt(tmp_path: Path, page: str) -> None:
    """At the start, by a read, or where it is written; the store opens, and nothing is missing."""
    async with open_journal(tmp_path / "whole") as box:
        done = [await cycle(box) for _ in range(30)]
        await box.compact()
        done.append(await cycle(box))
    whole = (tmp_path / "whole" / "archive.sqlite3").read_bytes()
    lost = {"zeros": b"\0", "text": b"x"}[page] * 4096
    for at in range(0, len(whole), 4096):
        shutil.copytree(tmp_path / "whole", tmp_path / "data")
        (tmp_path / "data" / "archive.sqlite3").write_bytes(whole[:at] + lost + whole[at + 4096 :])
        clock = ManualClock()
        async with open_journal(tmp_path / "data", clock=clock) as box:
            await in_the_end(box, clock, box.compact)
            found = await in_the_end(box, clock, lambda: box.recent_tasks(100))
            assert [task.id for task in reversed(found)] == done, at
        shutil.rmtree(tmp_path / "data")


async def test_an_older_copy_of_the_archive_is_not_leaned_on(tmp_path: Path) -> None:
    """Contract 5, 11: what it lacks would be taken for what never was, and be done again."""
    keyed = Idempotency("idempotent", "key")
    async with open_journal(tmp_path / "data") as box:
        await cycle(box)
        await box.compact()
    older = (tmp_path / "data" / "archive.sqlite3").read_bytes()
    async with open_journal(tmp_path / "data") as box:
        eve, dan = box.of("eve@lab"), box.of("dan@lab")
        await eve.send_task(Task(recipient=dan.agent, intent_text="pay", idempotency=keyed))
        done = await dan.recv_task()
        await dan.send_result(Result.ok(done, [Text("paid")]))
        await eve.recv_result()
        await box.compact()
    (tmp_path / "data" / "archive.sqlite3").write_bytes(older)
    async with open_journal(tmp_path / "data") as box:
        eve, dan = box.of("eve@lab"), box.of("dan@lab")
        assert (await eve.get_task(done.task.id)).state == TaskState.RESOLVED
        assert (await eve.send_task(Task(recipient=dan.agent, intent_text="pay", idempotency=keyed))).replayed


async def test_a_record_in_the_archive_that_does_not_read_is_made_again(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "data") as box:
        done = [await cycle(box) for _ in range(10)]
        await box.compact()
    with sqlite3.connect(tmp_path / "data" / "archive.sqlite3") as archive:
        archive.execute("update rest set body = substr(body, 2) where key = ?", (done[0],))
    archive.close()
    clock = ManualClock()
    async with open_journal(tmp_path / "data", clock=clock) as box:
        with pytest.raises(StoreUnavailable):
            await box.get_task(done[0])
        assert (await in_the_end(box, clock, lambda: box.get_task(done[0]))).state == TaskState.RESOLVED


async def test_a_record_in_the_archive_with_a_flipped_bit_is_made_again_though_it_reads(tmp_path: Path) -> None:
    """Else it would be told as it is, and go from there into the history when its segment goes."""
    async with open_journal(tmp_path / "data") as box:
        done = [await cycle(box, "number 4") for _ in range(10)]
        await box.compact()
    with sqlite3.connect(tmp_path / "data" / "archive.sqlite3") as archive:
        (body,) = archive.execute("select body from rest where key = ?", (done[0],)).fetchone()
        assert b"number 4" in body
        flipped = bytes(body).replace(b"number 4", b"number 5")
        archive.execute("update rest set body = ? where key = ?", (flipped, done[0]))
    archive.close()
    clock = ManualClock()
    async with open_journal(tmp_path / "data", clock=clock) as box:
        with pytest.raises(StoreUnavailable):
            await box.get_task(done[0])
        assert (await in_the_end(box, clock, lambda: box.get_task(done[0]))).task.intent_text == "number 4"


async def test_a_full_archive_does_not_keep_the_store_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up while the store is coming back: it tries again."""
    clock = ManualClock()
    files = FullFiles(tmp_path / "data")
    limits = Limits(finished_tail_max=1, archive_batch=1, snapshot_every_bytes=10**9)
    async with open_journal(tmp_path / "data", limits=limits, clock=clock, files=files) as box:
        engine = journal_of(box)
        kept = [await cycle(box) for _ in range(40)]
        await tidy(box)
        files.is_full = True
        with pytest.raises(CovenantError):
            await cycle(box)
        files.is_full = False
        full = ArchiveFailed(errno.ENOSPC, "no room")

        def no_room(*_: object) -> None:
            raise full

        with monkeypatch.context() as patched:
            patched.setattr(Archive, "store", no_room)
            clock.advance(limits.reopen_delay_ms)
            assert engine._reopening is not None
            await engine._reopening
            assert not engine.is_up
        clock.advance(limits.reopen_delay_ms)
        await engine._reopening
        assert engine.is_up
        for task_id in kept:
            await box.get_task(task_id)


async def test_an_interrupted_sync_leaves_nobody_hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Mailbox.open(f"file:{tmp_path}/data") as box:

        def interrupted(_: AppendFile) -> None:
            raise MemoryError

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        with monkeypatch.context() as patched:
            patched.setattr(AppendFile, "sync", interrupted)
            with pytest.raises(CovenantError) as refused:
                async with asyncio.timeout(10):
                    await box.of("ann@lab").send_task(task_for(box))
        assert refused.value.code == "store_unavailable"


async def test_a_thread_that_cannot_be_had_leaves_nobody_hanging(tmp_path: Path) -> None:
    async with Mailbox.open(f"file:{tmp_path}/data", limits=Limits(inline_sync_us_max=0)) as box:
        await box.of("ann@lab").send_task(task_for(box))  # from now on the disk counts as slow
        threads = journal_of(box)._syncer
        assert threads is not None
        threads.shutdown()
        with pytest.raises(CovenantError) as refused:
            async with asyncio.timeout(10):
                await box.of("ann@lab").send_task(task_for(box))
        assert (refused.value.code, refused.value.details["outcome"]) == ("store_unavailable", "unknown")


async def test_an_entry_forgotten_while_it_is_archived_stays_forgotten(tmp_path: Path) -> None:
    """Forget, do it again, and forget it again while the archive is still being told of the first."""
    limits = Limits(finished_tail_max=1, archive_batch=1, snapshot_every_bytes=10**9)
    async with open_journal(tmp_path / "data", limits=limits) as box:
        ann, bob = box.of("ann@lab"), box.of("bob@lab")
        keyed = Task(recipient=bob.agent, intent_text="k", idempotency=Idempotency("idempotent", "k"))
        for _ in range(6):
            sent = await ann.send_task(keyed)
            assert not sent.replayed
            await bob.send_result(Result.ok(await bob.recv_task(), [Text("done")]))
            await ann.recv_result()
            (entry,) = (await box.cached_results()).entries
            await box.forget_cached(entry.id, reason="again")
            assert (await box.cached_results()).entries == []
        await tidy(box)
        assert (await box.cached_results()).entries == []
        assert not (await ann.send_task(keyed)).replayed


class SlowArchive:
    """Holds every move to the archive until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = threading.Event()
        store = Archive.store

        def held(archive: Archive, *args: Any) -> None:
            self.may_go.wait(60)
            store(archive, *args)

        monkeypatch.setattr(Archive, "store", held)


async def test_snapshots_do_not_wait_for_an_archive_that_is_always_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_journal(tmp_path / "data") as box:
        archive = SlowArchive(monkeypatch)
        for _ in range(30):
            await cycle(box)
        await until(lambda: journal_of(box).stats.snapshots > 0)
        assert journal_of(box).stats.archived == 0
        archive.may_go.set()
        await tidy(box)
        assert journal_of(box).stats.archived > 0
        live = dump(box)
    async with open_journal(tmp_path / "data") as box:
        assert dump(box) == live


async def test_senders_wait_while_the_archive_is_too_far_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(finished_tail_max=0, archive_batch=1, unarchived_max=10)
    async with open_journal(tmp_path / "data", limits=limits) as box:
        archive = SlowArchive(monkeypatch)
        working = asyncio.create_task(_cycles(box, 40))
        keeper = journal_of(box)._keeper
        assert keeper is not None
        await until(lambda: keeper.is_behind)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not working.done()
        assert len(journal_of(box).state.rested) <= limits.unarchived_max + 1
        archive.may_go.set()
        await asyncio.wait_for(working, 60)


async def _cycles(box: OpenMailbox, count: int) -> None:
    for _ in range(count):
        await cycle(box)


async def test_an_archive_that_cannot_write_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(finished_tail_max=0, archive_batch=1, unarchived_max=10)

    def full(archive: Archive, *args: Any) -> None:
        raise ArchiveFailed(errno.ENOSPC, "no room")

    monkeypatch.setattr(Archive, "store", full)
    async with open_journal(tmp_path / "data", limits=limits) as box:
        await asyncio.wait_for(_cycles(box, 40), 60)
        assert journal_of(box).is_up


async def at_rest(folder: Path, *names: str) -> list[tuple[str, TaskRecord]]:
    """A finished task of each of these, which it sent to itself."""
    async with open_journal(folder, limits=Limits()) as box:
        for name in names:
            peer = box.of(f"{name}@lab")
            await peer.send_task(Task(recipient=peer.agent, intent_text="work"))
            await peer.send_result(Result.ok(await peer.recv_task(), [Text("done")]))
            await peer.recv_result()
        records = journal_of(box).state.records.items()
        return [(key, record) for key, record in records if type(record) is TaskRecord]


async def test_who_was_first_met_in_a_write_that_failed_is_taken_for_nobody_else(tmp_path: Path) -> None:
    records = await at_rest(tmp_path / "data", "amy", "ben")
    archive = Archive(tmp_path / "archive")
    archive._writer.execute("create trigger full before insert on rest begin select raise(abort, 'no room'); end")
    with pytest.raises(ArchiveFailed):
        archive.store(records[:1])
    archive._writer.execute("drop trigger full")
    archive.store(records[:1])
    archive.close()
    archive = Archive(tmp_path / "archive")
    archive.store(records[1:])
    for key, record in records:
        assert [found.task.id for found in archive.recent(record.sender, None)] == [key]
    archive.close()


async def test_an_older_sqlite_is_given_as_much_at_once_as_it_takes(tmp_path: Path) -> None:
    records = await at_rest(tmp_path / "data", *(f"peer{number}" for number in range(10)))
    archive = Archive(tmp_path / "archive")
    archive._writer.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 20)
    for _ in range(2):  # with agents that it meets, and with those that it knows
        archive.store(records)
        assert [found.task.id for found in archive.recent(None, None)] == [key for key, _ in reversed(records)]
    archive.close()


async def test_who_lost_its_lease_learns_from_the_archive_that_the_task_is_over(tmp_path: Path) -> None:
    """Whoever answered knows; but one who was superseded, or whose task was canceled, may still come and ask."""
    limits = Limits(finished_tail_max=0, archive_batch=1)
    async with open_journal(tmp_path / "data", limits=limits) as box:
        eve, dan = box.of("eve@lab"), box.of("dan@lab")
        leases = []
        for ends in ("answered by another", "canceled"):
            sent = await eve.send_task(Task(recipient=dan.agent, intent_text=ends))
            first = await dan.recv_task()
            leases.append(first.lease_id)
            if ends == "canceled":
                await eve.cancel_task(sent.task_id)
            else:
                await dan.release(first, reason="not now")
                await dan.send_result(Result.ok(await dan.recv_task(), [Text("done")]))
            await eve.recv_result()
        await tidy(box)
        assert not any(type(record) is TaskRecord for record in journal_of(box).state.records.values())
        for lease_id in leases:
            with pytest.raises(CovenantError) as refused:
                await dan.heartbeat(lease_id)
            assert refused.value.code == "task_terminal"


async def test_who_lost_its_lease_learns_from_the_history_that_the_task_is_over(tmp_path: Path) -> None:
    """The segments that told of the lease are gone, and the archive is lost."""
    clock, limits = ManualClock(), Limits(segment_bytes=1)
    async with open_journal(tmp_path / "data", limits=limits, clock=clock) as box:
        eve, dan = box.of("eve@lab"), box.of("dan@lab")
        await eve.send_task(Task(recipient=dan.agent, intent_text="work"))
        lost = await dan.recv_task()
        await dan.release(lost, reason="not now")
        clock.advance(limits.retention_ms)
        await eve.cancel_task(lost.task.id)
        await eve.recv_result()
        clock.advance(1)
        assert (await box.compact()).segments_dropped
    for derived in [*(tmp_path / "data").glob("archive*"), *(tmp_path / "data").glob("snapshot-*")]:
        derived.unlink()
    async with open_journal(tmp_path / "data", limits=limits, clock=clock) as box:
        with pytest.raises(CovenantError) as refused:
            await box.of("dan@lab").heartbeat(lost.lease_id)
        assert refused.value.code == "task_terminal"


async def test_a_parked_run_is_counted_after_a_restart_as_before(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "data") as box:
        await parked_on(box.of("eve@lab"), box.of("dan@lab"), Wait(signals=("go",)))
        before = journal_of(box).state.counts()
        assert (before.parked, before.woken) == (1, 0)
        await box.compact()  # which leaves a snapshot of what is open
    async with open_journal(tmp_path / "data") as box:
        assert journal_of(box).state.counts() == before
        await box.of("eve@lab").signal_run(RUN, "go")
        woken = journal_of(box).state.counts()
        assert (woken.parked, woken.woken) == (1, 1)
        await box.compact()
    async with open_journal(tmp_path / "data") as box:
        assert journal_of(box).state.counts() == woken


async def test_a_run_that_ends_in_its_first_step_is_closed(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "data") as box:
        eve, dan = box.of("eve@lab"), box.of("dan@lab")
        await eve.send_task(Task(id=RUN, recipient=dan.agent, intent_text="research"))
        delivery = await dan.recv_task()
        await dan.commit_run(delivery, step(1, memos=[Memo("one")], result=answer(RUN, delivery.lease_id)))
        state = journal_of(box).state
        run = state.get(run_key(RUN))
        assert isinstance(run, Run) and run.closed and run.is_swept
        assert state.get(step_key(RUN, 1)) is None


async def test_a_start_behind_a_snapshot_looks_for_no_new_id_in_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_journal(tmp_path / "data") as box:
        await _cycles(box, 20)
        await box.compact()
        alice, carol = box.of("alice@lab"), box.of("carol@lab")
        task = Task(recipient=carol.agent, intent_text="work")
        sent = [(await alice.send_task(task)).task_id for _ in range(20)]
    asked: list[Any] = []
    rows = Archive._rows

    def noting(archive: Archive, sql: str, values: tuple[Any, ...]) -> Any:
        asked.extend(values)
        return rows(archive, sql, values)

    monkeypatch.setattr(Archive, "_rows", noting)
    async with open_journal(tmp_path / "data") as box:
        assert not set(sent) & set(asked)
        assert [entry.task.id for entry in (await box.of("carol@lab").task_queue(100)).tasks] == sent


async def test_what_leaves_before_anybody_lists_and_what_stays_are_listed_as_they_were_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covenant.store.state._UNLISTED_MAX", 8)
    monkeypatch.setattr("covenant.store.state._LIST_AT_ONCE", 3)
    limits = Limits(finished_tail_max=2, archive_batch=1)
    async with open_journal(tmp_path / "data", limits=limits) as box:
        alice, carol = box.of("alice@lab"), box.of("carol@lab")
        sent: list[str] = []
        for number in range(60):
            await cycle(box)
            sent.append((await alice.send_task(Task(recipient=carol.agent, intent_text=f"task {number}"))).task_id)
        await tidy(box)
        listed = await carol.task_queue(100)
        assert [entry.task.id for entry in listed.tasks] == sent
        assert [task.id for task in await carol.recent_tasks(100)] == sent[::-1]
        await _cycles(box, 20)
        await tidy(box)
        newest = await box.recent_tasks(200)
        assert [task.id for task in newest if task.recipient == carol.agent] == sent[::-1]
        assert len(newest) == 140
        assert len(journal_of(box).state._sent_by(None)) == len(journal_of(box).state.records)


def test_the_filter_of_keys_grows_and_forgets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.store.journal.archive._FILTER_KEYS", 64)
    keys = KeyFilter()
    for number in range(2000):
        keys.add(f"in-{number}")
    assert all(f"in-{number}" in keys for number in range(2000))
    assert sum(f"out-{number}" in keys for number in range(2000)) < 100


async def test_an_id_is_looked_for_in_the_archive_once_and_a_new_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    get = Archive.get

    def noting(archive: Archive, key: str) -> Any:
        asked.append(key)
        return get(archive, key)

    monkeypatch.setattr(Archive, "get", noting)
    async with open_journal(tmp_path / "data") as box:
        sender, recipient = box.of("alice"), box.of("bob").agent
        await sender.send_task(Task(recipient=recipient, intent_text="with an id of the mailbox"))
        assert asked == []
        own = str(uuid.uuid4())
        await sender.send_task(Task(id=own, recipient=recipient, intent_text="with an id of its own"))
        assert asked == [own]


async def test_snapshots_are_taken_while_the_journal_never_rests(tmp_path: Path) -> None:
    """One client in lock-step leaves no moment in which nothing waits to be written."""
    async with open_journal(tmp_path / "data") as box:
        async with asyncio.timeout(60):
            while not journal_of(box).stats.snapshots:
                await cycle(box)
        live = dump(box)
    async with open_journal(tmp_path / "data") as box:
        assert dump(box) == live


async def test_a_snapshot_reads_no_segment_twice(tmp_path: Path) -> None:
    """How much room they take is looked at each time, and a long past has many of them."""
    read: list[tuple[str, int]] = []

    class NotingFiles(Files):
        def read_at(self, name: str, start: int, size: int) -> bytes:
            found = super().read_at(name, start, size)
            read.append((name, len(found)))
            return found

        def read(self, name: str, start: int = 0) -> Iterator[bytes]:
            for block in super().read(name, start):
                read.append((name, len(block)))
                yield block

    folder = tmp_path / "data"
    async with open_journal(folder, files=NotingFiles(folder)) as box:
        read.clear()
        while journal_of(box).stats.snapshots < 6:
            await _cycles(box, 10)
            await tidy(box)
        segments = [name for name, _ in read if name.startswith("journal-")]
        assert len(segments) > 5
        assert len(segments) == len(set(segments))
        assert max(size for name, size in read if name in segments) <= 4096


async def test_a_journal_that_was_cut_before_its_snapshot_does_not_start(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "data", limits=Limits(snapshot_every_bytes=2_000)) as box:
        await _cycles(box, 30)
        await tidy(box)
        assert journal_of(box).stats.snapshots > 0
    (segment,) = (tmp_path / "data").glob("journal-*.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(lines[:5]))
    with pytest.raises(CovenantError) as refused:
        await open_journal(tmp_path / "data").__aenter__()
    assert refused.value.code == "store_damaged"


async def test_what_was_compacted_away_stays_away_when_the_archive_is_lost(tmp_path: Path) -> None:
    """The segments still tell of it; a milder compaction later must not make it visible again."""
    clock = ManualClock()
    async with open_journal(tmp_path / "data", clock=clock) as box:
        task_id = await cycle(box)
        clock.advance(1000)
        await box.compact(older_than_ms=500)
    for path in (tmp_path / "data").glob("archive*"):
        path.unlink()
    async with open_journal(tmp_path / "data", clock=clock) as box:
        await box.compact()
        with pytest.raises(CovenantError) as refused:
            await box.get_task(task_id)
        assert refused.value.code == "unknown_task"
