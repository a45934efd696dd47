"""A damaged journal is cut at its last sound line: it opens again, and not a byte is lost."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import combinations, count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant import CovenantError, Limits, Mailbox, Task
from covenant.store.clock import ManualClock
from covenant.store.journal.damage import survey
from covenant.store.journal.files import AppendFile, Files
from covenant.store.journal.repair import TASKS_MAX, RepairReport, inspect, repair
from covenant.store.journal.verify import verify
from tests.journal.support import SMALL, FailingDisk, busy_run, open_journal, refused, state_in, tidy

TRIES = 150
GENESIS = b"0" * 64
FIRST = "journal-00000000000000000001.jsonl"
Change = Callable[[Path, random.Random], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


async def make_journal(folder: Path, rounds: int = 6, limits: Limits = SMALL) -> None:
    clock = ManualClock()
    async with open_journal(folder, clock=clock, limits=limits) as box:
        await busy_run(box, clock, rounds=rounds)
        await tidy(box)


async def make_journal_that_dropped_segments(folder: Path) -> None:
    clock = ManualClock()
    limits = Limits(segment_bytes=3_000, snapshot_every_bytes=9_000, finished_tail_max=3, retention_ms=2_000)
    async with open_journal(folder, clock=clock, limits=limits) as box:
        await busy_run(box, clock, rounds=6)
        clock.advance(1_000)
        await box.compact()
        await busy_run(box, clock, rounds=2)
        await tidy(box)
    assert len(list(folder.glob("history-*"))) == 1
    assert segment(folder, 0).name != FIRST


async def go_on(folder: Path) -> None:
    """More work, and more in the archive, and no further snapshot."""
    clock = ManualClock(ManualClock().now_ms() + 10**6)
    limits = Limits(segment_bytes=6_000, finished_tail_max=3, archive_batch=3)
    async with Mailbox.open(f"file:{folder}", clock=clock, limits=limits) as box:  # with ids that are new
        await busy_run(box, clock, rounds=6)
        await tidy(box)


def damage_behind_snapshots(folder: Path) -> None:
    saved = max(folder.glob("snapshot-*")).name.removeprefix("snapshot-")
    change_line(next(path for path in segments(folder) if path.name.removeprefix("journal-") > saved), 3)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("journal-*.jsonl"))


def segment(folder: Path, number: int) -> Path:
    return segments(folder)[number]


def forget_snapshots(folder: Path) -> None:
    """As a start leaves it that found the damage."""
    for derived in [*folder.glob("snapshot-*"), *folder.glob("archive*")]:
        derived.unlink()


def lines_of(path: Path) -> list[bytes]:
    return [line + b"\n" for line in path.read_bytes().split(b"\n")[:-1]]


def change_line(path: Path, number: int) -> None:
    lines = lines_of(path)
    lines[number - 1] = lines[number - 1].replace(b'"at":', b'"ta":')
    path.write_bytes(b"".join(lines))


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def sound_prefix(folder: Path) -> dict[str, bytes]:
    """Said once more, with nothing but SHA-256: the segments as far as each line follows the one before."""
    kept: dict[str, bytes] = {}
    paths = segments(folder)
    previous = GENESIS
    if paths and paths[0].name != FIRST:
        told = re.search(b'"prev":"([0-9a-f]{64})"', paths[0].read_bytes())
        previous = told[1] if told else b""
    for number, path in enumerate(paths):
        for line in lines_of(path):
            mark = follows(previous, line)
            if mark is None or (path.name not in kept and is_misnamed(path, line)):
                break
            previous = mark
            kept[path.name] = kept.get(path.name, b"") + line
        else:
            if kept.get(path.name) == path.read_bytes():
                continue
        after = lines_of(paths[number + 1])[:1] if number + 1 < len(paths) else []
        if path.name not in kept or not after or follows(previous, after[0]) is None:
            break
    return kept


def last_event(segments: dict[str, bytes]) -> int:
    lines = [json.loads(line) for content in segments.values() for line in content.splitlines()]
    ends = [line["first"] - 1 if "first" in line else line["seq"] + max(1, len(line["events"])) - 1 for line in lines]
    return max(ends, default=0)


def is_misnamed(path: Path, header: bytes) -> bool:
    return path.name != f"journal-{json.loads(header)['first']:020d}.jsonl"


def follows(previous: bytes, line: bytes) -> bytes | None:
    body, _, rest = line.rpartition(b',"hash":"')
    mark = hashlib.sha256(previous + body).hexdigest().encode()
    return mark if rest == mark + b'"}\n' else None


async def state_of(segments: dict[str, bytes], folder: Path, history: Path | None = None) -> dict[str, bytes]:
    """What a mailbox holds that has these segments and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in segments.items():
        (folder / name).write_bytes(content)
    if history is not None:
        shutil.copy(history, folder)
    return await state_in(folder)


