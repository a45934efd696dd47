"""The chain: any change before an exported head is found."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from covenant import CovenantError, Task
from covenant.store.clock import ManualClock
from covenant.store.journal.engine import Head
from covenant.store.journal.verify import verify
from tests.journal.support import busy_run, dump, journal_of, open_journal, tidy

TRIES = 10_000


async def make_journal(folder: Path, rounds: int) -> Head:
    clock = ManualClock()
    async with open_journal(folder, clock=clock) as box:
        await busy_run(box, clock, rounds=rounds)
        return await journal_of(box).head()


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("journal-*.jsonl"))


def tamper(lines: list[bytes], rng: random.Random) -> tuple[str, list[bytes]]:
    """Change, remove, repeat or swap one line; always really a change."""
    while True:
        at = rng.randrange(len(lines))
        changed = list(lines)
        how = rng.choice(["change", "remove", "repeat", "swap", "insert"])
        if how == "change":
            byte = rng.randrange(len(lines[at]))
            line = bytearray(lines[at])
            line[byte] ^= rng.randrange(1, 256)
            changed[at] = bytes(line)
        elif how == "remove":
            del changed[at]
        elif how == "repeat":
            changed.insert(rng.randrange(len(lines)), lines[at])
        elif how == "insert":
            changed.insert(at, b'{"seq":1}\n')
        else:
            other = rng.randrange(len(lines))
            changed[at], changed[other] = changed[other], changed[at]
        if changed[: len(lines)] != lines:  # a change behind the last line is a change behind the head
            return how, changed


async def test_any_single_tampered_line_before_the_head_is_found(tmp_path: Path) -> None:
    head = await make_journal(tmp_path / "data", rounds=2)
    assert verify(tmp_path / "data", head).is_sound
    rng = random.Random(7)
    target = tmp_path / "tampered"
    target.mkdir()
    paths = segments(tmp_path / "data")
    assert len(paths) >= 2
    contents = {path.name: path.read_bytes() for path in paths}
    for name, content in contents.items():
        (target / name).write_bytes(content)
    found: dict[str, int] = {}
    for _ in range(TRIES):
        name = rng.choice(list(contents))
        how, lines = tamper(contents[name].splitlines(keepends=True), rng)
        (target / name).write_bytes(b"".join(lines))
        assert not verify(target, head).is_sound, f"{how} in {name} was not found"
        found[how] = found.get(how, 0) + 1
        (target / name).write_bytes(contents[name])
    assert len(found) == 5
    assert verify(target, head).is_sound


async def test_a_chain_forged_to_the_end_is_found_by_the_exported_head(tmp_path: Path) -> None:
    """Somebody who recomputes every hash after a change still cannot make the head that was exported."""
    head = await make_journal(tmp_path / "data", rounds=1)
    path = segments(tmp_path / "data")[0]
    previous = b"0" * 64
    forged = []
    for line in path.read_bytes().splitlines():
        body = line[: line.rindex(b',"hash":"')].replace(b"plain 0", b"plain 9")
        previous = hashlib.sha256(previous + body).hexdigest().encode()
        forged.append(body + b',"hash":"' + previous + b'"}\n')
    path.write_bytes(b"".join(forged))
    for later in segments(tmp_path / "data")[1:]:
        later.unlink()
    assert verify(tmp_path / "data").is_sound
    assert not verify(tmp_path / "data", head).is_sound


async def test_a_journal_cut_before_the_head_is_found(tmp_path: Path) -> None:
    head = await make_journal(tmp_path / "data", rounds=1)
    path = segments(tmp_path / "data")[-1]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    assert not verify(tmp_path / "data", head).is_sound


async def test_damage_in_the_middle_stops_the_start_with_file_and_line(tmp_path: Path) -> None:
    await make_journal(tmp_path / "data", rounds=3)
    for snapshot in tmp_path.glob("data/snapshot-*"):
        snapshot.unlink()
    path = segments(tmp_path / "data")[0]
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b'"type"', b'"tipe"')
    path.write_bytes(b"".join(lines))
    with pytest.raises(CovenantError) as refused:
        await open_journal(tmp_path / "data")
    assert refused.value.code == "store_damaged"
    assert refused.value.details["line"] == 5
    assert refused.value.details["file"] == path.name


async def test_a_damaged_line_that_later_batches_follow_is_not_taken_for_a_torn_one(tmp_path: Path) -> None:
    await make_journal(tmp_path / "data", rounds=3)
    for snapshot in tmp_path.glob("data/snapshot-*"):
        snapshot.unlink()
    path = segments(tmp_path / "data")[-1]
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > 3
    lines[1] = b"\0" * len(lines[1])
    path.write_bytes(b"".join(lines))
    with pytest.raises(CovenantError) as refused:
        await open_journal(tmp_path / "data")
    assert refused.value.code == "store_damaged"


async def test_a_missing_segment_stops_the_start(tmp_path: Path) -> None:
    await make_journal(tmp_path / "data", rounds=6)
    paths = segments(tmp_path / "data")
    assert len(paths) > 2
    for gone in [*tmp_path.glob("data/snapshot-*"), paths[1]]:
        gone.unlink()
    with pytest.raises(CovenantError) as refused:
        await open_journal(tmp_path / "data")
    assert refused.value.code == "store_damaged"


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    await make_journal(tmp_path / "data", rounds=1)
    for path in tmp_path.glob("data/*.jsonl"):
        path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(CovenantError) as refused:
        await open_journal(tmp_path / "data")
    assert refused.value.code in ("unsupported_format", "store_damaged")


async def test_a_stranger_can_follow_the_file_with_tail(tmp_path: Path) -> None:
    """One JSON object a line, in order, while it is being written; the chain is checked with nothing but SHA-256."""
    folder = tmp_path / "data"
    async with open_journal(folder, clock=ManualClock()) as box:
        path = segments(folder)[0]
        with subprocess.Popen(["tail", "-n", "+1", "-f", str(path)], stdout=subprocess.PIPE) as tail:
            assert tail.stdout is not None
            previous = b"0" * 64
            texts: list[str] = []
            try:
                for number in range(5):
                    task = Task(recipient=box.of("bob@lab").agent, intent_text=f"number {number}")
                    await box.of("ann@lab").send_task(task)
                while len(texts) < 5:
                    line = tail.stdout.readline().rstrip(b"\n")
                    body, _, mark = line[:-2].rpartition(b',"hash":"')
                    assert hashlib.sha256(previous + body).hexdigest().encode() == mark
                    previous = mark
                    texts += [event["task"]["intent_text"] for event in json.loads(line).get("events", [])]
            finally:
                tail.kill()
    assert texts == [f"number {number}" for number in range(5)]


async def test_a_copy_of_the_folder_without_snapshot_and_archive_is_the_same_mailbox(tmp_path: Path) -> None:
    """Segments are the truth; the rest is derived."""
    clock = ManualClock()
    async with open_journal(tmp_path / "data", clock=clock) as box:
        await busy_run(box, clock, rounds=10)
        await tidy(box)
        live = dump(box)
        assert journal_of(box).stats.archived > 0
        assert journal_of(box).stats.snapshots > 0
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    for derived in [*tmp_path.glob("copy/snapshot-*"), *tmp_path.glob("copy/archive*")]:
        derived.unlink()
    for folder in ("data", "copy"):
        async with open_journal(tmp_path / folder, clock=ManualClock(clock.now_ms())) as box:
            assert dump(box) == live
