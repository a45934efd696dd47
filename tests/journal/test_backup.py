"""A backup of a living journal is a whole one, and a restore is there or not there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from covenant import CovenantError, Limits, Mailbox, OpenMailbox, Result, Task, Text
from covenant.store.clock import ManualClock
from covenant.store.journal.backup import TRIES_MAX, backup, restore
from covenant.store.journal.files import Files
from covenant.store.journal.verify import verify
from tests.journal.support import (
    SMALL,
    FailingDisk,
    Killed,
    busy_run,
    dump,
    journal_of,
    open_journal,
    refused,
    state_in,
    tidy,
)
from tests.until import until

DROPPING = Limits(
    segment_bytes=3_000,
    snapshot_every_bytes=9_000,
    finished_tail_max=3,
    archive_batch=3,
    retention_ms=2_000,
    error_ttl_ms=60_000,
)
BACKUPS = 8
PATIENCE_S = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "backup"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "restored"


async def make_journal(folder: Path) -> None:
    clock = ManualClock()
    async with open_journal(folder, clock=clock) as box:
        await busy_run(box, clock, rounds=6)
        await tidy(box)


async def make_journal_that_dropped_segments(folder: Path) -> None:
    clock = ManualClock()
    async with open_journal(folder, clock=clock, limits=DROPPING) as box:
        await busy_run(box, clock, rounds=6)
        clock.advance(1_000)
        await box.compact()
        await tidy(box)
    assert len(list(folder.glob("history-*"))) == 1
    assert len(list(folder.glob("journal-*"))) > 2


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "lock"}


def chain_of(folder: Path) -> dict[str, bytes]:
    kinds = ("journal-", "history-")
    return {name: content for name, content in contents(folder).items() if name.startswith(kinds)}


async def test_a_backup_of_an_open_mailbox_is_the_same_mailbox(folder: Path, target: Path, place: Path) -> None:
    clock = ManualClock()
    async with open_journal(folder, clock=clock) as box:
        await busy_run(box, clock, rounds=6)
        report = backup(folder, target)
        assert report.head == await journal_of(box).head()
        live = dump(box)
    restored = restore(target, place)
    assert (restored.head, restored.files, restored.bytes) == (report.head, report.files, report.bytes)
    assert verify(place, report.head).is_sound
    assert await state_in(place) == live


async def test_the_truth_is_copied_and_what_is_derived_is_not(folder: Path, target: Path) -> None:
    await make_journal_that_dropped_segments(folder)
    kinds = {name.partition("-")[0] for name in contents(folder)}
    assert kinds >= {"journal", "history", "snapshot"}
    report = backup(folder, target)
    assert not (target / "lock").exists()
    copied = contents(target)
    manifest = json.loads(copied.pop("backup.json"))
    assert copied == chain_of(folder)
    assert manifest == {
        "covenant": "backup",
        "version": 1,
        "seq": report.head.seq,
        "hash": report.head.hash,
        "at": manifest["at"],
        "files": [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in sorted(copied.items())
        ],
    }
    assert (report.files, report.bytes, report.tries) == (len(copied), sum(map(len, copied.values())), 1)


async def test_a_restored_journal_goes_on(folder: Path, target: Path, place: Path) -> None:
    await make_journal(folder)
    head = backup(folder, target).head
    place.mkdir()
    restore(target, place)
    assert place.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in place.glob("journal-*")} == {0o600}
    clock = ManualClock(ManualClock().now_ms() + 10**6)
    async with Mailbox.open(f"file:{place}", clock=clock, limits=SMALL) as box:
        await busy_run(box, clock, rounds=3)
    assert verify(place, head).is_sound


# --- while it is in use ------------------------------------------------------------------------------------


class Load:
    """A mailbox at work: tasks that stay open, others that end and go with retention."""

    def __init__(self, box: OpenMailbox, clock: ManualClock) -> None:
        self.box = box
        self.clock = clock
        self.acknowledged: list[str] = []
        self.goes_on = True

    async def run(self) -> None:
        ann, bob, eve = self.box.of("ann@lab"), self.box.of("bob@lab"), self.box.of("eve@lab")
        for turn in count():
            sent = await ann.send_task(Task(recipient=eve.agent, intent_text=f"kept {turn}"))
            self.acknowledged.append(sent.task_id)
            await ann.send_task(Task(recipient=bob.agent, intent_text=f"done {turn} " + "x" * 200))
            await bob.send_result(Result.ok(await bob.recv_task(), [Text("done")]))
            await ann.recv_result()
            self.clock.advance(50)
            await asyncio.sleep(0)  # nothing is on its way now: housekeeping gets its turn
            if not self.goes_on:
                return


async def test_a_backup_under_load_holds_everything_acknowledged_before_it(folder: Path, tmp_path: Path) -> None:
    clock = ManualClock()
    async with Mailbox.open(f"file:{folder}", clock=clock, limits=DROPPING) as box:
        load = Load(box, clock)
        working = asyncio.create_task(load.run())
        await until(lambda: any(folder.glob("history-*")))
        before = len(load.acknowledged)
        for number in range(BACKUPS):
            durable = journal_of(box)._writer.position.seq
            acknowledged = list(load.acknowledged)
            copy, place = tmp_path / f"backup-{number}", tmp_path / f"restored-{number}"
            report = await asyncio.to_thread(backup, folder, copy)
            assert report.head.seq >= durable
            await asyncio.to_thread(restore, copy, place)
            assert verify(place).head == report.head
            async with Mailbox.open(f"file:{place}", clock=clock, limits=DROPPING) as restored:
                for task_id in acknowledged:
                    await restored.get_task(task_id)
        assert len(load.acknowledged) > before  # nobody stood still
        load.goes_on = False
        await working


class WatchedFiles(Files):
    """Tells before a file is read."""

    def __init__(self, folder: Path, on_read: Callable[[str], None]) -> None:
        super().__init__(folder)
        self.on_read = on_read

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        self.on_read(name)
        yield from super().read(name, start)


def watched(folder: Path, on_read: Callable[[str], None]) -> Callable[[Path], Files]:
    return lambda path: WatchedFiles(path, on_read) if path == folder else Files(path)


async def test_segments_that_are_dropped_while_they_are_copied_are_noticed(
    folder: Path, target: Path, place: Path
) -> None:
    clock = ManualClock()
    loop = asyncio.get_running_loop()
    compactions = 0
    async with open_journal(folder, limits=DROPPING, clock=clock) as box:

        def compact(name: str) -> None:
            """While the second segment is copied, the first time and the second."""
            nonlocal compactions
            if compactions < 2 and name == sorted(path.name for path in folder.glob("journal-*"))[1]:
                compactions += 1
                asyncio.run_coroutine_threadsafe(work(box, clock), loop).result(PATIENCE_S)

        await work(box, clock, compacts=False)
        report = await asyncio.to_thread(lambda: backup(folder, target, files=watched(folder, compact)))
        assert compactions == 2
        assert report.tries == 3
        assert report.head == await journal_of(box).head()
    restore(target, place)
    for derived in [*folder.glob("snapshot-*"), *folder.glob("archive*")]:
        derived.unlink()
    assert await state_in(place) == await state_in(folder)


async def work(box: OpenMailbox, clock: ManualClock, compacts: bool = True) -> None:
    clock.advance(60_000)
    load = Load(box, clock)
    load.goes_on = False
    if compacts:
        await box.compact()
    for _ in range(12):
        await load.run()


async def test_a_backup_that_never_gets_through_says_so(folder: Path, target: Path) -> None:
    await make_journal(folder)
    tries = 0

    def vanish(name: str) -> None:
        nonlocal tries
        if name == max(path.name for path in folder.glob("journal-*")):
            tries += 1
            raise FileNotFoundError(name)

    refused("backup_failed", lambda: backup(folder, target, files=watched(folder, vanish)))
    assert tries == TRIES_MAX
    assert not target.exists()


@pytest.mark.parametrize("rest", [b'{"seq":', b'{"seq":7}\n', b"\0" * 100], ids=["half a line", "a line", "zeros"])
async def test_a_line_that_is_being_written_is_left_out(folder: Path, target: Path, place: Path, rest: bytes) -> None:
    await make_journal(folder)
    last = max(folder.glob("journal-*"))
    whole = contents(folder)
    last.write_bytes(last.read_bytes() + rest)
    backup(folder, target)
    assert contents(target)[last.name] == whole[last.name]
    restore(target, place)
    assert verify(place).torn_bytes == 0


async def test_a_segment_that_is_being_made_and_bytes_that_never_counted_are_left_out(
    folder: Path, target: Path, place: Path
) -> None:
    await make_journal(folder)
    chain = chain_of(folder)
    (folder / "journal-00000000000000009999.jsonl").write_bytes(b'{"covenant":')
    first = min(folder.glob("journal-*"))
    first.write_bytes(first.read_bytes() + b"garbage\n")
    backup(folder, target)
    assert chain_of(target) == chain
    restore(target, place)
    assert chain_of(place) == chain


# --- what is refused ---------------------------------------------------------------------------------------


async def test_a_backup_overwrites_nothing(folder: Path, target: Path) -> None:
    await make_journal(folder)
    target.mkdir()
    (target / "precious").write_text("mine")
    refused("backup_failed", lambda: backup(folder, target))
    refused("backup_failed", lambda: backup(folder, target / "precious"))
    assert contents(target) == {"precious": b"mine"}


async def test_a_disk_that_is_mounted_there_is_not_filled_beside(
    folder: Path, target: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All would be copied to another disk, and then could not take its place."""
    await make_journal(folder)
    backup(folder, target)
    for mounted in (tmp_path / "disk", place):
        mounted.mkdir()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(Files, "make_folder", lambda files: pytest.fail(f"{files.folder} is made"))
    monkeypatch.setattr(os.path, "ismount", lambda path: path in (tmp_path / "disk", place))
    assert "mounted" in refused("backup_failed", lambda: backup(folder, tmp_path / "disk")).message
    assert "mounted" in refused("backup_failed", lambda: restore(target, place)).message
    assert sorted(tmp_path.rglob("*")) == before