# --- one damage at a time ----------------------------------------------------------------------------------


def a_changed_line(folder: Path) -> tuple[str, int]:
    change_line(segment(folder, 1), 3)
    return segment(folder, 1).name, 3


def a_removed_line(folder: Path) -> tuple[str, int]:
    path = segment(folder, 1)
    lines = lines_of(path)
    path.write_bytes(b"".join(lines[:3] + lines[4:]))
    return path.name, 4


def a_repeated_line(folder: Path) -> tuple[str, int]:
    path = segment(folder, 1)
    lines = lines_of(path)
    path.write_bytes(b"".join(lines[:3] + lines[2:]))
    return path.name, 4


def a_line_of_zeros(folder: Path) -> tuple[str, int]:
    path = segment(folder, -1)
    lines = lines_of(path)
    lines[1] = b"\0" * len(lines[1])
    path.write_bytes(b"".join(lines))
    return path.name, 2


def a_header_that_does_not_read(folder: Path) -> tuple[str, int]:
    path = segment(folder, 2)
    path.write_bytes(b"#" + path.read_bytes()[1:])
    return path.name, 1


def a_last_header_that_does_not_fit(folder: Path) -> tuple[str, int]:
    path = segment(folder, -1)
    path.write_bytes(path.read_bytes().replace(b'"prev":"', b'"prev":"f', 1))
    return path.name, 1


def a_last_header_that_looks_torn(folder: Path) -> tuple[str, int]:
    """Nothing behind it says that it was ever whole; a start would take the segment for one that was never begun."""
    path = segment(folder, -1)
    path.write_bytes(lines_of(path)[0].replace(b'"prev":"', b'"prev":"f', 1))
    return path.name, 1


def a_header_that_counts_too_little(folder: Path) -> tuple[str, int]:
    """It says that the segment before it is shorter than it is."""
    path = segment(folder, 2)
    before = len(lines_of(segment(folder, 1))[-1])
    size = json.loads(lines_of(path)[0])["prev_bytes"]
    changed = path.read_bytes().replace(b'"prev_bytes":%d' % size, b'"prev_bytes":%d' % (size - before), 1)
    path.write_bytes(changed)
    return path.name, 1


def a_header_that_counts_half_a_line(folder: Path) -> tuple[str, int]:
    path = segment(folder, 2)
    size = json.loads(lines_of(path)[0])["prev_bytes"]
    changed = path.read_bytes().replace(b'"prev_bytes":%d' % size, b'"prev_bytes":%d' % (size - 300), 1)
    path.write_bytes(changed)
    return path.name, 1


def a_missing_segment(folder: Path) -> tuple[str, int]:
    segment(folder, 2).unlink()
    return segment(folder, 1).name, 0


def a_segment_that_ends_early(folder: Path) -> tuple[str, int]:
    path = segment(folder, 1)
    lines = lines_of(path)
    path.write_bytes(b"".join(lines[:-1]))
    return path.name, len(lines)


DAMAGES = [
    a_changed_line,
    a_removed_line,
    a_repeated_line,
    a_line_of_zeros,
    a_header_that_does_not_read,
    a_last_header_that_does_not_fit,
    a_last_header_that_looks_torn,
    a_header_that_counts_too_little,
    a_header_that_counts_half_a_line,
    a_missing_segment,
    a_segment_that_ends_early,
]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_journal_is_cut_and_holds_its_sound_prefix(
    folder: Path, tmp_path: Path, damage: Callable[[Path], tuple[str, int]]
) -> None:
    await make_journal(folder)
    forget_snapshots(folder)
    file, line = damage(folder)
    before, kept = contents(folder), sound_prefix(folder)
    found = inspect(folder)
    assert found is not None
    assert (found.file, found.line, found.starts, found.refusal) == (file, line, False, None)

    report = repair(folder, dry_run=False)
    assert report.done
    assert report.damage == found
    assert {path.name: path.read_bytes() for path in segments(folder)} == kept
    assert set(before.values()) <= set(contents(folder).values())
    assert inspect(folder) is None
    sound = verify(folder)
    assert sound.is_sound
    assert sound.head == found.head
    assert await state_in(folder) == await state_of(kept, tmp_path / "prefix")
    assert verify(folder).is_sound


