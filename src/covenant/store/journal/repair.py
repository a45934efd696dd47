"""Repair: a journal that does not read to its end is cut behind its last sound line.

Nothing is deleted. What stands behind the cut goes into a folder `damaged-<n>` of the store, and with it the archive
and the plain snapshots, which may know of it and are made anew by the next start. A history stays: it holds what
dropped segments told. Each step leaves the same cut to be found or no damage at all, so that a repair which was killed
is finished by the next one.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from covenant.model.error import RepairRefused, StoreDamaged, StoreFull, StoreUnavailable
from covenant.model.record import LATE_PREFIX, PART_PREFIX
from covenant.store.journal.damage import Damage, Survey, survey
from covenant.store.journal.engine import LOCK
from covenant.store.journal.files import Files, FilesOf
from covenant.store.journal.line import split_lines
from covenant.store.journal.segment import segment_names

FOLDER: Final = "damaged-"
REPORT: Final = "repair.json"
TASKS_MAX: Final = 100
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_TASK: Final = re.compile(
    rf"(?:{PART_PREFIX}|{LATE_PREFIX})?([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})(?::|$)"
)


class RepairReport(Struct):
    """What is cut off, as far as it can be read, and where it goes. It went there only if it is `done`."""

    damage: Damage | None
    lines: int = 0
    unreadable: int = 0  # of these lines
    events: int = 0
    task_count: int = 0
    tasks: list[str] = []  # the first `TASKS_MAX` of them
    files: list[str] = []
    moved_to: str | None = None
    done: bool = False


def inspect(folder: str | Path) -> Damage | None:
    """What is wrong with the journal, if anything is. Changes nothing, and nobody need stop for it."""
    with _told_as_unavailable():
        return survey(_existing(Files(folder))).damage


def repair(folder: str | Path, *, dry_run: bool, force: bool = False, files: FilesOf = Files) -> RepairReport:
    """Cut the journal behind its last sound line. One that still starts from a snapshot is cut only by `force`, because
    what would be lost is in use."""
    here = _existing(files(Path(folder)))
    with _told_as_unavailable():
        if dry_run:
            return _report(here, survey(here), force)
        lock = here.lock(LOCK)
        try:
            return _repair(here, force, files)
        finally:
            lock.release()


@contextmanager
def _told_as_unavailable() -> Iterator[None]:
    try:
        yield
    except OSError as failed:
        kind = StoreFull if failed.errno in _NO_ROOM else StoreUnavailable
        raise kind(f"the folder cannot be read or written ({failed.strerror})", outcome="unknown") from failed


def _existing(files: Files) -> Files:
    """Of somebody else's folder nothing is said, and nothing is left in it."""
    if not segment_names(files) and not files.exists(LOCK):
        raise RepairRefused(f"there is no journal in {files.folder}", folder=str(files.folder))
    return files


# --- what would be lost ------------------------------------------------------------------------------------


def _report(files: Files, seen: Survey, force: bool) -> RepairReport:
    damage = seen.damage
    if damage is None:
        return RepairReport(None)
    if damage.refusal is not None:
        why = f"{damage.refusal}; no cut makes this journal whole: restore a backup"
        raise RepairRefused(why, file=damage.file, line=damage.line)
    if seen.cuts and damage.starts and not force:
        why = (
            f"{damage.message}, but a mailbox still opens from a later snapshot, and a cut would take what is in use; "
            "retention will drop the damaged segment, or force the cut"
        )
        raise RepairRefused(why, file=damage.file, line=damage.line)
    report = RepairReport(damage, files=[*seen.derived, *seen.trims, *seen.behind])
    report.moved_to = f"{FOLDER}{_last_number(files) + 1}"
    tasks: dict[str, None] = {}
    for raw in _cut_off(files, seen):
        _count(raw, report, tasks)
    report.task_count = len(tasks)
    report.tasks = list(tasks)[:TASKS_MAX]
    return report


def _cut_off(files: Files, seen: Survey) -> Iterator[bytes]:
    if seen.cuts and seen.end.file is not None:
        yield from (raw for raw, _ in split_lines(files.read(seen.end.file, seen.end.offset)))
    for name in seen.behind:
        yield from (raw for raw, _ in split_lines(files.read(name)))


def _count(raw: bytes, report: RepairReport, tasks: dict[str, None]) -> None:
    try:
        line = msgspec.json.decode(raw, type=dict[str, object])
        if line.get("covenant") == "journal":
            return
        keys = [event["key"] for event in msgspec.convert(line["events"], list[dict[str, object]])]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        report.lines += 1
        report.unreadable += 1
        return
    report.lines += 1
    report.events += len(keys)
    named = (_TASK.match(str(key)) for key in keys)
    tasks.update((found[1], None) for found in named if found is not None)


# --- the cut -----------------------------------------------------------------------------------------------


def _repair(here: Files, force: bool, files: FilesOf) -> RepairReport:
    seen = survey(here)
    report = _report(here, seen, force)
    report = _unfinished(here, seen) or report
    if report.moved_to is None:
        return report
    aside = files(here.folder / report.moved_to)
    aside.make_folder()
    _note(aside, report)
    here.sync_folder()
    for name in seen.derived:
        _move(here, name, aside)
    for name, size in seen.trims.items():
        _keep(here, name, aside)
        here.truncate(name, size)
    for name in seen.behind:
        _move(here, name, aside)
    left = survey(here).damage
    if left is not None:
        raise StoreDamaged(left.message, file=left.file, line=left.line)
    report.done = True
    _note(aside, report)
    return report


def _unfinished(files: Files, seen: Survey) -> RepairReport | None:
    """The report of a repair that was killed, if it made the cut that is to be made, or all of it was done."""
    number = _last_number(files)
    try:
        report = msgspec.json.decode(b"".join(files.read(f"{FOLDER}{number}/{REPORT}")), type=RepairReport)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    is_it = seen.damage is None or (report.damage is not None and report.damage.head == seen.damage.head)
    return report if is_it and not report.done else None


def _last_number(files: Files) -> int:
    numbers = [name.removeprefix(FOLDER) for name in files.names(FOLDER, "") if files.exists(f"{name}/{REPORT}")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _note(aside: Files, report: RepairReport) -> None:
    making = f"{REPORT}.making"
    aside.remove(making)
    file = aside.create(making)
    try:
        file.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        file.sync()
    finally:
        file.close()
    aside.rename(making, REPORT)
    aside.sync_folder()


def _move(here: Files, name: str, aside: Files) -> None:
    """Durably, and one at a time: the segments that are left must show that they are not the chain."""
    here.rename(name, f"{aside.folder.name}/{_free_name(aside, name)}")
    aside.sync_folder()
    here.sync_folder()


def _keep(here: Files, name: str, aside: Files) -> None:
    """A copy of what is about to be cut."""
    if aside.exists(name) and _content(aside, name) == _content(here, name):
        return
    making = f"{name}.making"
    aside.remove(making)
    here.copy_to(name, aside, making)
    aside.rename(making, _free_name(aside, name))
    aside.sync_folder()


def _content(files: Files, name: str) -> bytes:
    return b"".join(files.read(name))


def _free_name(aside: Files, name: str) -> str:
    """A start between two tries may have made some files anew."""
    names = chain([name], (f"{name}.{number}" for number in count(2)))
    return next(free for free in names if not aside.exists(free))
