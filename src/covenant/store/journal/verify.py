"""Does the folder read as it was written?

`verify` walks the whole chain and every snapshot. Any line before the last signed head that was changed, removed,
repeated or moved is found, and with an exported head any before that; behind both, the chain only vouches for itself.
Where segments were dropped, the first one left names the last link before it, and a history stands in for the rest.
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
from covenant.store.journal.line import Line
from covenant.store.journal.segment import Reader, segment_names
from covenant.store.journal.snapshot import HISTORY, PLAIN, dropped_until, read_snapshot, snapshot_names

_TRIES: Final = 10
UNSIGNED_MS_MAX: Final = 10_000  # who signs does so every second
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
    unsigned_after: int | None = None  # the event from which on nobody signed what followed, though somebody should
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
    try:
        dropped = dropped_until(files)
        reader = Reader(files, after=dropped)
        heads = _Heads(reader.position.seq, reader.position.hash)
        if reader.position.seq != dropped:
            first = next(iter(segment_names(files, dropped)), "the end")
            report.damage.append(f"segments before {first} are missing, with no history in their place")
        if head is not None and head.seq == reader.position.seq:
            seen = head.hash == reader.position.hash.decode()
        for line in reader:
            report.commits += 1
            report.events += len(line.events)
            here = reader.position
            heads.note(line.seq - 1, reader.before)
            heads.note(line.last, here.hash)
            heads.look(line, report)
            if not line.events and not line.audit:
                report.damage.append(f"the commit at event {line.seq} says nothing")
            if head is not None and here.seq == head.seq:
                seen = here.hash == head.hash.encode()
        report.unsigned_after = heads.unsigned_after if report.signed_by is not None else None
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

    def __init__(self, anchor: int, link: bytes) -> None:
        self._anchor = anchor  # the last event before the first segment: what was signed before it is covered by that
        self._links: OrderedDict[int, set[bytes]] = OrderedDict({anchor: {link}})
        self._signed_in = anchor  # the event that holds the last signature
        self._unsigned_ms: tuple[int, int] | None = None  # the times of the first and last commit behind it

    @property
    def unsigned_after(self) -> int | None:
        first, last = self._unsigned_ms or (0, 0)
        return self._signed_in if last - first > UNSIGNED_MS_MAX else None

    def note(self, seq: int, link: bytes) -> None:
        self._links.setdefault(seq, set()).add(link)
        if len(self._links) > _LINKS_MAX:
            self._links.popitem(last=False)

    def look(self, line: Line, report: Report) -> None:
        signed = [event for event in line.events if isinstance(event, HeadSigned)]
        for event in signed:
            self._check(event, report)
        if signed:
            self._signed_in, self._unsigned_ms = line.last, None
        else:
            self._unsigned_ms = (self._unsigned_ms[0] if self._unsigned_ms else line.at, line.at)

    def _check(self, event: HeadSigned, report: Report) -> None:
        report.signatures += 1
        report.signed_by = report.signed_by or event.pubkey
        if event.seq >= self._anchor and event.hash.encode() not in self._links.get(event.seq, ()):
            report.damage.append(f"the head that was signed at event {event.seq} is not in this chain")
        elif event.pubkey != report.signed_by:
            report.damage.append(f"the head at event {event.seq} was signed by another key")
        elif not is_signed(event.pubkey, event.signature, head_bytes(event.seq, event.hash)):
            report.damage.append(f"the signature under event {event.seq} is not good")
        else:
            report.signed_until = max(report.signed_until, event.seq)
