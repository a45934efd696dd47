"""The chain: any change before an exported head is found."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from covenant import CovenantError, Limits, OpenMailbox, Task
from covenant.exchange.realm import Realm
from covenant.model.command import SignHead
from covenant.model.event import HeadSigned
from covenant.store.clock import ManualClock
from covenant.store.journal.engine import Head
from covenant.store.journal.files import Files
from covenant.store.journal.line import Line, encode
from covenant.store.journal.segment import Reader, read_header, segment_names
from covenant.store.journal.verify import UNSIGNED_MS_MAX, verify
from tests.journal.support import busy_run, dump, journal_of, open_journal, tidy


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


@pytest.mark.parametrize(
    "tries", [pytest.param(1_000, id="some"), pytest.param(10_000, id="many", marks=pytest.mark.soak)]
)
async def test_any_single_tampered_line_before_the_head_is_found(tmp_path: Path, tries: int) -> None:
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
    for _ in range(tries):
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


# --- signed heads ------------------------------------------------------------------------------------------

REALM = Realm.throwaway()
DROPPING = Limits(segment_bytes=2_000, retention_ms=1_000, dedup_ms=1_000, finished_tail_max=0, archive_batch=1)


async def send(box: OpenMailbox, count: int = 1) -> None:
    for _ in range(count):
        await box.of("ann@lab").send_task(Task(recipient=box.of("bob@lab").agent, intent_text="work"))


async def sign(box: OpenMailbox, head: Head | None = None) -> None:
    head = head or await journal_of(box).head()
    signature = REALM.sign_head(head.seq, head.hash)
    await journal_of(box).run(SignHead(None, head.seq, head.hash, signature, REALM.pubkey))


def rewrite(folder: Path, change: Callable[[Line], Line]) -> None:
    """What somebody with the folder and without the key can do: other lines, and every hash made anew."""
    files = Files(folder)
    lines = [change(line) for line in Reader(files)]
    (name,) = segment_names(files)
    header = read_header(files, name)
    assert header is not None
    data, mark = encode(header, header.prev.encode())
    for line in lines:
        added, mark = encode(line, mark)
        data += added
    (folder / name).write_bytes(data)


def heads_changed(**members: str) -> Callable[[Line], Line]:
    def change(line: Line) -> Line:
        events = [
            msgspec.structs.replace(event, **members) if isinstance(event, HeadSigned) else event
            for event in line.events
        ]
        return msgspec.structs.replace(line, events=events)

    return change


@pytest.mark.parametrize("late", [0, 1, 7], ids=["at once", "behind a commit", "behind several segments"])
async def test_a_head_of_a_dropped_segment_is_sound_when_a_history_stands_in_for_it(tmp_path: Path, late: int) -> None:
    """A head is signed a moment after it was taken, and may by then lie in an earlier segment."""
    clock = ManualClock()
    folder = tmp_path / "data"
    async with open_journal(folder, limits=DROPPING, clock=clock) as box:
        await send(box, 9)
        old = await journal_of(box).head()
        journal_of(box)._change_segment()
        await send(box, late)
        clock.advance(2_000)
        journal_of(box)._change_segment()
        await sign(box, old)
        await send(box, 5)
        assert verify(folder, realm=REALM.pubkey).is_sound
        await box.compact()
        signed_in = [line.seq for line in Reader(Files(folder)) if isinstance(line.events[0], HeadSigned)]
        assert signed_in[0] == old.seq + late + 1
        report = verify(folder, realm=REALM.pubkey)
        assert report.is_sound, report.damage
        assert (report.signatures, report.signed_until) == (1, old.seq)
    forged = tmp_path / "forged"
    shutil.copytree(folder, forged)
    for history in forged.glob("history-*"):
        history.unlink()
    assert not verify(forged, realm=REALM.pubkey).is_sound


async def test_a_head_of_a_dropped_segment_must_be_signed_and_fit_the_anchor(tmp_path: Path) -> None:
    clock = ManualClock()
    folder = tmp_path / "data"
    limits = msgspec.structs.replace(DROPPING, segment_bytes=1_000_000)
    async with open_journal(folder, limits=limits, clock=clock) as box:
        await send(box, 9)
        old = await journal_of(box).head()
        journal_of(box)._change_segment()
        clock.advance(2_000)
        await sign(box, Head(old.seq, "0" * 64))  # of another chain
        await box.compact()
        await tidy(box)
    (damage,) = verify(folder, realm=REALM.pubkey).damage
    assert damage == f"the head that was signed at event {old.seq} is not in this chain"
    rewrite(folder, heads_changed(hash=old.hash))
    (damage,) = verify(folder, realm=REALM.pubkey).damage
    assert damage == f"the signature under event {old.seq} is not good"


async def test_a_journal_without_its_beginning_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    await make_journal(folder, rounds=3)
    first, second, *_ = segments(folder)
    first.unlink()
    assert any(f"before {second.name} are missing" in damage for damage in verify(folder).damage)


@pytest.mark.parametrize("signature", ["", "1", "not base58: 0OIl", "z" * 88])
async def test_a_head_without_a_good_signature_is_found(tmp_path: Path, signature: str) -> None:
    folder = tmp_path / "data"
    async with open_journal(folder) as box:
        await send(box)
        await sign(box)
    assert verify(folder, realm=REALM.pubkey).is_sound
    rewrite(folder, heads_changed(signature=signature))
    assert verify(folder, realm=REALM.pubkey).damage == ["the signature under event 1 is not good"]


async def test_a_head_that_was_emptied_out_of_its_line_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with open_journal(folder) as box:
        await send(box)
        await sign(box)

    def emptied(line: Line) -> Line:
        return msgspec.structs.replace(line, events=()) if isinstance(line.events[0], HeadSigned) else line

    rewrite(folder, emptied)
    assert verify(folder, realm=REALM.pubkey).damage == ["the commit at event 2 says nothing"]


async def test_a_chain_that_is_signed_no_more_says_since_when(tmp_path: Path) -> None:
    clock = ManualClock()
    folder = tmp_path / "data"
    async with open_journal(folder, clock=clock) as box:
        await send(box, 3)
        assert verify(folder).unsigned_after is None  # nobody signs here
        assert verify(folder, realm=REALM.pubkey).unsigned_after is None  # it may be signed any moment
        clock.advance(UNSIGNED_MS_MAX + 1)
        await send(box)
        assert verify(folder, realm=REALM.pubkey).unsigned_after == 0
        await sign(box)
        clock.advance(UNSIGNED_MS_MAX + 1)  # nothing happens
        await send(box)
        assert verify(folder).unsigned_after is None
        clock.advance(UNSIGNED_MS_MAX + 1)
        await send(box)
        report = verify(folder)
        assert (report.is_sound, report.signed_until, report.unsigned_after) == (True, 4, 5)
        await sign(box)
        assert verify(folder).unsigned_after is None