def test_there_must_be_a_journal(folder: Path, target: Path, place: Path) -> None:
    refused("backup_failed", lambda: backup(folder, target))
    folder.mkdir()
    refused("backup_failed", lambda: backup(folder, target))
    (folder / "journal-00000000000000000001.jsonl").write_bytes(b'{"covenant":')
    refused("backup_failed", lambda: backup(folder, target))
    refused("backup_failed", lambda: restore(target, place))
    assert not target.exists()
    assert not place.exists()


async def test_a_damaged_journal_is_not_taken_for_a_backup(folder: Path, target: Path) -> None:
    await make_journal(folder)
    path = sorted(folder.glob("journal-*"))[1]
    path.write_bytes(path.read_bytes().replace(b'"at":', b'"ta":', 3))
    why = refused("store_damaged", lambda: backup(folder, target))
    assert (why.details["file"], why.details["line"]) == (path.name, 1)
    assert not target.exists()


@pytest.mark.parametrize("drops", [False, True], ids=["nothing dropped", "behind what was dropped"])
async def test_a_journal_without_its_beginning_is_not_taken_for_a_backup(
    folder: Path, target: Path, drops: bool
) -> None:
    await (make_journal_that_dropped_segments if drops else make_journal)(folder)
    min(folder.glob("journal-*")).unlink()
    refused("store_damaged", lambda: backup(folder, target))
    assert not target.exists()


