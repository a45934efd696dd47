"""Moving in: a journal copied into an empty store on PostgreSQL.

All of it is one transaction, so the target is empty or whole at any time, whoever is killed on the way; and as long as
it lasts, nobody else opens the target. The log becomes a lane of its own with the bytes that the journal has, so its
chain and the signatures in it stay what they were; events keep their numbers, and new ones begin above them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import asyncpg
from msgspec import Struct

from covenant.exchange.realm import Realm
from covenant.model.error import CopyFailed, StoreUnavailable
from covenant.model.peer import Peer, Role
from covenant.model.record import Key, Record, SignedHead, TaskRecord, Tombstone
from covenant.store.clock import RandomIds
from covenant.store.directory import TRUSTED
from covenant.store.journal.contents import Contents, Link
from covenant.store.journal.engine import Head
from covenant.store.journal.line import GENESIS
from covenant.store.journal.snapshot import saved
from covenant.store.postgres.connection import LOST, Where, borrowed, told
from covenant.store.postgres.line import marks_of
from covenant.store.postgres.numbers import BLOCK
from covenant.store.postgres.rows import KINDS, decoded, encoded, note_of, places_of, task_row
from covenant.store.postgres.schema import migrate
from covenant.store.postgres.verify import Verifier
from covenant.store.process import label_of_process

log = logging.getLogger("covenant.store")

BATCH_ROWS: Final = 1000
BATCH_BYTES: Final = 4 << 20
_PATIENT: Final = {"statement_timeout": "0", "idle_in_transaction_session_timeout": "0"}
_IS_USED: Final = """
    select exists (select from record) or exists (select from log) or exists (
        select from daemon where ended is null and seen > clock_timestamp() - interval '15 seconds')
"""
_ENDED: Final = """
    insert into daemon (id, pubkey, label, started_ms, ended, proof)
    values ($1, $2, $3, (extract(epoch from clock_timestamp()) * 1000)::bigint, clock_timestamp(), 'said')
