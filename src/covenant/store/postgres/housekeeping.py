"""What is past its time goes, in steps of a bounded size, by one daemon at a time. (Contract 9, 28.)

A task past retention leaves a tombstone, and what belonged to it goes; a tombstone goes when its id need not be
remembered any more. The log goes from its beginning, and leaves behind where each chain went on from. Daemons that are
long gone leave the list, with chains of which nothing is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from covenant.model.push import PUSH_PREFIX
from covenant.model.record import (
    CHUNK_PREFIX,
    LATE_PREFIX,
    PART_PREFIX,
    SAID_PREFIX,
    Key,
    TaskRecord,
    Tombstone,
)
from covenant.model.run import ENTRY_PREFIX, MARK_PREFIX, SIGNAL_PREFIX, STEP_PREFIX, run_key
from covenant.rules.context import Context
from covenant.rules.retention import is_forgotten, is_retained, tombstone_of
from covenant.rules.signature import head_bytes, is_signed
from covenant.store.postgres.connection import LOST, connect, told
from covenant.store.postgres.line import mark_in
from covenant.store.postgres.rows import BURIED, KINDS, SEND_KEYS, Place, decoded, encoded, places_of

if TYPE_CHECKING:
    from covenant.store.postgres.engine import Postgres

STEP: Final = 100
COMMAND_S: Final = 40.0  # longer than the server lets a statement take: then the connection is lost
_LOG_STEP: Final = 1000
_FOREVER: Final = 2**62
_NAMED_MS: Final = 3_600_000  # how long after its end a lane may still be named, whatever the clocks say
_OF_A_RUN: Final = (ENTRY_PREFIX, MARK_PREFIX, STEP_PREFIX, SIGNAL_PREFIX)
_OLDEST: Final = """
    select r.key, r.kind, r.body from place p join record r on r.key = p.key
    where p.shelf = $1 and p.name = '' and p.ord < $2 order by p.ord limit $3 for update of r skip locked
"""
_RESTING: Final = """
    select t.ord, r.key, r.kind, r.body from task t join record r on r.key = t.key
    where t.ord > $1 order by t.ord limit $2
"""
_LOCKED: Final = "select key, kind, body from record where key = any($1) order by key for update skip locked"
_PIECES: Final = """
    select r.key, r.kind, r.body from unnest($1::text[], $2::text[]) u(lo, hi)
    join record r on r.key >= u.lo and r.key < u.hi
    union all
    select r.key, r.kind, r.body from place p join record r on r.key = p.key
    where p.shelf = $3 and p.name = any($4)
"""
_UNPLACE: Final = """
    delete from place p using unnest($1::"char"[], $2::text[], $3::bigint[], $4::text[]) u(shelf, name, ord, key)
    where p.shelf = u.shelf and p.name = u.name and p.ord = u.ord and p.key = u.key
"""
_PRUNE: Final = """
    with oldest as (
        select seq, at from log order by seq limit $2
    ), gone as (
        delete from log where seq in (
            select seq from oldest where seq < coalesce((select min(seq) from oldest where at >= $1), $3)
        ) returning lane, last, lines
    )
    select distinct on (lane) lane, last, lines, (select count(*) from gone) as count from gone
    order by lane, last desc
"""

# A lane is retired when all of it was pruned up to its signed end, and nothing is left in the log that could name it:
# who signs names the lanes that are open.
_RETIRED: Final = """
    select l.id, l.seq, l.hash, d.pubkey is not null as is_signed, a.pubkey, a.signature
    from lane l join daemon d on d.id = l.daemon left join anchor a on a.lane = l.id
    where l.closed and d.ended < to_timestamp($1 / 1000.0) and (l.seq = 0 or (a.seq, a.hash) = (l.seq, l.hash))
      and d.ended < to_timestamp((coalesce((select at from log order by seq limit 1), $2) - $3) / 1000.0)
      and not exists (select from seam s where s.lane = l.id)
      and l.id > $4 order by l.id limit $5
"""
# The last one with its key stays: what that key has signed stays genuine.
_GONE: Final = """
    delete from daemon d where ended < to_timestamp($1 / 1000.0) and not exists (select from lane where daemon = d.id)
      and (pubkey is null or exists (
          select from daemon o where o.pubkey = d.pubkey and (o.started_ms, o.id) > (d.started_ms, d.id)))