async def test_a_backup_that_was_changed_is_not_restored(folder: Path, target: Path, place: Path) -> None:
    await make_journal_that_dropped_segments(folder)
    backup(folder, target)
    for name, content in contents(target).items():
        for changed in (content[:-1], content + b"\n", content[:50] + b"?" + content[51:], b"", None):
            if changed is None:
                (target / name).unlink()
            else:
                (target / name).write_bytes(changed)
            if name == "backup.json" and changed is not None and is_same_json(changed, content):
                continue
            code = "backup_failed" if name == "backup.json" and changed is None else "store_damaged"
            why = refused(code, lambda: restore(target, place))
            assert why.details.get("file") == name or code == "backup_failed"
            assert not place.exists()
            (target / name).write_bytes(content)
    restore(target, place)


def is_same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("member", "value", "code"),
    [
        ("version", 2, "unsupported_format"),
        ("seq", 1, "store_damaged"),
        ("hash", "0" * 64, "store_damaged"),
        ("files", [], "store_damaged"),
        ("files", [{"name": "../data/lock", "bytes": 1, "sha256": ""}], "store_damaged"),
        ("files", [{"name": "archive.sqlite3", "bytes": 1, "sha256": ""}], "store_damaged"),
        ("files", 7, "store_damaged"),
    ],
)
async def test_a_manifest_that_the_files_do_not_bear_out_is_refused(
    folder: Path, target: Path, place: Path, member: str, value: object, code: str
) -> None:
    await make_journal(folder)
    backup(folder, target)
    manifest = json.loads((target / "backup.json").read_bytes())
    manifest[member] = value
    (target / "backup.json").write_text(json.dumps(manifest))
    refused(code, lambda: restore(target, place))
    assert not place.exists()