"""


class Tallied(Struct):
    """What one side holds: how many records of each kind, and one digest over all keys and bodies, in any order."""

    records: dict[str, int] = {}
    digest: str = "0" * 64

    def add(self, kind: str, key: str, body: bytes) -> None:
        self.records[kind] = self.records.get(kind, 0) + 1
        one = sha256(b"%b\0%b\0%b" % (kind.encode(), key.encode(), body)).digest()
        self.digest = f"{(int(self.digest, 16) + int.from_bytes(one)) % 2**256:064x}"


class CopyReport(Struct):
    """Both sides, counted apart, and the end of the chain in both."""

    source: Tallied
    target: Tallied
    commits: int
    events: int
    source_head: Head
    target_head: Head | None
    lane: int

    @property
    def is_whole(self) -> bool:
        return self.source == self.target and self.source_head == self.target_head


async def copy(folder: str | Path, url: str) -> CopyReport:
    """Everything in the journal, or nothing."""
    where = Where.of(url)
    with Contents(folder) as source:
        async with borrowed(where, **_PATIENT) as connection:
            await migrate(connection, where.schema)
            report = await _copied(connection, source, str(folder))
            await _look_over(connection)
            return report


async def _copied(connection: asyncpg.Connection[Any], source: Contents, folder: str) -> CopyReport:
    transaction = connection.transaction()
    await transaction.start()
    try:
        report = await _Copy(connection, source, folder).run()
    except BaseException:
        if not connection.is_closed():
            await transaction.rollback()
        raise
    try:
        await transaction.commit()
    except LOST as failed:
        raise told(failed, "unknown") from failed
    return report


async def _look_over(connection: asyncpg.Connection[Any]) -> None:
    """So that the first plans are good. The copy is made, whatever comes of it: the database does the same in time."""
    try:
        await connection.execute("analyze record, place, task, log")
    except (*LOST, asyncpg.PostgresError) as failed:
        log.warning("the tables were not looked over after the copy: %s", failed)


class _Copy:
    def __init__(self, connection: asyncpg.Connection[Any], source: Contents, folder: str) -> None:
        self._connection = connection
        self._source = source
        self._label = f"file:{folder}"
        self._tallied = Tallied()
        self._trust = 0
        self._signed = 0
        self._key: str | None = None  # by which the journal was signed, and the grants in it

    async def run(self) -> CopyReport:
        await self._begin()
        for batch in _batches(self._source.records(), lambda item: 500):
            await self._put_records(batch)
        lane = await self._put_log()
        await self._connection.execute("update meta set trust = $1", self._trust)
        block = max(1, self._source.head.seq // BLOCK) * BLOCK
        await self._connection.execute("select setval('block', $1)", block)
        report = await self._compared(lane)
        if not report.is_whole:
            raise CopyFailed("what arrived is not what was sent; nothing was kept", **_both(report))
        return report

    async def _begin(self) -> None:
        try:
            await self._connection.execute("lock table meta in access exclusive mode")
        except asyncpg.LockNotAvailableError as locked:
            raise StoreUnavailable(
                "somebody else is at the target: a daemon, or a copy", outcome="not_stored"
            ) from locked
        if await self._connection.fetchval(_IS_USED):
            raise CopyFailed("the target is in use, or not empty: a copy goes into a store of its own")

    # --- records ------------------------------------------------------------------------------------------

    async def _put_records(self, batch: list[tuple[Key, Record | Tombstone]]) -> None:
        rows, places, tasks = [], [], []
        for key, record in batch:
            body = encoded(record)
            self._tallied.add(_kind(key, record), key, body)
            self._note(record)
            rows.append((key, KINDS[type(record)], record.order, body))
            places += [(*place, key, note_of(place, record)) for place in dict.fromkeys(places_of(key, record))]
            if type(record) is TaskRecord:
                tasks.append(task_row(key, record))
        for table, found in (("record", rows), ("place", places), ("task", tasks)):
            await self._connection.copy_records_to_table(table, records=found)

    def _note(self, record: Record | Tombstone) -> None:
        if isinstance(record, TRUSTED):
            self._trust = max(self._trust, record.order)
        if isinstance(record, SignedHead):
            self._signed, self._key = record.seq, self._key or record.pubkey
        elif isinstance(record, Peer) and record.role is Role.OPERATOR:
            self._key = record.agent.pubkey

    # --- the log ------------------------------------------------------------------------------------------

    async def _put_log(self) -> int:
        """A lane of a daemon that has ended: whoever wrote the journal."""
        ids, head = RandomIds(), self._source.head
        writer = ids.lease()
        await self._connection.execute(_ENDED, writer, self._key, self._label)
        lane: int = await self._connection.fetchval(
            "insert into lane (daemon, seq, hash, signed, closed) values ($1, $2, $3, $4, true) returning id",
            writer,
            head.seq,
            head.hash,
            self._signed,
        )
        await self._put_beginning(lane, ids.lease())
        for batch in _batches(self._source.links(), lambda link: len(link.raw)):
            for is_seam, links in groupby(batch, lambda link: link.line is None):
                if is_seam:
                    seams = [(lane, link.seq, link.raw) for link in links]
                    await self._connection.copy_records_to_table("seam", records=seams)
                else:
                    rows = [_log_row(lane, link) for link in links]
                    await self._connection.copy_records_to_table("log", records=rows)
        return lane

    async def _put_beginning(self, lane: int, me: str) -> None:
        """Where the journal has dropped its first segments, who copies it vouches for where it began, with a key for
        this once."""
        beginning = self._source.beginning
        if beginning.hash == GENESIS.decode():
            return
        realm = Realm.throwaway()
        await self._connection.execute(_ENDED, me, realm.pubkey, f"copy {label_of_process()}")
        await self._connection.execute(
            "insert into anchor values ($1, $2, $3, $4, $5)",
            lane,
            beginning.seq,
            beginning.hash,
            realm.pubkey,
            realm.sign_head(beginning.seq, beginning.hash),
        )

    # --- both sides ---------------------------------------------------------------------------------------

    async def _compared(self, lane: int) -> CopyReport:
        """The target is read back, every byte of it."""
        arrived = Tallied()
        async for row in self._connection.cursor("select key, kind, body from record", prefetch=500):
            record = decoded(row["kind"], row["body"])
            arrived.add(_kind(row["key"], record), row["key"], encoded(record))
        found = await Verifier(self._connection).report()
        if not found.is_sound:
            raise CopyFailed(f"the log of the journal is not sound: {found.damage[0]}", damage=found.damage)
        ends = {one.lane: one.head for one in found.lanes}
        return CopyReport(self._tallied, arrived, found.commits, found.events, self._source.head, ends.get(lane), lane)


def _kind(key: Key, record: Record | Tombstone) -> str:
    return str(saved(key, record).__struct_config__.tag)


def _log_row(lane: int, link: Link) -> tuple[Any, ...]:
    line = link.line
    assert line is not None
    return line.seq, line.last, lane, line.at, marks_of([line]), link.raw


def _batches(items: Iterable[Any], size: Any) -> Iterator[list[Any]]:
    """So many, or so large: never more at once than memory should hold."""
    batch: list[Any] = []
    gathered = 0
    for item in items:
        batch.append(item)
        gathered += size(item)
        if len(batch) >= BATCH_ROWS or gathered >= BATCH_BYTES:
            yield batch
            batch, gathered = [], 0
    if batch:
        yield batch


def _both(report: CopyReport) -> dict[str, Any]:
    return {"source": report.source.records, "target": report.target.records}