"""

Sign = Callable[[int, str], tuple[str, str]]  # a signature under an event and its hash, and whose it is

log = logging.getLogger("covenant.store")


class Housekeeper:
    def __init__(self, engine: Postgres) -> None:
        self._engine = engine
        self._passed = 0  # the tasks up to here were looked at in this round
        self._retired = 0  # the lanes likewise
        self._is_told = False  # what this role may not do
        self.sign: Sign | None = None

    async def tidy(self) -> tuple[int, int]:
        """How many tasks were buried, and how many tombstones forgotten. Who asked for it has moved the horizon before:
        whatever fails here, that is stored."""
        try:
            session = self._engine.member.session
            connection = await connect(self._engine.where, COMMAND_S, application_name=session)
        except (*LOST, asyncpg.PostgresError) as failed:
            raise told(failed, "unknown") from failed
        self._engine.ahead.is_owed = True  # this daemon may have been taken for dead, and somebody gone ahead since
        try:
            buried = forgotten = 0
            self._passed = self._retired = 0
            while (step := await self._step(connection, self._bury)) > 0:
                buried += step
            while (step := await self._step(connection, self._forget)) > 0:
                forgotten += step
            while await self._step(connection, self._prune) == _LOG_STEP:
                pass
            await self._retire_all(connection)
            return buried, forgotten
        except (*LOST, asyncpg.PostgresError) as failed:
            raise told(failed, "unknown") from failed
        finally:
            connection.terminate()

    async def _retire_all(self, connection: asyncpg.Connection[Any]) -> None:
        try:
            while await self._step(connection, self._retire) == STEP:
                pass
        except asyncpg.InsufficientPrivilegeError as refused:
            level = logging.DEBUG if self._is_told else logging.WARNING
            log.log(level, "the rows of daemons that are long gone stay, as this role may not remove them: %s", refused)
            self._is_told = True

    async def _step(self, connection: asyncpg.Connection[Any], work: Callable[..., Any]) -> int:
        """One transaction; nothing if another daemon is at it."""
        engine = self._engine
        ctx = engine.context
        ctx.now, ctx.compaction = engine.now(), engine.trust.compaction
        async with engine.ahead.whole():
            await engine.ahead.mend(connection)
            async with connection.transaction():
                if not await connection.fetchval("select pg_try_advisory_xact_lock($1, 2)", engine.space):
                    return 0
                return int(await work(connection, ctx))

    async def _bury(self, connection: asyncpg.Connection[Any], ctx: Context) -> int:
        """From the oldest on, as far as tasks are that could be past their time."""
        before = ctx.now - ctx.limits.retention_ms
        if ctx.compaction is not None:
            before = max(before, ctx.compaction.resolved_before_ms)
        past: dict[Key, TaskRecord] = {}
        while not past:
            found = await connection.fetch(_RESTING, self._passed, STEP)
            old = _past(found, ctx)  # what is open is passed by without a lock
            past = _past(await connection.fetch(_LOCKED, list(old)), ctx) if old else {}
            if not found or decoded(found[-1]["kind"], found[-1]["body"]).sent_ms > before:
                break
            self._passed = found[-1]["ord"]
        if not past:
            return 0
        places: list[tuple[Place, Key]] = []
        ranges = [prefix for key, record in past.items() for prefix in _prefixes(key, record)]
        pieces = await connection.fetch(
            _PIECES, ranges, [f"{prefix[:-1]};" for prefix in ranges], SEND_KEYS, list(past)
        )
        runs = await connection.fetch(
            "select key, kind, body from record where key = any($1)",
            [run_key(key) for key, record in past.items() if record.is_run],
        )
        for row in (*pieces, *runs):
            places += [(place, row["key"]) for place in places_of(row["key"], decoded(row["kind"], row["body"]))]
        stones = {key: tombstone_of(record) for key, record in past.items()}
        for key, record in past.items():
            places += [(place, key) for place in places_of(key, record)]
        await _unplace(connection, places)
        await connection.execute("delete from record where key = any($1)", [row["key"] for row in (*pieces, *runs)])
        await connection.execute("delete from task where ord = any($1)", [r.sent_order for r in past.values()])
        await connection.execute(
            """update record r set kind = $1, ord = u.ord, body = u.body
               from unnest($2::text[], $3::bigint[], $4::bytea[]) u(key, ord, body) where r.key = u.key""",
            KINDS[Tombstone],
            list(stones),
            [stone.order for stone in stones.values()],
            [encoded(stone) for stone in stones.values()],
        )
        await connection.execute(
            "insert into place select $1, '', u.ord, u.key from unnest($2::bigint[], $3::text[]) u(ord, key)",
            BURIED,
            [stone.resolved_ms for stone in stones.values()],
            list(stones),
        )
        return len(past)

    async def _forget(self, connection: asyncpg.Connection[Any], ctx: Context) -> int:
        found = await connection.fetch(_OLDEST, BURIED, ctx.now - ctx.limits.dedup_ms, STEP)
        stones = {row["key"]: decoded(row["kind"], row["body"]) for row in found}
        gone = [key for key, stone in stones.items() if type(stone) is Tombstone and is_forgotten(stone, ctx)]
        await _unplace(connection, [(place, key) for key in gone for place in places_of(key, stones[key])])
        await connection.execute("delete from record where key = any($1)", gone)
        return len(gone)

    async def _prune(self, connection: asyncpg.Connection[Any], ctx: Context) -> int:
        """From the beginning on, as far as all is past its time: whatever the clocks of its writers said, no chain
        loses anything but its beginning."""
        if self.sign is None and self._engine.keys():
            return 0  # where chains are signed, nothing is dropped by whom nobody could vouch for
        ends = await connection.fetch(_PRUNE, ctx.now - ctx.limits.retention_ms, _LOG_STEP, _FOREVER)
        for row in ends:
            mark = mark_in(row["lines"]).decode()
            signature, pubkey = ("", "") if self.sign is None else self.sign(row["last"], mark)
            await connection.execute(
                """insert into anchor values ($1, $2, $3, $4, $5)
                   on conflict (lane) do update set seq = $2, hash = $3, pubkey = $4, signature = $5""",
                row["lane"],
                row["last"],
                mark,
                pubkey,
                signature,
            )
        return int(ends[0]["count"]) if ends else 0

    async def _retire(self, connection: asyncpg.Connection[Any], ctx: Context) -> int:
        """Daemons that are gone for longer than anything of theirs is kept, and their lanes."""
        before = ctx.now - ctx.limits.retention_ms
        found = await connection.fetch(_RETIRED, before, ctx.now, _NAMED_MS, self._retired, STEP)
        lanes = [row["id"] for row in found if self._is_vouched_for(row)]
        await connection.execute("delete from anchor where lane = any($1)", lanes)
        await connection.execute("delete from lane where id = any($1)", lanes)
        await connection.execute(_GONE, before)
        self._retired = found[-1]["id"] if found else 0
        return len(found)

    def _is_vouched_for(self, lane: Any) -> bool:
        """What somebody has cut off by hand stays, for `audit verify` to tell."""
        if not lane["seq"] or not (lane["is_signed"] or lane["signature"]):
            return True
        if lane["pubkey"] not in self._engine.known.keys:
            return False
        return is_signed(lane["pubkey"], lane["signature"], head_bytes(lane["seq"], lane["hash"]))


def _past(rows: Iterable[Any], ctx: Context) -> dict[Key, TaskRecord]:
    """Those of the tasks that are past their time."""
    records = {row["key"]: decoded(row["kind"], row["body"]) for row in rows}
    return {key: task for key, task in records.items() if isinstance(task, TaskRecord) and not is_retained(task, ctx)}


def _prefixes(task_id: Key, record: TaskRecord) -> list[str]:
    """What the keys of its pieces begin with."""
    gathered = {SAID_PREFIX: record.said, CHUNK_PREFIX: record.chunks, PART_PREFIX: record.partials_total}
    prefixes = [prefix for prefix, count in gathered.items() if count]
    prefixes += (LATE_PREFIX, PUSH_PREFIX, *(_OF_A_RUN if record.is_run else (SIGNAL_PREFIX,)))
    return [f"{prefix}{task_id}:" for prefix in prefixes]


async def _unplace(connection: asyncpg.Connection[Any], places: list[tuple[Place, Key]]) -> None:
    if places:
        await connection.execute(
            _UNPLACE,
            [place[0] for place, _ in places],
            [place[1] for place, _ in places],
            [place[2] for place, _ in places],
            [key for _, key in places],
        )
