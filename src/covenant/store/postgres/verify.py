"""Does the log read as it was written?

`verify` reads it once, from one snapshot, in pages. Each lane is a chain of its own: every line names the one before
it, every head that was signed must stand in its lane, and so must every head of another lane that a signature names. So
any line before the last signed head that was changed, removed or moved is found, and so is a lane whose end was cut
off, as far as another lane had seen it. Where the beginning was pruned, a signed anchor says what it was.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import asyncpg
from msgspec import Struct

from covenant.model.error import StoreDamaged
from covenant.model.event import HeadSigned
from covenant.rules.signature import head_bytes, is_signed
from covenant.store.journal.engine import Head
from covenant.store.journal.line import GENESIS, Line, chained, decode_line
from covenant.store.journal.verify import UNSIGNED_MS_MAX
from covenant.store.postgres.line import mark_in, marks_of
from covenant.store.postgres.schema import check_current

PAGE_ROWS: Final = 500
PAGE_BYTES: Final = 8 << 20
DAMAGE_MAX: Final = 100  # so many are told; the rest is counted

_LANES: Final = """
    select l.id, l.daemon, l.seq, l.hash, d.pubkey, a.seq as anchor, a.hash as anchor_hash,
           a.pubkey as anchor_key, a.signature as anchor_signature
    from lane l left join daemon d on d.id = l.daemon left join anchor a on a.lane = l.id order by l.id
"""
_KEYS: Final = "select distinct pubkey from daemon where pubkey is not null"
_SEAMS: Final = "select lane, seq, line from seam order by lane, seq"
_PAGE: Final = """
    select seq, last, lane, at, marks, lines from (
        select l.*, sum(octet_length(lines)) over (order by seq) - octet_length(lines) as before
        from (select * from log where seq > $1 order by seq limit $2) l
    ) p where before < $3 order by seq
"""
_LINKS: Final = """
    select w.lane, w.last, l.lines, s.line as seam
    from unnest($1::integer[], $2::bigint[]) w(lane, last)
    left join lateral (
        select * from (select lane, last, lines from log where seq <= w.last order by seq desc limit 1) n
        where n.lane = w.lane and n.last = w.last
    ) l on true
    left join seam s on s.lane = w.lane and s.seq = w.last + 1
"""


class LaneReport(Struct):
    """One chain. `signed_until` is the last event before a signed head; `pruned_until` the last that is gone."""

    lane: int
    daemon: str
    commits: int = 0
    events: int = 0
    head: Head | None = None
    signatures: int = 0
    signed_until: int = 0
    signed_by: str | None = None
    unsigned_after: int | None = None  # the event from which on nobody signed what followed, though somebody should
    pruned_until: int = 0


class StoreReport(Struct):
    """What was found; lanes in which nothing ever happened are left out."""

    lanes: list[LaneReport]
    commits: int = 0
    events: int = 0
    signatures: int = 0
    anchors: int = 0  # heads of other lanes that were found where they should be
    damage: list[str] = []
    damage_more: int = 0  # beyond what is told

    @property
    def is_sound(self) -> bool:
        return not self.damage


class _Lane:
    """A chain on the way through it."""

    def __init__(self, row: Any) -> None:
        self.id: int = row["id"]
        self.row = row
        self.key: str | None = row["pubkey"]
        self.anchor: int = row["anchor"] or 0
        self.seq = self.anchor
        self.hash: bytes = GENESIS if row["anchor"] is None else row["anchor_hash"].encode()
        self.seams: dict[int, bytes] = {}
        self.signed_in = self.anchor  # the event that holds the last signature
        self.unsigned_ms: tuple[int, int] | None = None  # the times of the first and last commit behind it
        self.report = LaneReport(self.id, row["daemon"], pruned_until=self.anchor)


async def verify(connection: asyncpg.Connection[Any], schema: str, realm: Collection[str] = ()) -> StoreReport:
    """Read everything; nothing is changed, and nobody need stop for it. `realm` are the keys that may have signed;
    without them, every daemon's own."""
    await check_current(connection, schema)
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        return await Verifier(connection, realm).report()