async def test_a_repaired_journal_goes_on(folder: Path) -> None:
    await make_journal(folder)
    forget_snapshots(folder)
    a_changed_line(folder)
    repair(folder, dry_run=False)
    await go_on(folder)
    assert verify(folder).is_sound
    live = await state_in(folder)
    forget_snapshots(folder)
    assert await state_in(folder) == live


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_is_damaged_the_sound_prefix_is_left_and_every_byte_is_kept(
    folder: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    await make_journal(folder)
    original = tmp_path / "original"
    folder.rename(original)
    states: dict[bytes, dict[str, bytes]] = {}
    outcomes = {"cut": 0, "tidied": 0, "sound": 0, "repair_refused": 0, "unsupported_format": 0}
    for _ in range(TRIES // 5):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        for _ in range(rng.choice([1, 1, 2, 3])):
            rng.choice(CHANGES)(folder, rng)
        before, kept = contents(folder), sound_prefix(folder)
        try:
            report = repair(folder, dry_run=False, force=True)
        except CovenantError as refusal:
            assert contents(folder) == before
            assert refusal.code == "unsupported_format" or not (folder / FIRST).exists()
            outcomes[refusal.code] += 1
            continue
        outcomes["cut" if report.lines else "tidied" if report.done else "sound"] += 1
        assert set(before.values()) <= set(contents(folder).values())
        assert sound_prefix(folder) == kept
        assert verify(folder).is_sound
        key = b"".join(kept.values())[-100:]
        if key not in states:
            states[key] = await state_of(kept, tmp_path / "prefix")
        if not report.lines:
            forget_snapshots(folder)  # a lost tail looks like one that was never synced; the archive may know better
        assert await state_in(folder) == states[key]
        assert verify(folder).is_sound
        assert inspect(folder) is None
    assert outcomes["cut"] > TRIES // 10


# --- what the report says ----------------------------------------------------------------------------------


async def test_the_report_tells_what_was_cut_off_and_where_it_went(folder: Path) -> None:
    await make_journal(folder)
    forget_snapshots(folder)
    whole = {path.name: path.read_bytes() for path in segments(folder)}
    file, line = a_changed_line(folder)
    lines = [json.loads(raw) for path in segments(folder)[1:] for raw in lines_of(path)]
    cut = [commit for commit in lines if "events" in commit][line - 2 :]
    keys = [event["key"] for commit in cut for event in commit["events"]]
    tasks = {key.split(":")[1] if ":" in key else key for key in keys if not key.startswith("slot:")}

    report = repair(folder, dry_run=False)
    assert report.damage is not None and (report.damage.file, report.damage.line) == (file, line)
    assert (report.lines, report.unreadable, report.events) == (len(cut), 0, len(keys))
    assert (report.task_count, set(report.tasks)) == (len(tasks), tasks)
    assert report.moved_to == "damaged-1"
    assert report.files == list(whole)[1:]
    kept = contents(folder / "damaged-1")
    assert json.loads(kept.pop("repair.json"))["done"] is True
    assert sorted(kept) == report.files
    assert {name: kept[name] for name in list(whole)[2:]} == dict(list(whole.items())[2:])


async def test_the_list_of_tasks_is_bounded_and_their_number_is_not(folder: Path) -> None:
    async with open_journal(folder, limits=Limits()) as box:
        for _ in range(TASKS_MAX + 20):
            await box.of("ann@lab").send_task(Task(recipient=box.of("bob@lab").agent, intent_text="work"))
    change_line(segment(folder, 0), 3)
    report = repair(folder, dry_run=True)
    assert (len(report.tasks), report.task_count) == (TASKS_MAX, TASKS_MAX + 19)


async def test_lines_that_do_not_read_are_counted(folder: Path) -> None:
    await make_journal(folder)
    forget_snapshots(folder)
    path = segment(folder, -1)
    lines = lines_of(path)
    path.write_bytes(b"".join([lines[0], b"\xff\n", b'{"events":7}\n', b'{"events":[{}]}\n', *lines[2:]]))
    report = repair(folder, dry_run=True)
    assert (report.lines, report.unreadable) == (len(lines) + 1, 3)


async def test_a_dry_run_says_the_same_and_changes_nothing(folder: Path) -> None:
    await make_journal(folder)
    await go_on(folder)
    folder = await as_a_crash_leaves_it(folder)
    damage_behind_snapshots(folder)
    before = contents(folder)
    assert before["archive.sqlite3-wal"]
    planned = repair(folder, dry_run=True)
    assert contents(folder) == before
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []
    assert not planned.done
    done = repair(folder, dry_run=False)
    assert done.done
    done.done = False
    assert done == planned


async def as_a_crash_leaves_it(folder: Path) -> Path:
    left = folder.with_name("left")
    clock = ManualClock(ManualClock().now_ms() + 10**7)
    async with Mailbox.open(f"file:{folder}", clock=clock, limits=Limits(archive_batch=3, finished_tail_max=3)) as box:
        await busy_run(box, clock, rounds=2)
        await tidy(box)
        shutil.copytree(folder, left)
    return left


async def test_a_sound_journal_is_left_alone(folder: Path) -> None:
    await make_journal(folder)
    before = contents(folder)
    assert repair(folder, dry_run=False) == RepairReport(None)
    assert inspect(folder) is None
    assert contents(folder) == before


async def test_a_torn_end_is_no_damage(folder: Path) -> None:
    await make_journal(folder)
    path = segment(folder, -1)
    path.write_bytes(path.read_bytes() + b'{"seq":')
    before = contents(folder)
    assert repair(folder, dry_run=False) == RepairReport(None)
    assert contents(folder) == before


async def test_a_second_damage_gets_a_folder_of_its_own(folder: Path) -> None:
    await make_journal(folder)
    forget_snapshots(folder)
    a_missing_segment(folder)
    assert repair(folder, dry_run=False).moved_to == "damaged-1"
    first = contents(folder / "damaged-1")
    change_line(segment(folder, 0), 5)
    assert repair(folder, dry_run=False).moved_to == "damaged-2"
    assert contents(folder / "damaged-1") == first
    assert inspect(folder) is None


# --- what leans on the chain -------------------------------------------------------------------------------


async def test_what_may_know_of_the_cut_off_lines_goes_with_them(folder: Path, tmp_path: Path) -> None:
    """The snapshot stands before the damage, so a start would use it, and an archive that is ahead of the cut."""
    await make_journal(folder)
    await go_on(folder)
    (snapshot,) = folder.glob("snapshot-*")
    damage_behind_snapshots(folder)
    with pytest.raises(CovenantError) as refusal:
        await open_journal(folder)
    assert refusal.value.code == "store_damaged"
    kept = sound_prefix(folder)
    report = repair(folder, dry_run=False)
    assert {snapshot.name, "archive.sqlite3"} < set(report.files)
    assert [*folder.glob("snapshot-*"), *folder.glob("archive*")] == []
    assert await state_in(folder) == await state_of(kept, tmp_path / "prefix")


async def test_a_journal_that_still_starts_is_cut_only_by_force(folder: Path) -> None:
    await make_journal(folder)
    change_line(segment(folder, 0), 3)
    found = inspect(folder)
    assert found is not None and found.starts
    before = contents(folder)
    for dry_run in (True, False):
        why = refused("repair_refused", partial(repair, folder, dry_run=dry_run))
        assert (why.details["file"], why.details["line"]) == (FIRST, 3)
    assert contents(folder) == before
    async with open_journal(folder, clock=ManualClock(0)):
        pass
    report = repair(folder, dry_run=False, force=True)
    assert report.done
    assert verify(folder).head == found.head


async def test_a_chain_that_lost_the_line_of_its_snapshot_starts_without_it(folder: Path, tmp_path: Path) -> None:
    await make_journal(folder)
    (snapshot,) = folder.glob("snapshot-*")
    file = json.loads(snapshot.read_bytes().partition(b"\n")[0])["file"]
    for path in segments(folder):
        if path.name >= file:
            path.unlink()
    kept = sound_prefix(folder)
    with pytest.raises(CovenantError) as refusal:
        await open_journal(folder)
    assert refusal.value.code == "store_damaged"
    report = repair(folder, dry_run=False)
    assert report.lines == 0
    assert snapshot.name in report.files
    assert await state_in(folder) == await state_of(kept, tmp_path / "prefix")


async def test_bytes_behind_the_end_of_a_segment_are_taken_out_and_nothing_else(folder: Path) -> None:
    await make_journal(folder)
    sound = contents(folder)
    path = segment(folder, 0)
    path.write_bytes(path.read_bytes() + lines_of(path)[-1])
    longer = path.read_bytes()
    assert not verify(folder).is_sound
    report = repair(folder, dry_run=False)
    assert (report.lines, report.files) == (0, [path.name])
    after = contents(folder)
    assert after.pop(f"damaged-1/{path.name}") == longer
    del after["damaged-1/repair.json"]
    assert after == sound


async def test_a_history_stays_and_what_it_holds_is_there_after_a_repair(folder: Path, tmp_path: Path) -> None:
    await make_journal_that_dropped_segments(folder)
    (history,) = folder.glob("history-*")
    await go_on(folder)
    damage_behind_snapshots(folder)
    kept = sound_prefix(folder)
    assert repair(folder, dry_run=False).lines > 0
    assert history.exists()
    assert verify(folder).is_sound
    assert await state_in(folder) == await state_of(kept, tmp_path / "prefix", history)


async def test_damage_before_the_event_of_a_history_is_not_cut(folder: Path) -> None:
    """The history knows what happened behind the damage: no state before that can be told."""
    await make_journal_that_dropped_segments(folder)
    forget_snapshots(folder)
    change_line(segment(folder, 0), 2)
    before = contents(folder)
    why = refused("repair_refused", lambda: repair(folder, dry_run=False))
    assert "history" in why.message
    assert contents(folder) == before


async def test_a_damaged_history_is_not_repaired(folder: Path) -> None:
    await make_journal_that_dropped_segments(folder)
    await go_on(folder)
    damage_behind_snapshots(folder)
    (history,) = folder.glob("history-*")
    content = bytearray(history.read_bytes())
    content[len(content) // 2] ^= 1
    history.write_bytes(content)
    before = contents(folder)
    found = inspect(folder)
    assert found is not None and found.refusal is not None
    why = refused("repair_refused", lambda: repair(folder, dry_run=False, force=True))
    assert history.name in why.message
    assert contents(folder) == before


async def test_a_damaged_history_that_nobody_needs_goes_aside(folder: Path, tmp_path: Path) -> None:
    """Nothing was dropped yet: every segment is there."""
    await make_journal(folder)
    forget_snapshots(folder)
    (folder / "history-00000000000000000090.jsonl").write_bytes(b"garbage\n")
    with pytest.raises(CovenantError) as refusal:
        await open_journal(folder)
    assert refusal.value.code == "store_damaged"
    forget_snapshots(folder)
    kept = sound_prefix(folder)
    report = repair(folder, dry_run=False)
    assert (report.lines, report.files) == (0, ["history-00000000000000000090.jsonl"])
    assert await state_in(folder) == await state_of(kept, tmp_path / "prefix")


async def test_whatever_is_damaged_behind_a_history_the_sound_prefix_is_left(folder: Path, tmp_path: Path) -> None:
    """And what is damaged before the event of the history is refused, whatever else is."""
    rng = random.Random(11)
    await make_journal_that_dropped_segments(folder)
    await go_on(folder)
    original = tmp_path / "original"
    folder.rename(original)
    (history,) = original.glob("history-*")
    outcomes = {"cut": 0, "refused": 0}
    for _ in range(TRIES // 5):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        rng.choice([change_a_byte, tamper_with_a_line, cut_a_segment, lose_a_segment])(folder, rng)
        before, kept = contents(folder), sound_prefix(folder)
        try:
            report = repair(folder, dry_run=False, force=True)
        except CovenantError as refusal:
            assert contents(folder) == before
            lost_first = not (folder / segment(original, 0).name).exists()
            reaches = last_event(kept) >= int(history.stem.removeprefix("history-"))
            assert refusal.code == "unsupported_format" or lost_first or not reaches
            outcomes["refused"] += 1
            continue
        outcomes["cut"] += bool(report.lines)
        assert sound_prefix(folder) == kept
        assert verify(folder).is_sound
        forget_snapshots(folder)
        assert await state_in(folder) == await state_of(kept, tmp_path / "prefix", history)
    assert min(outcomes.values()) > TRIES // 50


async def test_a_report_that_does_not_read_is_left_alone(folder: Path) -> None:
    await make_journal(folder)
    forget_snapshots(folder)
    a_changed_line(folder)
    (folder / "damaged-1").mkdir()
    (folder / "damaged-1" / "repair.json").write_bytes(b"\xff")
    assert repair(folder, dry_run=False).moved_to == "damaged-2"
    assert (folder / "damaged-1" / "repair.json").read_bytes() == b"\xff"


@pytest.mark.parametrize("make", [make_journal, make_journal_that_dropped_segments])
async def test_a_journal_without_its_beginning_is_not_repaired(
    folder: Path, make: Callable[[Path], Awaitable[None]]
) -> None:
    await make(folder)
    segment(folder, 0).unlink()
    before = contents(folder)
    refused("repair_refused", lambda: repair(folder, dry_run=False, force=True))
    assert contents(folder) == before


async def test_a_newer_format_is_not_taken_for_damage(folder: Path) -> None:
    await make_journal(folder)
    path = segment(folder, -1)
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2', 1))
    before = contents(folder)
    refused("unsupported_format", lambda: repair(folder, dry_run=False))
    assert contents(folder) == before


async def test_a_journal_in_use_is_not_repaired(folder: Path) -> None:
    async with open_journal(folder):
        refused("store_locked", lambda: repair(folder, dry_run=False))
        assert inspect(folder) is None


class ReplacedFiles(Files):
    """A folder in which housekeeping drops segments right before they are listed for the first time."""

    def __init__(self, folder: Path, later: Path) -> None:
        super().__init__(folder)
        self.later = later

    def names(self, prefix: str, suffix: str) -> list[str]:
        if prefix == "journal-" and self.later.exists():
            shutil.rmtree(self.folder)
            self.later.rename(self.folder)
        return super().names(prefix, suffix)


async def test_segments_that_are_dropped_meanwhile_are_not_missing(folder: Path, tmp_path: Path) -> None:
    await make_journal_that_dropped_segments(folder)
    shutil.copytree(folder, tmp_path / "before")
    clock = ManualClock(ManualClock().now_ms() + 60_000)
    async with open_journal(folder, clock=clock, limits=Limits(segment_bytes=3_000, retention_ms=2_000)) as box:
        assert (await box.compact()).segments_dropped > 0
    assert survey(ReplacedFiles(tmp_path / "before", folder)).damage is None


def test_a_folder_that_is_not_there_is_refused(folder: Path) -> None:
    refused("repair_refused", lambda: repair(folder, dry_run=False))
    refused("repair_refused", lambda: inspect(folder))
    assert not folder.exists()


# --- killed anywhere ---------------------------------------------------------------------------------------


async def damaged_everywhere(folder: Path) -> None:
    """A void, a damaged snapshot to go, a segment to cut and several behind it."""
    await make_journal(folder)
    change_line(segment(folder, 2), 4)
    path = segment(folder, 0)
    path.write_bytes(path.read_bytes() + b"garbage\n")
    (snapshot,) = folder.glob("snapshot-*")
    shutil.copy(snapshot, folder / "snapshot-00000000000000000001.jsonl")
    with (folder / "snapshot-00000000000000000001.jsonl").open("ab") as file:
        file.write(b"garbage\n")


async def damaged_in_a_last_line(folder: Path) -> None:
    """Once nothing stands behind it, it looks like a torn one."""
    await make_journal(folder)
    forget_snapshots(folder)
    change_line(segment(folder, 2), len(lines_of(segment(folder, 2))))


async def damaged_in_half_a_header(folder: Path) -> None:
    """Once nothing stands behind it, it looks like a segment that was never begun."""
    await make_journal(folder)
    forget_snapshots(folder)
    segment(folder, 2).write_bytes(segment(folder, 2).read_bytes()[:20])


@pytest.mark.parametrize("restarts", [False, True], ids=["alone", "with a start in between"])
@pytest.mark.parametrize("damage", [damaged_everywhere, damaged_in_a_last_line, damaged_in_half_a_header])
async def test_a_repair_that_fails_anywhere_is_finished_by_the_next(
    folder: Path, tmp_path: Path, damage: Callable[[Path], Awaitable[None]], restarts: bool
) -> None:
    await damage(folder)
    original = tmp_path / "original"
    folder.rename(original)
    before, kept = contents(original), sound_prefix(original)
    chain = {name: content for name, content in before.items() if name.startswith("journal-")}
    state = await state_of(kept, tmp_path / "prefix")
    planned = repair(original, dry_run=True, force=True)
    planned.done = True
    failures: set[str] = set()
    for fail_at in count(1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        disk = FailingDisk(folder, fail_at)
        try:
            report = repair(folder, dry_run=False, force=True, files=disk.reach)
        except CovenantError as refusal:
            assert refusal.code == "store_unavailable"
            assert disk.failed is not None
            failures.add(disk.failed)
            assert set(before.values()) <= set(contents(folder).values())
            moved = [name for name in contents(folder) if name in [f"damaged-1/{file}" for file in planned.files]]
            aside = {contents(folder)[name] for name in moved}
            if restarts:
                await start_in_between(folder, chain, state)
                assert set(chain.values()) <= set(contents(folder).values())
            report = repair(folder, dry_run=False, force=True)
            assert aside <= set(contents(folder).values())
        if report.damage is None:  # all was done but to say so
            report = msgspec.json.decode((folder / "damaged-1" / "repair.json").read_bytes(), type=RepairReport)
        if restarts:
            report.files = planned.files  # a start makes an archive before it finds the damage
        assert report == planned
        assert inspect(folder) is None
        assert list(sound_prefix(folder)) == list(kept)
        if disk.failed is None:
            break
    assert failures >= {"make_folder", "create", "write", "sync", "sync_folder", "rename", "remove"}


async def start_in_between(folder: Path, chain: dict[str, bytes], state: dict[str, bytes]) -> None:
    """It fails; or nothing was changed yet, and a snapshot hides the damage; or all was done."""
    untouched = chain.items() <= contents(folder).items()
    try:
        found = await state_in(folder)
    except CovenantError as refusal:
        assert refusal.code == "store_damaged"
    else:
        assert untouched or found == state


# --- and the machine with it -------------------------------------------------------------------------------


class Tape:
    """What a repair did to its folders, in order, and which of it a crash could still take back."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ops: list[tuple[Any, ...]] = []
        self.pending: dict[int, set[str]] = {}  # operations, and what must be synced to make them durable
        self.images: list[tuple[int, dict[int, set[str]]]] = []  # after so many operations, these may be missing

    def note(self, *op: Any, until: set[str]) -> None:
        self.pending[len(self.ops)] = until
        self.ops.append(op)
        self.look()

    def synced(self, what: str) -> None:
        self.look()
        for at, waits in list(self.pending.items()):
            waits.discard(what)
            if not waits:
                del self.pending[at]

    def look(self) -> None:
        self.images.append((len(self.ops), {at: set(waits) for at, waits in self.pending.items()}))

    def reach(self, folder: Path) -> Files:
        return TapedFiles(folder, self)


class TapedFiles(Files):
    def __init__(self, folder: Path, tape: Tape) -> None:
        super().__init__(folder)
        self.tape = tape

    def path(self, name: str) -> str:
        return (self.folder / name).relative_to(self.tape.root).as_posix()

    def create(self, name: str) -> AppendFile:
        file = super().create(name)
        self.tape.note("create", self.path(name), until={str(self.folder)})
        return TapedFile(self.tape, self.path(name), file)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        parents = [str((self.folder / name).parent) for name in (old, new)]
        self.tape.note("rename", self.path(old), self.path(new), *parents, until=set(parents))

    def truncate(self, name: str, size: int) -> None:
        super().truncate(name, size)
        self.tape.note("truncate", self.path(name), size, until={"it is"})
        self.tape.synced("it is")

    def sync_folder(self) -> None:
        super().sync_folder()
        self.tape.synced(str(self.folder))


class TapedFile(AppendFile):
    def __init__(self, tape: Tape, name: str, real: AppendFile) -> None:
        super().__init__(real.path, real._fd, real.size)
        self.tape = tape
        self.name = name

    def write(self, data: bytes) -> None:
        super().write(data)
        self.tape.note("write", self.name, data, until={self.name})

    def sync(self) -> None:
        super().sync()
        self.tape.synced(self.name)


def image(before: dict[str, bytes], ops: list[tuple[Any, ...]], lost: dict[int, set[str]], folder: Path) -> None:
    """The folder as it would be if these operations had not reached the disk. Each has what it waits for: a file that
    was moved to another folder has both names while only the new folder is synced, and none while only the old is."""
    files = {name: bytearray(content) for name, content in before.items()}
    for at, (kind, name, *facts) in enumerate(ops):
        if kind != "create" and name not in files:
            continue
        if at in lost:
            if kind == "rename" and facts[1] not in lost[at]:
                del files[name]
            elif kind == "rename" and facts[2] not in lost[at]:
                files[facts[0]] = bytearray(files[name])
            continue
        if kind == "create":
            files[name] = bytearray()
        elif kind == "rename":
            files[facts[0]] = files.pop(name)
        elif kind == "truncate":
            del files[name][facts[0] :]
        else:
            files[name] += facts[0]
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


async def test_a_machine_that_stops_during_a_repair_loses_nothing(folder: Path, tmp_path: Path) -> None:
    """Whatever was not synced may be missing: every byte is still there, and the next repair makes the same cut."""
    await damaged_everywhere(folder)
    before, kept = contents(folder), sound_prefix(folder)
    planned = repair(folder, dry_run=True, force=True)
    planned.done = True
    tape = Tape(folder)
    assert repair(folder, dry_run=False, force=True, files=tape.reach) == planned
    assert tape.pending == {}, "a repair that is done cannot be taken back"
    assert {op[0] for op in tape.ops} == {"create", "write", "rename", "truncate"}
    left = tmp_path / "left"
    for number, pending in tape.images:
        for size in range(len(pending) + 1):
            for lost in combinations(pending, size):
                shutil.rmtree(left, ignore_errors=True)
                image(before, tape.ops[:number], {at: pending[at] for at in lost}, left)
                assert set(before.values()) <= set(contents(left).values())
                repair(left, dry_run=False, force=True)
                assert inspect(left) is None
                assert sound_prefix(left) == kept
                assert set(before.values()) <= set(contents(left).values())
    assert len(tape.images) > 30


# --- ways to damage ----------------------------------------------------------------------------------------


def change_a_byte(folder: Path, rng: random.Random) -> None:
    path = rng.choice(segments(folder) or [folder / "lock"])
    content = bytearray(path.read_bytes() or b"x")
    content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    path.write_bytes(content)


def tamper_with_a_line(folder: Path, rng: random.Random) -> None:
    path = rng.choice(segments(folder) or [folder / "lock"])
    lines = lines_of(path) or [b"\n"]
    at = rng.randrange(len(lines))
    how = rng.choice(["remove", "repeat", "swap", "insert", "zero"])
    if how == "remove":
        del lines[at]
    elif how == "repeat":
        lines.insert(rng.randrange(len(lines) + 1), lines[at])
    elif how == "swap":
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    elif how == "insert":
        lines.insert(at, b'{"seq":1}\n')
    else:
        lines[at] = b"\0" * len(lines[at])
    path.write_bytes(b"".join(lines))


def cut_a_segment(folder: Path, rng: random.Random) -> None:
    path = rng.choice(segments(folder) or [folder / "lock"])
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) + 1)])


def lose_a_segment(folder: Path, rng: random.Random) -> None:
    rng.choice(segments(folder) or [folder / "lock"]).unlink(missing_ok=True)


def swap_segments(folder: Path, rng: random.Random) -> None:
    one, other = rng.choice(segments(folder)), rng.choice(segments(folder))
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])


def append_to_a_segment(folder: Path, rng: random.Random) -> None:
    path = rng.choice(segments(folder) or [folder / "lock"])
    path.write_bytes(path.read_bytes() + rng.choice([b"garbage", b"garbage\n", b"".join(lines_of(path)[-2:])]))


def change_what_is_derived(folder: Path, rng: random.Random) -> None:
    for path in [*folder.glob("snapshot-*"), *folder.glob("archive.sqlite3")]:
        how = rng.choice(["leave", "change", "lose"])
        if how == "lose":
            path.unlink()
        elif how == "change":
            content = bytearray(path.read_bytes())
            at = rng.randrange(len(content)) if path.suffix == ".jsonl" else 0  # SQLite has no checksums
            content[at] ^= rng.randrange(1, 256)
            path.write_bytes(content)


CHANGES: list[Change] = [
    change_a_byte,
    tamper_with_a_line,
    tamper_with_a_line,
    cut_a_segment,
    lose_a_segment,
    swap_segments,
    append_to_a_segment,
    change_what_is_derived,
]
