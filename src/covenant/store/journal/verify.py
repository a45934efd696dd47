"""Does the folder read as it was written?

`verify` walks the whole chain and every snapshot. Any line before the last signed head that was changed, removed,
repeated or moved is found, and with an exported head any before that; behind both, the chain only vouches for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Final

from msgspec import Struct

from covenant.model.error import StoreError
from covenant.model.event import HeadSigned
from covenant.rules.signature import head_bytes, is_signed
from covenant.store.journal.engine import Head
from covenant.store.journal.files import Files
from covenant.store.journal.segment import Reader, segment_names
from covenant.store.journal.snapshot import HISTORY, PLAIN, dropped_until, read_snapshot, snapshot_names

_TRIES: Final = 10
_LINKS_MAX: Final = 1_000_000


class Report(Struct):
    """What was found. `torn_bytes` is an unfinished write at the very end: the next start cuts it off."""

    segments: int
    commits: int = 0
    events: int = 0
    head: Head | None = None
    signatures: int = 0
    signed_until: int = 0  # the last event before a signed head
    signed_by: str | None = None
    torn_bytes: int = 0
    damage: list[str] = []

    @property
    def is_sound(self) -> bool:
        return not self.damage


def verify(folder: str | Path, head: Head | None = None, realm: str | None = None) -> Report:
    """Read everything; nothing is changed, and nobody need stop for it. `realm` is the key that must have signed the
    heads; without it, whichever key signed the first must have signed all."""
    files = Files(folder)
    if not files.folder.is_dir():
        return Report(0, damage=[f"there is no folder {folder}"])
    for _ in range(_TRIES):
        try:
            before = _size(files)
            report = _verified(files, head, realm)
            if report.is_sound or _size(files) == before:
                return report
        except FileNotFoundError:
            pass
        # The store is in use: a file was replaced, or a line was only half there. Look again.
    return Report(0, damage=["files go away while they are read"])


def _size(files: Files) -> int:
    return sum(files.size(name) for name in segment_names(files))


def _verified(files: Files, head: Head | None, realm: str | None) -> Report:
    report = Report(len(segment_names(files)), signed_by=realm)
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
    heads = _Heads()
    try:
        reader = Reader(files, after=dropped_until(files))
        if head is not None and head.seq == reader.position.seq:
            seen = head.hash == reader.position.hash.decode()
        for line in reader:
            report.commits += 1
            report.events += len(line.events)
            here = reader.position
            heads.note(line.seq - 1, reader.before)
            heads.note(line.last, here.hash)
            for event in line.events:
                if isinstance(event, HeadSigned):
                    heads.check(event, report)
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


class _Heads:
    """The links of late, to compare signed heads with. Between two commits there may be two: a segment's header has one
    of its own."""

    def __init__(self) -> None:
        self._links: OrderedDict[int, set[bytes]] = OrderedDict()

    def note(self, seq: int, link: bytes) -> None:
        self._links.setdefault(seq, set()).add(link)
        if len(self._links) > _LINKS_MAX:
            self._links.popitem(last=False)

    def check(self, event: HeadSigned, report: Report) -> None:
        report.signatures += 1
        report.signed_by = report.signed_by or event.pubkey
        known = self._links.get(event.seq)
        if known is None or event.hash.encode() not in known:
            report.damage.append(f"the head that was signed at event {event.seq} is not in this chain")
        elif event.pubkey != report.signed_by:
            report.damage.append(f"the head at event {event.seq} was signed by another key")
        elif not is_signed(event.pubkey, event.signature, head_bytes(event.seq, event.hash)):
            report.damage.append(f"the signature under event {event.seq} is not good")
        else:
            report.signed_until = event.seq
