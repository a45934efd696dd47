"""What is left after a crash: every acknowledged commit, and nothing half done."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest

from covenant import CovenantError, Limits, OpenMailbox, Task
from covenant.store.clock import ManualClock
from covenant.store.journal.archive import FILE as ARCHIVE
from covenant.store.journal.line import GENESIS, decode_header, encode
from covenant.store.journal.segment import segment_names
from covenant.store.journal.verify import verify
from tests.journal.support import (
    SMALL,
    FailingFiles,
    Op,
    RecordingFiles,
    busy_run,
    dump,
    image,
    journal_of,
    open_journal,
    talkative_run,
    tidy,
)

UNSYNCED_MAX = 12
CODES = {errno.EIO: "store_unavailable", errno.ENOSPC: "store_full"}


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder for many short-lived images, in memory where the machine has such a place."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path / "images"
        return
    folder = memory / f"covenant-{tmp_path.parent.name}-{tmp_path.name}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _cuts(segment: bytes, every: int) -> list[int]:
    """Around the end of each line, and at every so many bytes."""
    ends = [end for end, byte in enumerate(segment, 1) if byte == ord("\n")]
    near = {end + by for end in (0, *ends) for by in (-2, -1, 0, 1, 2)}
    return sorted(near.union(range(0, len(segment), every)).intersection(range(len(segment) + 1)))


@pytest.mark.parametrize("every", [pytest.param(29, id="some"), pytest.param(1, id="all", marks=pytest.mark.soak)])
async def test_every_prefix_of_the_last_segment_opens_and_holds_what_was_acknowledged(
    tmp_path: Path, scratch: Path, every: int
) -> None:
    """Cut at any byte: the state is that of the last whole line, field by field."""
    clock = ManualClock()
    states: dict[int, dict[str, bytes]] = {}
    folder = tmp_path / "data"
    async with open_journal(folder, limits=Limits(segment_bytes=3_000), clock=clock) as box:

        async def remember() -> None:
            states[(await journal_of(box).head()).seq] = dump(box)

        await remember()
        await busy_run(box, clock, rounds=3, after=remember)
        files = journal_of(box)._files
        names = segment_names(files)
    last = (folder / names[-1]).read_bytes()
    assert len(last) > 1000
    assert len(names) > 1
    first = int(names[-1].removeprefix("journal-").removesuffix(".jsonl"))
    seqs = sorted(states)
    lines = 0
    cuts = _cuts(last, every)
    for cut in cuts:
        target = scratch / "cut"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in names[:-1]:
            shutil.copy(folder / name, target / name)
        (target / names[-1]).write_bytes(last[:cut])
        async with open_journal(target, clock=ManualClock(0)) as box:
            seq = (await journal_of(box).head()).seq
            whole = last[:cut].count(b"\n")
            assert seq >= first - 1
            assert (seq == first - 1) == (whole <= 1)
            if seq not in states:
                assert any(seq < known for known in seqs)
            elif not journal_of(box).stats.commits:  # else a step that the crash left undone was done now
                assert dump(box) == states[seq]
                lines += 1
    assert lines > len(cuts) // 4


def _subsets(pending: list[int], most: int) -> Iterator[tuple[int, ...]]:
    """All of them; or, of more than this, those that keep or miss no more than one, and some of the others."""
    count = len(pending)
    assert count <= UNSYNCED_MAX
    sizes = range(count + 1) if 2**count <= most else (0, 1, count - 1, count)
    for size in sizes:
        yield from combinations(pending, size)
    if 2**count > most:
        chance = random.Random(count)
        for _ in range(most - 2 * count - 2):
            yield tuple(sorted(chance.sample(pending, chance.randrange(2, count - 1))))


async def test_a_conversation_cut_behind_any_line_is_what_it_was_then(tmp_path: Path, scratch: Path) -> None:
    """Messages, pieces, webhooks and cards come back as they were, field by field."""
    clock = ManualClock()
    states: dict[int, dict[str, bytes]] = {}
    folder = tmp_path / "data"
    async with open_journal(folder, limits=Limits(), clock=clock) as box:

        async def remember() -> None:
            states[(await journal_of(box).head()).seq] = dump(box)

        await talkative_run(box, clock, rounds=8, after=remember)
        (name,) = segment_names(journal_of(box)._files)
    header, *lines = (folder / name).read_bytes().splitlines(keepends=True)
    compared = 0
    for count in range(1, len(lines) + 1):
        target = scratch / "cut"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        (target / name).write_bytes(b"".join([header, *lines[:count], lines[count][:9] if count < len(lines) else b""]))
        async with open_journal(target, limits=SMALL, clock=ManualClock(0)) as box:
            seq = (await journal_of(box).head()).seq
            assert dump(box) == states[seq]
            compared += 1
    assert compared == len(states) > 80


@pytest.mark.parametrize(
    "subsets", [pytest.param(32, id="some"), pytest.param(2**UNSYNCED_MAX, id="all", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize(("run", "size"), [(busy_run, 2_500), (talkative_run, 5_000)], ids=["busy", "talkative"])
async def test_any_unsynced_operation_may_be_missing(
    tmp_path: Path, scratch: Path, run: Callable[..., Awaitable[None]], size: int, subsets: int
) -> None:
    """Around segment change, snapshot and dropped segments: every subset of what was not synced may be lost."""
    limits = Limits(
        segment_bytes=size, snapshot_every_bytes=4_000, finished_tail_max=2, archive_batch=2, retention_ms=2_000
    )
    clock = ManualClock()
    folder = tmp_path / "data"
    files = RecordingFiles(folder)
    states: dict[int, dict[str, bytes]] = {}
    acknowledged: list[int] = []  # for each operation, the last event that had been acknowledged when it was done
    archives: list[dict[str, bytes]] = []
    done = 0

    def on_op() -> None:
        acknowledged.append(done)
        archives.append({path.name: path.read_bytes() for path in folder.glob(ARCHIVE + "*") if "shm" not in path.name})

    files.on_op = on_op
    async with open_journal(folder, limits=limits, clock=clock, files=files) as box:

        async def remember() -> None:
            nonlocal done
            seq = (await journal_of(box).head()).seq
            states[seq] = dump(box)
            done = seq

        await remember()
        await run(box, clock, rounds=3, after=remember)
        clock.advance(5_000)
        await box.compact()
        await remember()
        await box.of("ann@lab").send_task(Task(recipient=box.of("bob@lab").agent, intent_text="after"))
        await remember()
        assert journal_of(box).stats.snapshots > 2
        assert journal_of(box)._files.names("history-", ".jsonl")
    kinds = {op.kind for op in files.ops}
    assert kinds == {"link", "write", "sync", "sync_folder", "rename", "unlink"}
    checked = 0
    for crash in range(1, len(files.ops) + 1):
        checked += await _check_crash(
            files.ops[:crash], acknowledged[crash - 1], archives[crash - 1], states, scratch, limits, subsets
        )
    assert checked > len(files.ops)


async def _check_crash(
    ops: list[Op],
    acknowledged: int,
    archive: dict[str, bytes],
    states: dict[int, dict[str, bytes]],
    scratch: Path,
    limits: Limits,
    subsets: int,
) -> int:
    crash = len(ops)
    durable = {at for at, op in enumerate(ops) if op.durable_at is not None and op.durable_at < crash}
    pending = [at for at, op in enumerate(ops) if at not in durable and op.kind not in ("sync", "sync_folder")]
    checked = 0
    for kept in _subsets(pending, subsets):
        for with_archive in (True, False) if ops[-1].kind in ("link", "rename", "unlink") else (True,):
            target = scratch / "image"
            shutil.rmtree(target, ignore_errors=True)
            image(ops, durable.union(kept), target)
            if with_archive:
                for name, content in archive.items():
                    (target / name).write_bytes(content)
            async with open_journal(target, limits=limits, clock=ManualClock(0)) as box:
                seq = (await journal_of(box).head()).seq
                assert seq >= acknowledged, f"crash at {crash} kept {kept}"
                if seq in states and not journal_of(box).stats.commits:
                    _compare(dump(box), states[seq], f"crash at {crash} kept {kept} archive {with_archive}")
                checked += 1
    return checked


def _compare(found: dict[str, bytes], expected: dict[str, bytes], where: str) -> None:
    """What was compacted away may come back when its archive is lost; nothing else may differ."""
    for key, record in expected.items():
        if b'"digest"' in record and key in found and b'"task"' in found[key]:
            continue
        assert found.get(key) == record, f"{where}: {key}"


@pytest.mark.parametrize(
    ("error", "every"),
    [
        pytest.param(errno.EIO, 1, id="io"),
        pytest.param(errno.ENOSPC, 3, id="full"),
        pytest.param(errno.ENOSPC, 1, id="full-everywhere", marks=pytest.mark.soak),
    ],
)
async def test_any_failing_call_loses_nothing_acknowledged(
    tmp_path: Path, scratch: Path, error: int, every: int
) -> None:
    """Each call to the file system fails once, in turn: the callers hear of it, and the engine comes back."""
    failures: set[str] = set()
    fail_at = 1 - every
    while True:
        fail_at += every
        folder = scratch / f"fail-{fail_at}"
        files = FailingFiles(folder, fail_at, error)
        clock = ManualClock()
        seen: list[str] = []
        try:
            await _run_with_failure(
                folder, files, clock, seen, "store_full" if error == errno.ENOSPC else "store_unavailable"
            )
        except CovenantError as refusal:
            assert files.failed is not None  # it failed while opening: the caller was told
            assert refusal.code == CODES[error]
        async with open_journal(folder, clock=ManualClock(clock.now_ms())) as box:
            for task_id in seen:
                await box.get_task(task_id)
        shutil.rmtree(folder)
        if files.failed is None:
            break
        failures.add(files.failed)
    assert failures >= {"create", "write", "sync", "sync_folder", "rename", "remove"}
    assert fail_at > 50


async def _run_with_failure(folder: Path, files: FailingFiles, clock: ManualClock, seen: list[str], code: str) -> None:
    box = open_journal(folder, limits=SMALL, clock=clock, files=files)
    async with box:
        ann, bob = box.of("ann@lab"), box.of("bob@lab")
        number = 0
        while number < 30:
            number += 1
            try:
                sent = await ann.send_task(Task(recipient=bob.agent, intent_text=f"{number} " + "x" * 300))
                seen.append(sent.task_id)
                delivery = await bob.try_recv_task_for()
                assert delivery is not None
                await tidy(box)  # so that the calls of every run come in the same order
            except CovenantError as refusal:
                assert refusal.code == code
                assert refusal.details["outcome"] in ("unknown", "not_stored")
                await _until_reopened(box, clock)


async def _until_reopened(box: OpenMailbox, clock: ManualClock) -> None:
    engine = journal_of(box)
    for _ in range(5):
        clock.advance(engine.limits.reopen_delay_ms)
        if engine._reopening is not None:
            await engine._reopening
        if engine.is_up:
            return
    raise AssertionError("the engine did not come back")


DAMAGED_HEADERS = [(change, commits) for change in ("another time", "another chain") for commits in (0, 1, 2)]


@pytest.mark.parametrize(("change", "commits"), [*DAMAGED_HEADERS, ("no newline", 1), ("no newline", 2)])
async def test_a_last_segment_whose_header_does_not_follow_is_damage(tmp_path: Path, change: str, commits: int) -> None:
    """A crash leaves a header that is not whole, with nothing behind it; whatever else does not fit is no leftover."""
    folder = tmp_path / "data"
    async with open_journal(folder, limits=Limits(), clock=ManualClock()) as box:
        await box.of("ann@lab").send_task(Task(recipient=box.of("bob@lab").agent, intent_text="before"))
        journal_of(box)._change_segment()
        for _ in range(commits):
            await box.of("ann@lab").send_task(Task(recipient=box.of("bob@lab").agent, intent_text="behind"))
        name = segment_names(journal_of(box)._files)[-1]
    path = folder / name
    header, *lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == commits
    if change == "another time":
        header = header.replace(b'"at":', b'"at":9')
    elif change == "another chain":
        header, _ = encode(decode_header(header, name), GENESIS)
    else:
        header = header.removesuffix(b"\n")
    damaged = b"".join([header, *lines])
    path.write_bytes(damaged)
    with pytest.raises(CovenantError) as refused:
        await open_journal(folder)
    assert refused.value.code == "store_damaged"
    assert (refused.value.details["file"], refused.value.details["line"]) == (name, 1)
    assert path.read_bytes() == damaged
    assert not verify(folder).is_sound
