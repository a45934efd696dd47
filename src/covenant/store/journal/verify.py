"""Does the folder read as it was written?

`verify` walks the whole chain and every snapshot. With an exported head, any line before it that was changed, removed,
repeated or moved is found; without one, the end of the chain can only vouch for itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from msgspec import Struct

from covenant.model.error import StoreError
from covenant.store.journal.engine import Head
from covenant.store.journal.files import Files
from covenant.store.journal.segment import Reader, segment_names
from covenant.store.journal.snapshot import HISTORY, PLAIN, dropped_until, read_snapshot, snapshot_names

_TRIES: Final = 10


class Report(Struct):
    """What was found. `torn_bytes` is an unfinished write at the very end: the next start cuts it off."""

    segments: int
    commits: int = 0
    events: int = 0
    head: Head | None = None
    torn_bytes: int = 0
    damage: list[str] = []

    @property
    def is_sound(self) -> bool:
        return not self.damage


def verify(folder: str | Path, head: Head | None = None) -> Report:
    """Read everything; nothing is changed, and nobody need stop for it."""
    files = Files(folder)
    if not files.folder.is_dir():
        return Report(0, damage=[f"there is no folder {folder}"])
    for _ in range(_TRIES):
        try:
            return _verified(files, head)
        except FileNotFoundError:
            continue  # housekeeping has replaced a file meanwhile: look again
    return Report(0, damage=["files go away while they are read"])


def _verified(files: Files, head: Head | None) -> Report:
    report = Report(len(segment_names(files)))
    _walk(files, report, head)
    for prefix in (PLAIN, HISTORY):
        for name in snapshot_names(files, prefix):
            try:
                read_snapshot(files, name)
            except StoreError as damaged:
                report.damage.append(damaged.message)
    return report


def _walk(files: Files, report: Report, head: Head | None) -> None:
    seen = head is None or head.seq == 0
    try:
        reader = Reader(files, after=dropped_until(files))
        if head is not None and head.seq == reader.position.seq:
            seen = head.hash == reader.position.hash.decode()
        for line in reader:
            report.commits += 1
            report.events += len(line.events)
            here = reader.position
            if head is not None and here.seq == head.seq:
                seen = here.hash == head.hash.encode()
        # A head may have been taken right behind a segment's header, whose hash no commit carries.
        report.head = Head(reader.position.seq, reader.position.hash.decode())
        seen = seen or report.head == head
        report.torn_bytes = reader.torn_bytes
        if reader.void_bytes:
            report.damage.append(f"{reader.void_bytes} bytes stand behind the end of their segments")
    except StoreError as damaged:
        report.damage.append(damaged.message)
    if not seen and head is not None:
        report.damage.append(f"the head at event {head.seq} is not in this chain")