@pytest.mark.parametrize("at", [0, 1, 2, -1], ids=["history", "first segment", "second", "last"])
async def test_a_manifest_that_leaves_out_a_file_is_refused(folder: Path, target: Path, place: Path, at: int) -> None:
    await make_journal_that_dropped_segments(folder)
    backup(folder, target)
    manifest = json.loads((target / "backup.json").read_bytes())
    manifest["files"].pop(at)
    (target / "backup.json").write_text(json.dumps(manifest))
    refused("store_damaged", lambda: restore(target, place))
    assert not place.exists()


async def test_a_restore_overwrites_nothing(folder: Path, target: Path, place: Path) -> None:
    await make_journal(folder)
    backup(folder, target)
    before = contents(folder)
    refused("backup_failed", lambda: restore(target, folder))
    assert contents(folder) == before
    beside = place.with_name("restored.restoring")
    beside.mkdir()
    (beside / "precious").write_text("mine")
    refused("backup_failed", lambda: restore(target, place))
    assert contents(beside) == {"precious": b"mine"}
    assert not place.exists()


# --- killed anywhere ---------------------------------------------------------------------------------------


async def test_a_backup_that_ends_anywhere_leaves_none_or_a_whole_one(folder: Path, target: Path) -> None:
    await make_journal(folder)
    whole = contents(folder)
    partial = target.with_name("backup.partial")
    stages: set[bool] = set()
    for kills in (True, False):
        for exists in (True, False):
            for fail_at in count(1):
                if exists:
                    target.mkdir()
                disk = FailingDisk(target, fail_at, kills=kills)
                try:
                    backup(folder, target, files=disk.reach)
                except (Killed, CovenantError) as ended:
                    assert disk.failed is not None
                    assert isinstance(ended, Killed) or (ended.code == "backup_failed" and not partial.exists())
                    is_there = target.exists() and contents(target) != {}
                    stages.add(is_there)
                    if not is_there:
                        assert target.exists() == exists
                        backup(folder, target)
                assert {
                    name: content for name, content in contents(target).items() if name != "backup.json"
                } == chain_of(folder)
                assert (target / "backup.json").exists()
                assert not partial.exists()
                shutil.rmtree(target)
                if disk.failed is None:
                    break
            assert fail_at > 20
    assert stages == {True, False}
    assert contents(folder) == whole


async def test_a_folder_of_somebody_else_beside_the_backup_is_not_touched(folder: Path, target: Path) -> None:
    await make_journal(folder)
    partial = target.with_name("backup.partial")
    partial.mkdir()
    (partial / "precious").write_text("mine")
    refused("backup_failed", lambda: backup(folder, target))
    assert contents(partial) == {"precious": b"mine"}
    assert not target.exists()


async def test_a_restore_that_ends_anywhere_leaves_no_store_or_a_whole_one(
    folder: Path, target: Path, place: Path
) -> None:
    await make_journal(folder)
    backup(folder, target)
    chain, backed_up = chain_of(folder), contents(target)
    stages: set[bool] = set()
    for kills in (True, False):
        for exists in (True, False):
            for fail_at in count(1):
                if exists:
                    place.mkdir()
                disk = FailingDisk(place, fail_at, kills=kills)
                try:
                    restore(target, place, files=disk.reach)
                except (Killed, CovenantError):
                    assert disk.failed is not None
                    is_there = place.exists() and contents(place) != {}
                    stages.add(is_there)
                    if not is_there:
                        restore(target, place)
                assert contents(place) == chain
                assert not place.with_name("restored.restoring").exists()
                shutil.rmtree(place)
                if disk.failed is None:
                    break
            assert fail_at > 15
    assert stages == {True, False}
    assert contents(target) == backed_up