class Verifier:
    def __init__(self, connection: asyncpg.Connection[Any], realm: Collection[str] = ()) -> None:
        self._connection = connection
        self._realm = realm
        self._lanes: dict[int, _Lane] = {}
        self._keys: set[str] = set()
        self._report = StoreReport([])
        self._links: dict[tuple[int, int, bytes], str] = {}  # a head that must be there, and what to say if it is not

    async def report(self) -> StoreReport:
        for row in await self._connection.fetch(_LANES):
            self._lanes[row["id"]] = _Lane(row)
        self._keys = {row["pubkey"] for row in await self._connection.fetch(_KEYS)}
        for row in await self._connection.fetch(_SEAMS):
            lane = self._lanes[row["lane"]]
            if row["seq"] > lane.anchor:
                lane.seams[row["seq"]] = bytes(row["line"])
        for lane in self._lanes.values():
            self._begin(lane)
        after = -1
        while page := await self._connection.fetch(_PAGE, after, PAGE_ROWS, PAGE_BYTES):
            for row in page:
                self._row(row)
            await self._check_links()
            after = page[-1]["seq"]
        for lane in self._lanes.values():
            self._end(lane)
        return self._report

    def _damaged(self, what: str) -> None:
        if len(self._report.damage) < DAMAGE_MAX:
            self._report.damage.append(what)
        else:
            self._report.damage_more += 1

    # --- one lane -----------------------------------------------------------------------------------------

    def _begin(self, lane: _Lane) -> None:
        """A beginning that was pruned is vouched for by one of the daemons, where the lane's own has a key at all."""
        row = lane.row
        if row["anchor"] is None or (lane.key is None and not row["anchor_signature"]):
            return
        signed = head_bytes(row["anchor"], row["anchor_hash"])
        is_good = row["anchor_key"] in self._keys and is_signed(row["anchor_key"], row["anchor_signature"], signed)
        if not is_good or (self._realm and row["anchor_key"] not in self._realm):
            self._damaged(f"lane {lane.id}: that it was pruned up to event {lane.anchor} is not signed by a daemon")

    def _row(self, row: Any) -> None:
        lane = self._lanes.get(row["lane"])
        if lane is None:
            self._damaged(f"lane {row['lane']}: it is not there, but its commits at event {row['seq']} are")
            return
        lines: list[Line] = []
        for raw in bytes(row["lines"]).rstrip(b"\n").split(b"\n"):
            line = self._line(lane, raw, row["seq"])
            if line is not None:
                lines.append(line)
        if not lines:
            return
        first, last = lines[0], lines[-1]
        told = (first.seq, last.last, last.at, marks_of(lines))
        if told != (row["seq"], row["last"], row["at"], row["marks"]):
            self._damaged(f"lane {lane.id}: the row at event {row['seq']} says other things than its commits")

    def _line(self, lane: _Lane, raw: bytes, at: int) -> Line | None:
        try:
            line = decode_line(raw, f"lane {lane.id}", at)
        except StoreDamaged:
            self._damaged(f"lane {lane.id}: what stands at event {at} is not a commit")
            lane.hash = mark_in(raw)
            return None
        seam = lane.seams.pop(line.seq, None)
        if seam is not None:
            self._link(lane, seam.rstrip(b"\n"), line.seq)
        self._link(lane, raw, line.seq)
        if line.seq <= lane.seq:
            self._damaged(f"lane {lane.id}: event {line.seq} stands behind event {lane.seq}")
        lane.seq = line.last
        lane.report.commits += 1
        lane.report.events += len(line.events)
        self._look_for_heads(lane, line)
        return line

    def _link(self, lane: _Lane, raw: bytes, seq: int) -> None:
        mark = chained(raw, lane.hash)
        if mark is None:
            self._damaged(f"lane {lane.id}: at event {seq} something was changed, or what stood before it is gone")
            mark = mark_in(raw)  # so that what follows is measured by what stands here
        lane.hash = mark

    def _look_for_heads(self, lane: _Lane, line: Line) -> None:
        signed = [event for event in line.events if isinstance(event, HeadSigned)]
        for event in signed:
            self._check_head(lane, event, line.seq)
        if signed:
            lane.signed_in, lane.unsigned_ms = line.last, None
        else:
            lane.unsigned_ms = (lane.unsigned_ms[0] if lane.unsigned_ms else line.at, line.at)

    def _check_head(self, lane: _Lane, event: HeadSigned, seq: int) -> None:
        report = lane.report
        report.signatures += 1
        report.signed_by = event.pubkey
        if event.pubkey != lane.key or (self._realm and event.pubkey not in self._realm):
            self._damaged(f"lane {lane.id}: the head at event {event.seq} was signed by another key")
        elif not is_signed(event.pubkey, event.signature, head_bytes(event.seq, event.hash)):
            self._damaged(f"lane {lane.id}: the signature under event {event.seq} is not good")
        else:
            report.signed_until = max(report.signed_until, event.seq)
        self._expect(
            lane.id, event.seq, event.hash, f"the head that was signed at event {event.seq} is not in this chain"
        )
        for anchor in event.anchors:
            other, _, rest = anchor.partition(":")
            at, _, mark = rest.partition(":")
            cut = f"lane {lane.id} has seen its head at event {at}, and that is not there: it was cut off or changed"
            self._expect(int(other), int(at), mark, cut)

    def _expect(self, lane_id: int, seq: int, mark: str, otherwise: str) -> None:
        lane = self._lanes.get(lane_id)
        if lane is None:
            self._damaged(f"lane {lane_id}: {otherwise}")
        elif seq > lane.anchor:
            self._links.setdefault((lane_id, seq, mark.encode()), otherwise)
        elif seq == lane.anchor and mark != lane.row["anchor_hash"]:
            self._damaged(f"lane {lane_id}: {otherwise}")

    async def _check_links(self) -> None:
        """The number of an event leads to its row: whether that is of this lane, ends there, and has this hash. Where a
        lane stands at that very head, no look is needed."""
        wanted = []
        for (lane_id, seq, mark), otherwise in self._links.items():
            lane = self._lanes[lane_id]
            if (lane.seq, lane.hash) != (seq, mark):
                wanted.append((lane_id, seq, mark, otherwise))
        self._report.anchors += len(self._links)
        self._links.clear()
        if not wanted:
            return
        asked = list(dict.fromkeys((lane_id, seq) for lane_id, seq, _, _ in wanted))
        rows = await self._connection.fetch(_LINKS, [lane_id for lane_id, _ in asked], [seq for _, seq in asked])
        there = {
            (row["lane"], row["last"]): {mark_in(bytes(row[of] or b"")) for of in ("lines", "seam")} for row in rows
        }
        for lane_id, seq, mark, otherwise in wanted:
            if mark not in there[lane_id, seq]:
                self._damaged(f"lane {lane_id}: {otherwise}")

    def _end(self, lane: _Lane) -> None:
        for seq, seam in sorted(lane.seams.items()):
            if seq == lane.seq + 1:
                self._link(lane, seam.rstrip(b"\n"), seq)
            else:
                self._damaged(f"lane {lane.id}: the commits behind the seam at event {seq} are gone")
        if (lane.row["seq"], lane.row["hash"].encode()) != (lane.seq, lane.hash):
            self._damaged(f"lane {lane.id}: it ends at event {lane.seq}, and should at event {lane.row['seq']}")
        report = lane.report
        first, last = lane.unsigned_ms or (0, 0)
        if lane.key is not None and last - first > UNSIGNED_MS_MAX:
            report.unsigned_after = lane.signed_in
        if lane.seq:
            report.head = Head(lane.seq, lane.hash.decode(errors="replace"))
            self._report.lanes.append(report)
        self._report.commits += report.commits
        self._report.events += report.events
        self._report.signatures += report.signatures
