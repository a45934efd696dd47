"""The archive: records at rest, out of memory and still at hand.

An SQLite file beside the segments. It is derived from them, rebuilt if lost, and never the truth. One thread writes it,
in large statements that hold no Python lock; the event loop reads it, and asks a small filter in memory first, so that
the common question "is this id known?" costs nothing when the answer is no.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import wraps
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from zlib import crc32

import msgspec

from covenant.model.error import StoreUnavailable
from covenant.model.peer import Grant
from covenant.model.record import (
    CHUNK_PREFIX,
    LATE_PREFIX,
    PART_PREFIX,
    SAID_PREFIX,
    Chunk,
    Key,
    Late,
    Part,
    Record,
    Said,
    SendKey,
    Slot,
    TaskRecord,
    Tombstone,
    owner_of,
    piece_ranges,
)
from covenant.model.run import ENTRY_PREFIX, MARK_PREFIX, Entry, Mark, Run, run_key
from covenant.rules.context import Context
from covenant.rules.retention import is_forgotten, is_retained, tombstone_of
from covenant.store.journal.breath import breathe
from covenant.store.journal.snapshot import Saved, saved

FILE: Final = "archive.sqlite3"
VERSION: Final = 5
_FILTER_BITS_PER_KEY: Final = 16
_FILTER_KEYS: Final = 1 << 20  # of the first layer: 2 MiB
_FILTER_GROWTH: Final = 4  # of each further layer
_TWO_BITS: Final = tuple(1 << (n & 63) | 1 << (n >> 6) for n in range(4096))  # of a word, by twelve bits of a hash
_PRUNE_ROWS: Final = 2048
BREATH: Final = 32
_FILTER_BREATH: Final = 512
_N_MAX: Final = 2**62

_SCHEMA: Final = f"""
pragma user_version = {VERSION};
create table meta (name text primary key, value text not null) without rowid;
-- One row a record. n is the number of the event that made it, so rows lie in the order of their making.
create table rest (
    n integer primary key,
    key text not null unique,
    kind text not null,             -- task, part, said, chunk, late, slot, grant, send_key, run, entry, mark, tombstone
    sender integer,                 -- agent.id, for tasks and slots
    recipient integer,
    parent text,
    status integer,                 -- the event of its last status, for tasks of the A2A protocol
    body blob not null              -- JSON, and four bytes of checksum behind it
);
create index rest_sender on rest (sender) where kind = 'task';
create index rest_recipient on rest (recipient) where kind = 'task';
create index rest_parent on rest (parent) where parent is not null;
create index rest_parent_sender on rest (parent, sender) where parent is not null;
create index rest_parent_recipient on rest (parent, recipient) where parent is not null;
create index rest_status on rest (sender, recipient, status) where status is not null;
create index rest_slot on rest (kind) where kind = 'slot';
create index rest_slot_sender on rest (sender) where kind = 'slot';
create index rest_slot_recipient on rest (recipient) where kind = 'slot';
create table agent (id integer primary key, pubkey text not null unique);
-- Leases whose holders may still come and ask: all but those under which a result was posted.
create table lease (lease_id text primary key, task text not null) without rowid;
create index lease_task on lease (task);
"""

_ROW: Final = "(?, ?, ?, ?, ?, ?, ?, ?)"
_PLAIN_ROW: Final = "(?, ?, 'task', ?, ?, null, null, ?)"  # of a task without a parent, and not of the protocol
_ROWS_AT_ONCE: Final = 512
_BODY_BYTES: Final = 1024  # room to begin with

_CHECKSUM_BYTES: Final = 4
_encoder: Final = msgspec.json.Encoder()
_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    "task": msgspec.json.Decoder(TaskRecord),
    "part": msgspec.json.Decoder(Part),
    "late": msgspec.json.Decoder(Late),
    "said": msgspec.json.Decoder(Said),
    "chunk": msgspec.json.Decoder(Chunk),
    "slot": msgspec.json.Decoder(Slot),
    "tombstone": msgspec.json.Decoder(Tombstone),
    "grant": msgspec.json.Decoder(Grant),
    "run": msgspec.json.Decoder(Run),
    "entry": msgspec.json.Decoder(Entry),
    "mark": msgspec.json.Decoder(Mark),
    "send_key": msgspec.json.Decoder(SendKey),
}


class ArchiveFailed(OSError):
    """SQLite could not write or read the file."""

    @classmethod
    def of(cls, failed: sqlite3.Error) -> ArchiveFailed:
        full = getattr(failed, "sqlite_errorcode", None) in _NO_ROOM
        return cls(errno.ENOSPC if full else errno.EIO, f"archive: {failed}")


_NO_ROOM: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)  # the other is for the file beside the log
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_DOES_NOT_READ: Final = (KeyError, UnicodeDecodeError, msgspec.MsgspecError)


def _is_damage(failed: sqlite3.Error) -> bool:
    return getattr(failed, "sqlite_errorcode", 0) & 0xFF in _DAMAGE  # the rest of the code is more of the detail


P = ParamSpec("P")
T = TypeVar("T")


def _speaks_os(
    method: Callable[Concatenate[Archive, P], T],
) -> Callable[Concatenate[Archive, P], T]:
    """What goes wrong in the file is told as any file's trouble is."""

    @wraps(method)
    def call(self: Archive, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except sqlite3.Error as failed:
            told = ArchiveFailed.of(failed)
            if _is_damage(failed):
                self.on_damage(told)
            raise told from failed

    return call


class KeyFilter:
    """Says "certainly not" or "perhaps". A key has four bits, all in one word: a look goes to one place in memory. When
    a layer is full, a larger one begins, and nothing has to be read again."""

    def __init__(self) -> None:
        self._layers: list[tuple[array[int], int]] = []  # words, and the mask of a place among them
        self._room = 0  # for so many keys in the last layer
        self._add_layer(_FILTER_KEYS)

    def _add_layer(self, keys: int) -> None:
        words = keys * _FILTER_BITS_PER_KEY // 64
        self._layers.append((array("Q", bytes(8 * words)), words - 1))
        self._room = keys

    def add(self, *keys: str) -> None:
        """A few at once: all of them go into one layer."""
        if self._room <= 0:
            self._add_layer(_FILTER_KEYS * _FILTER_GROWTH ** len(self._layers))
        self._room -= len(keys)
        (words, mask), two_bits = self._layers[-1], _TWO_BITS
        for key in keys:
            at = hash(key)
            words[at & mask] |= two_bits[at >> 40 & 4095] | two_bits[at >> 52 & 4095]

    def __contains__(self, key: str) -> bool:
        at = hash(key)
        bits = _TWO_BITS[at >> 40 & 4095] | _TWO_BITS[at >> 52 & 4095]
        for words, mask in self._layers:
            if words[at & mask] & bits == bits:
                break
        else:
            return False
        return True


class Archive:
    """Reads are the event loop's, writes one background thread's."""

    @_speaks_os
    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_damage: Callable[[OSError], None] = lambda failed: None  # called from any thread
        self._writer = _connect(path)
        version = self._writer.execute("pragma user_version").fetchone()[0]
        if version == 0:
            self._writer.executescript(_SCHEMA)
        elif version != VERSION:
            self._writer.close()
            raise ArchiveFailed(errno.EIO, f"archive: it has format {version}; this is {VERSION}")
        self._reader = _connect(path)
        self._checkpointer = _connect(path)
        self._agents: dict[str, int] = dict(self._writer.execute("select pubkey, id from agent"))
        self._filter: KeyFilter | None = None  # until it is filled, every key is looked up
        self._filling: KeyFilter | None = None

    # --- identity -----------------------------------------------------------------------------------------

    @property
    @_speaks_os
    def id(self) -> str | None:
        """What a snapshot names to say that it leans on this very archive."""
        row = self._writer.execute("select value from meta where name = 'id'").fetchone()
        return None if row is None else str(row[0])

    @property
    @_speaks_os
    def settled(self) -> int:
        """The newest event at which a snapshot has leaned on it: an older copy of this file does not bear that one."""
        row = self._writer.execute("select cast(value as integer) from meta where name = 'settled'").fetchone()
        return 0 if row is None else int(row[0])

    @_speaks_os
    def set_id(self, value: str) -> None:
        with self._writer:
            self._writer.execute("insert or replace into meta values ('id', ?)", (value,))

    def close(self) -> None:
        for connection in (self._reader, self._checkpointer, self._writer):
            connection.close()

    # --- the writing thread -------------------------------------------------------------------------------

    @_speaks_os
    def store(self, records: Sequence[tuple[Key, Record]], gone: Sequence[Key] = (), breath: int = BREATH) -> None:
        """Take these records in, and drop the keys that are gone. After so many records the event loop gets a turn."""
        agents = self._agents
        plain: list[Any] = []
        others: list[Any] = []
        leases: list[tuple[str, Key]] = []
        with self._writing():
            for start in range(0, len(records), breath):
                breathe()
                for key, record in records[start : start + breath]:
                    if type(record) is not TaskRecord:
                        others += (*self._columns(key, record), _sealed(record))
                        continue
                    leases += _leases_to_know(key, record)
                    sender, recipient = agents.get(record.sender), agents.get(record.recipient)
                    if sender and recipient and not record.protocol and record.task.parent is None:
                        plain += (record.sent_order, key, sender, recipient, _sealed(record))
                    else:
                        others += (*self._columns(key, record), _sealed(record))
            if gone:
                self._writer.executemany("delete from rest where key = ?", [(key,) for key in gone])
                sent_anew = [(key,) for key in gone if ":" not in key]
                self._writer.executemany("delete from lease where task = ?", sent_anew)
            self._insert(_PLAIN_ROW, plain)
            self._insert(_ROW, others)
            self._insert_leases(leases)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """All of it or nothing, and so it is with the agents that are met in it for the first time."""
        known = len(self._agents)
        try:
            with self._writer:
                yield
        except BaseException:
            for pubkey in [*self._agents][known:]:
                del self._agents[pubkey]
            raise

    def _insert(self, row: str, values: list[Any]) -> None:
        """Many rows in one statement, which costs each of them less and holds no Python lock. Their number is a power
        of two: so there are few statements, and SQLite has them ready."""
        width = row.count("?")
        values_max = self._writer.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)  # 999 in an older SQLite
        most = min(_ROWS_AT_ONCE, values_max // width)
        at, end = 0, len(values)
        while at < end:
            count = 1 << min(most, (end - at) // width).bit_length() - 1
            some = values[at : at + count * width]
            self._writer.execute(f"insert or replace into rest values {', '.join([row] * count)}", some)
            at += count * width

    def _insert_leases(self, leases: Sequence[tuple[str, Key]]) -> None:
        if leases:
            self._writer.executemany("insert or replace into lease values (?, ?)", leases)

    @_speaks_os
    def settle(self, seq: int) -> None:
        """Make everything stored so far durable: a snapshot at this event is about to lean on it. What comes after a
        snapshot may be lost in a crash, since the segments behind that snapshot still tell it.

        What is committed lies in SQLite's log or, checkpointed, in the file; syncing the log is enough. The checkpoint
        only keeps the log short: the first pass lets writers go on, the second finds little left to do."""
        with self._checkpointer:
            self._checkpointer.execute(
                "insert into meta values ('settled', ?) "
                "on conflict do update set value = max(cast(value as integer), cast(excluded.value as integer))",
                (seq,),
            )
        wal = self.path.with_name(f"{self.path.name}-wal")
        if wal.exists():
            fd = os.open(wal, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        for mode in ("passive", "truncate"):
            self._checkpointer.execute(f"pragma wal_checkpoint({mode})").fetchall()

    def _columns(self, key: Key, record: Record | Tombstone) -> tuple[Any, ...]:
        """All but the last."""
        if type(record) is TaskRecord:
            sender, recipient = self._agent(record.sender), self._agent(record.recipient)
            status = record.status_order if record.protocol and not record.direct else None
            return record.sent_order, key, "task", sender, recipient, record.task.parent, status
        if type(record) is Slot:
            sender, recipient = self._agent(record.cache_key.sender), self._agent(record.cache_key.recipient)
            return record.order, key, "slot", sender, recipient, None, None
        kind = saved(key, record).__struct_config__.tag
        return record.order, key, kind, None, None, None, None

    def _agent(self, pubkey: str) -> int:
        number = self._agents.get(pubkey)
        if number is None:
            number = len(self._agents) + 1
            self._writer.execute("insert into agent values (?, ?)", (number, pubkey))
            self._agents[pubkey] = number
        return number

    @_speaks_os
    def store_saved(self, items: Iterable[Saved]) -> None:
        """Take in what a history snapshot kept."""
        with self._writing():
            for item in items:
                self._insert(_ROW, [*self._columns(item.key, item.record), _sealed(item.record)])
                if type(item.record) is TaskRecord:
                    self._insert_leases(_leases_to_know(item.key, item.record))

    @_speaks_os
    def bury(self, ctx: Context, in_memory: Set[Key]) -> tuple[int, int]:
        """Turn tasks past retention into tombstones, and drop what is past those, in steps. What the row of a task says
        that is in memory is out of date: it was given back, or its id is used anew."""
        buried = forgotten = after = 0
        gone: set[Key] = set()  # with this pass
        while rows := self._page("kind != 'slot'", after):
            after = rows[-1][0]
            with self._writer:
                for n, key, kind, body in rows:
                    if key in in_memory:
                        continue
                    record = self._read(kind, body)
                    if type(record) is TaskRecord and not is_retained(record, ctx):
                        self._drop_pieces(key, record)
                        record = tombstone_of(record)
                        self._bury(n, key, record)
                        buried += 1
                        if is_forgotten(record, ctx):
                            gone.add(key)
                    if type(record) is Tombstone and is_forgotten(record, ctx):
                        self._writer.execute("delete from rest where n = ?", (n,))
                        forgotten += 1
                    elif type(record) in (Part, Late, Said, Chunk, SendKey, Run, Entry, Mark):
                        owner = owner_of(key, record)
                        if owner not in in_memory and (owner in gone or not self._is_kept(owner, n)):
                            self._writer.execute("delete from rest where n = ?", (n,))
            breathe()
        return buried, forgotten

    def _bury(self, n: int, key: Key, stone: Tombstone) -> None:
        self._writer.execute(
            "update rest set kind = 'tombstone', body = ?, sender = null, recipient = null, parent = null, "
            "status = null where n = ?",
            (_sealed(stone), n),
        )
        self._writer.execute("delete from lease where task = ?", (key,))

    def _drop_pieces(self, task_id: Key, record: TaskRecord) -> None:
        """What belongs to a task goes with it: its tombstone may go in the same pass, and then nothing tells whose they
        were."""
        gathered = {SAID_PREFIX: record.said, CHUNK_PREFIX: record.chunks, PART_PREFIX: record.partials_total}
        of_a_run = (ENTRY_PREFIX, MARK_PREFIX) if record.is_run else ()
        for prefix in (LATE_PREFIX, *of_a_run, *(prefix for prefix, count in gathered.items() if count)):
            first = f"{prefix}{task_id}:"
            self._writer.execute("delete from rest where key >= ? and key < ?", (first, first[:-1] + ";"))
        if record.is_run:
            self._writer.execute("delete from rest where key = ?", (run_key(task_id),))

    def _is_kept(self, task_id: Key, n: int) -> bool:
        """What belongs to a task goes with it, and with the life in which it was made; a task that is still in memory
        has no row here."""
        row = self._writer.execute("select n, kind from rest where key = ?", (task_id,)).fetchone()
        return row is None or (row[1] == "task" and row[0] < n)

    def beyond_segments(self, dropped_until: int) -> Iterator[Saved]:
        """Everything that cannot be told from the segments behind this event alone."""
        after = 0
        while rows := self._page("(n <= ? or kind != 'task')", after, dropped_until):
            after = rows[-1][0]
            for _, key, kind, body in rows:
                yield saved(key, self._read(kind, body))

    @_speaks_os
    def _page(self, where: str, after: int, *values: Any) -> list[Any]:
        """The next rows of a long way through the file."""
        sql = f"select n, key, kind, body from rest where n > ? and {where} order by n limit ?"
        return self._writer.execute(sql, (after, *values, _PRUNE_ROWS)).fetchall()

    def _read(self, kind: str, body: bytes) -> Any:
        """A record as it was stored."""
        try:
            return _DECODERS[kind].decode(opened(body))
        except _DOES_NOT_READ as failed:
            raise self._given_up(ArchiveFailed(errno.EIO, f"archive: {failed}")) from failed

    def _given_up(self, failed: ArchiveFailed) -> StoreUnavailable:
        """A file that does not read is given up: the segments tell what it held."""
        self.on_damage(failed)
        return StoreUnavailable("the archive does not read; it is rebuilt", outcome="unknown")

    # --- the filter ---------------------------------------------------------------------------------------

    @_speaks_os
    def fill_filter(self) -> None:
        """Read all keys; runs in the writing thread, so no key is stored meanwhile."""
        filling = KeyFilter()
        for at, (key,) in enumerate(self._writer.execute("select key from rest")):
            filling.add(key)
            if at % _FILTER_BREATH == 0:
                breathe()
        self._filling = filling

    def use_filled(self) -> None:
        self._filter, self._filling = self._filling, None

    def note(self, keys: Iterable[Key]) -> None:
        """These are here now."""
        if self._filter is not None:
            self._filter.add(*keys)

    @property
    def wants_filter(self) -> bool:
        """There is none yet."""
        return self._filter is None

    # --- the event loop: the base of the state ------------------------------------------------------------

    def get(self, key: Key) -> Record | Tombstone | None:
        if self._filter is not None and key not in self._filter:
            return None
        for kind, body in self._rows("select kind, body from rest where key = ?", (key,)):
            record: Record | Tombstone = self._read(kind, body)
            return record
        return None

    def _rows(self, sql: str, values: tuple[Any, ...]) -> Iterator[Any]:
        try:
            yield from self._reader.execute(sql, values)
        except sqlite3.Error as failed:
            raise self._given_up(ArchiveFailed.of(failed)) from failed

    def _listed(self, agent: str | None, where: str, *values: Any, newest: bool = False) -> Iterator[tuple[Key, Any]]:
        """In the order of their making. What is an agent's lies in two indexes, one for each side that it can be on."""
        select, order = "select n, key, kind, body from rest where", "order by n desc" if newest else "order by n"
        if agent is None:
            rows = self._rows(f"{select} {where} {order}", values)
        else:
            own = (self._agents.get(agent, 0), *values)
            sent = self._rows(f"{select} sender = ? and {where} {order}", own)
            received = self._rows(f"{select} recipient = ? and sender != recipient and {where} {order}", own)
            rows = merge(sent, received, key=itemgetter(0), reverse=newest)
        for _, key, kind, body in rows:
            yield key, self._read(kind, body)

    def recent(self, agent: str | None, before: int | None) -> Iterator[TaskRecord]:
        end = _N_MAX if before is None else before
        return (record for _, record in self._listed(agent, "kind = 'task' and n < ?", end, newest=True))

    def children(self, parent: str, after: int, agent: str | None) -> Iterator[TaskRecord]:
        return (record for _, record in self._listed(agent, "parent = ? and n > ?", parent, after))

    def slots(self, after: int, agent: str | None) -> Iterator[tuple[Key, Slot]]:
        return self._listed(agent, "kind = 'slot' and n > ?", after)

    def dialogs(self, sender: str, recipient: str, before: int) -> Iterator[TaskRecord]:
        sql = "select body from rest where sender = ? and recipient = ? and status < ? order by status desc"
        parties = (self._agents.get(sender, 0), self._agents.get(recipient, 0))
        for (body,) in self._rows(sql, (*parties, before)):
            yield self._read("task", body)

    def moved_dialogs(self, sender: str, recipient: str, since: int, after: int) -> Iterator[TaskRecord]:
        """Few of all have moved since: those are found by their status, and then put in order."""
        sql = (
            "select n from rest indexed by rest_status "
            "where sender = ? and recipient = ? and status > ? and n > ? and n <= ? order by n"
        )
        parties = (self._agents.get(sender, 0), self._agents.get(recipient, 0))
        for (n,) in self._rows(sql, (*parties, since, after, since)):
            for (body,) in self._rows("select body from rest where n = ?", (n,)):
                yield self._read("task", body)

    def dialog_count(self, sender: str, recipient: str) -> int:
        sql = "select count(*) from rest where sender = ? and recipient = ? and status is not null"
        parties = (self._agents.get(sender, 0), self._agents.get(recipient, 0))
        return sum(count for (count,) in self._rows(sql, parties))

    def late(self, task_id: str) -> Iterator[tuple[Key, Late]]:
        first = f"{LATE_PREFIX}{task_id}:"
        rows = self._rows("select key, body from rest where key >= ? and key < ? order by n", (first, first[:-1] + ";"))
        for key, body in rows:
            yield key, self._read("late", body)

    def pieces(self, prefix: Key, numbers: Set[int]) -> Iterator[tuple[int, Record]]:
        """Of the records under a prefix that ends in a colon, those with these numbers."""
        sql = "select key, kind, body from rest where key >= ? and key < ?"
        for key, kind, body in self._rows(sql, (prefix, prefix[:-1] + ";")):
            number = int(key[len(prefix) :])
            if number in numbers:
                yield number, self._read(kind, body)

    def pieces_of(self, task_id: str) -> list[Key]:
        sql = "select key from rest where key >= ? and key < ?"
        return [key for ends in piece_ranges(task_id) for (key,) in self._rows(sql, ends)]

    def task_of_lease(self, lease_id: str) -> Key | None:
        for (task,) in self._rows("select task from lease where lease_id = ?", (lease_id,)):
            return str(task)
        return None


def _sealed(record: Record | Tombstone) -> bytearray:
    """What SQLite takes as it is: bytes go by adapters, which takes longer."""
    body = bytearray(_BODY_BYTES)
    _encoder.encode_into(record, body)
    body += crc32(body).to_bytes(_CHECKSUM_BYTES)
    return body


def opened(sealed: bytes) -> bytes:
    """A flipped bit may leave what still reads: nothing else in the file would show it."""
    body = sealed[:-_CHECKSUM_BYTES]
    if crc32(body).to_bytes(_CHECKSUM_BYTES) != sealed[-_CHECKSUM_BYTES:]:
        raise msgspec.DecodeError("a record is not as it was stored")
    return body


def _leases_to_know(key: Key, record: TaskRecord) -> list[tuple[str, Key]]:
    """Who has posted a result knows of the end, and names the task if it posts it again. Who rejected the task, replied
    to it or ended its run names nothing but its lease."""
    history, result = record.lease_history, record.result
    posted_by = None if result is None or result.message is not None or record.is_run else result.lease_id
    return [] if history == (posted_by,) else [(lease_id, key) for lease_id in history if lease_id != posted_by]


def _connect(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = normal")  # synced by a checkpoint, and by nothing else:
    connection.execute("pragma wal_autocheckpoint = 0")  # see `settle`
    connection.execute("pragma temp_store = memory")
    return connection
