"""The log ahead of the tables: what a daemon does that is alone, and is asked for the same few things again and again.

The log has everything, so it is enough that a commit is there. While nobody else has the store open, this daemon
decides on memory, appends to the log, answers, and brings the tables up to date now and then: a task that came and went
in between is put there once, as it is then. A row of its own says so (`ahead`): whoever finds it, the next start or
another daemon, first reads from the log what the tables lack. Who was ahead is refused from then on, and begins anew.

Everything else here wants the tables whole: every command that needs more than is remembered, every question, the
clock, the housekeeper. Each of them ends the stretch first (`whole`). So where questions are frequent there is none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from covenant.model.record import Key
from covenant.store.journal.line import decode_line
from covenant.store.postgres.array import texts
from covenant.store.postgres.connection import LOST, connect
from covenant.store.postgres.entry import Entry
from covenant.store.postgres.line import lines_in
from covenant.store.postgres.moved import Moved
from covenant.store.postgres.numbers import BLOCK, BLOCKS_AHEAD
from covenant.store.postgres.recall import RECORD_BYTES_MAX, STANDING_MAX
from covenant.store.postgres.saving import PUT, SETTLE, Rows
from covenant.store.postgres.stretch import Stretch
from covenant.store.postgres.view import Working
from covenant.store.postgres.want import TAKEN

if TYPE_CHECKING:
    from covenant.store.postgres.engine import Postgres
    from covenant.store.postgres.lane import Lane

WORTH: Final = 64  # commands decided on memory, one after the other, before it is worth going ahead
LOOKED_SHARE: Final = 8  # records that are looked at for what one command more is worth
IN_VAIN_MAX: Final = 256
REMEMBERED_MAX: Final = 2048  # shelves, and records, that are looked at for that
LOOKED_MAX: Final = 4096  # records in all, with those on the shelves: everybody waits meanwhile
PORTION: Final = 128  # records that are put into the tables at once: others have their turn in between
PACED: Final = 64  # so many while appends go on: the server does not keep one of them waiting for long
SLICE: Final = 4  # of them made into rows at once: nor does this process
SLICING_S: Final = 1.0  # then the others are made at once: the server ends who leaves a transaction alone for long
_OTHERS_S: Final = 0.05  # for the other lanes to come to the end of what they do
_MENDING: Final = "set local lock_timeout = '10s'"
_SETTLING: Final = "select pg_advisory_xact_lock_shared($1, 1)"
_SHELVES: Final = """
    select u.shelf, u.name, p.ord, p.key
    from unnest($1::text::"char"[], $2::text::text[]) u(shelf, name)
    left join lateral (
        select p.ord, p.key from place p where p.shelf = u.shelf and p.name = u.name order by p.ord limit $3
    ) p on true
"""
_RECORDS: Final = "select key, kind, body from record where key = any($1) and octet_length(body) <= $2"
_ALL_RECORDS: Final = "select key, kind, body from record where key = any($1) order by key for update"
_AHEAD: Final = "select lane, settled from ahead for update"
_LINES: Final = """
    select lines from log where lane = $1 and last > $2
    and seq >= coalesce((select seq from log where seq <= $2 order by seq desc limit 1), 0) order by seq
"""

log = logging.getLogger("covenant.store")


class Ahead:
    def __init__(self, engine: Postgres) -> None:
        self._engine = engine
        self.stretch: Stretch | None = None  # while it is on
        self._ending: asyncio.Task[None] | None = None
        self._tables: asyncpg.Connection[Any] | None = None
        self._put_statement: Any = None
        self._settle_statement: Any = None
        self._in_a_row = 0  # commands decided on memory
        self._in_vain = 0  # times that it was not worth it, one after the other: the next has to be worth the more
        self._is_beginning = False
        self._busy = 0  # lanes that are at work
        self._asked = 0  # others that want the tables whole
        self._changed = asyncio.Event()
        self._mending = asyncio.Lock()
        self.is_owed = True  # the tables may lack something: nobody has looked yet, or it went wrong

    # --- what wants the tables whole ----------------------------------------------------------------------

    @asynccontextmanager
    async def whole(self, *, is_lane: bool = False) -> AsyncIterator[None]:
        """In here nobody is ahead of the tables. Who has a connection calls `mend` as well."""
        if is_lane:
            self._busy += 1
        else:
            self._asked += 1
            self._in_a_row = 0
        try:
            while self._is_beginning and not is_lane:  # a lane that has a batch was given it before
                await self._change()
            if self.stretch is not None:
                self.end()
            if self._ending is not None:
                await asyncio.wait([self._ending])
            yield
        finally:
            if is_lane:
                self._busy -= 1
            else:
                self._asked -= 1
            self._tell()

    async def mend(self, connection: asyncpg.Connection[Any]) -> None:
        """Bring the tables up to date from the log, if somebody went ahead of them and has not come back."""
        if not self.is_owed:
            return
        async with self._mending:
            if not self.is_owed:
                return
            if connection.is_in_transaction():
                await connection.execute("rollback")
            async with connection.transaction():
                await connection.execute(_MENDING)
                await connection.execute("select pg_advisory_xact_lock($1, 1)", self._engine.space)
                found = await connection.fetchrow(_AHEAD)
                if found is not None:
                    await self._mend(connection, found["lane"], found["settled"])
            self.is_owed = False

    async def _mend(self, connection: asyncpg.Connection[Any], lane: int, settled: int) -> None:
        rows = await connection.fetch(_LINES, lane, settled)
        found = (decode_line(raw, "log", 0) for row in rows for raw in lines_in(row["lines"]))
        lines = [line for line in found if line.seq > settled]  # one append may hold what was settled, and more
        work = Working(self._engine.trust, self._engine.depths.of)
        keys = {event.key for line in lines for event in line.events}
        for row in await connection.fetch(_ALL_RECORDS, list(keys)):
            work.take_in(row["key"], row["kind"], row["body"])
        work.take_absent(keys)
        for line in lines:
            work.order = line.seq - 1
            work.follow(line)
        ends = (self._engine.space, lane, settled, work.order, True)
        await connection.fetch(SETTLE, *ends, *await _rows(work, sorted(work.touched), max(1, len(work.touched))))
        self._engine.depths.forget()
        self._engine.recall.forget()
        log.info("the tables lacked %d commits of lane %d: they were read from the log", len(lines), lane)

    # --- being ahead --------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self.stretch is not None

    def take(self, entry: Entry) -> bool:
        """Decide it ahead of the tables, if it wants nothing but what is remembered. If not, that is over."""
        stretch = self.stretch
        if stretch is None:
            return False
        if not self._asked and self._ending is None:
            try:
                if stretch.take(entry):
                    return True
            except Exception:  # a fault of ours: it is decided in the ordinary way, and nothing is lost
                log.exception("a command could not be decided ahead of the tables")
                stretch.is_spoilt = True
        self.end()
        return False

    def recalled(self, count: int) -> None:
        """So many commands were decided on memory, one transaction after the other."""
        self._in_a_row += count

    def loaded(self) -> None:
        """One had to look at the tables."""
        self._in_a_row = 0

    @property
    def is_worth_it(self) -> bool:
        is_worth_it = self._in_a_row >= WORTH * (1 + self._in_vain)
        return is_worth_it and self.stretch is None and self._ending is None and not self._is_beginning

    async def begin(self, lane: Lane) -> None:
        """If nothing is in the way. What comes meanwhile waits, and is the first to be decided so."""
        engine, queue = self._engine, self._engine.queue
        if self._asked or self.is_owed or not engine.may_recall() or engine.is_closing:
            self._in_a_row = 0
            return
        self._is_beginning = True
        queue.pause()
        try:
            if await self._others_are_done():
                self.stretch = await self._begun(lane)
        except (*LOST, asyncpg.PostgresError) as failed:
            log.info("the log was not gone ahead with: %s", failed)
            self.is_owed = True
        finally:
            self._in_a_row = 0
            self._is_beginning = False
            queue.resume()
            if self.stretch is not None:
                self._take_up(queue.take_all())
            else:
                self._was_worth_it(False)
            self._tell()

    def _take_up(self, entries: list[Entry]) -> None:
        for at, entry in enumerate(entries):
            if self.stretch is None or not self.take(entry):
                self._engine.queue.put_back(entries[at:])
                return

    async def _others_are_done(self) -> bool:
        """Whether the other lanes have come to the end of what they did, and nobody has asked for the tables."""
        try:
            async with asyncio.timeout(_OTHERS_S):
                while self._busy:
                    await self._change()
        except TimeoutError:
            return False
        return not self._asked and self._engine.may_recall()

    async def _begun(self, lane: Lane) -> Stretch | None:
        engine = self._engine
        shelves, keys = engine.recall.known()
        connection = await lane.for_appending()
        await self.connected()
        work = Working(engine.trust, engine.depths.of)
        async with connection.transaction():
            drawn = await connection.fetchval(
                "select go_ahead($1, $2, $3, $4, $5, $6)",
                engine.space,
                lane.id,
                lane.hash.decode(),
                engine.known.learnt,
                engine.member.id,
                BLOCKS_AHEAD,
            )
            if drawn is None:
                return None
            await _look_around(connection, work, shelves[-REMEMBERED_MAX:], keys[-REMEMBERED_MAX:])
        engine.recall.forget()  # it is told again when this ends
        is_unbroken = drawn[-1] - drawn[0] == (BLOCKS_AHEAD - 1) * BLOCK
        work.order = drawn[0] if is_unbroken else drawn[-1]
        return Stretch(engine, self, lane, work, drawn[-1])

    def end(self) -> None:
        """Nothing more is decided ahead of the tables; they are made whole. What comes meanwhile waits: it comes after
        what may have to be decided again."""
        stretch, self.stretch = self.stretch, None
        if stretch is not None:
            self._engine.queue.pause()
            self._was_worth_it(stretch.takes >= WORTH + stretch.looked // LOOKED_SHARE)
            self._ending = asyncio.ensure_future(self._end(stretch))

    def _was_worth_it(self, is_so: bool) -> None:
        self._in_vain = 0 if is_so else min(self._in_vain + 1, IN_VAIN_MAX)

    async def _end(self, stretch: Stretch) -> None:
        try:
            self.is_owed = not await stretch.finish() or self.is_owed
        except BaseException:
            self.is_owed = True
            raise
        finally:
            self._ending = None
            self._engine.queue.resume()
            self._tell()

    async def close(self, within_s: float) -> None:
        """At the end of it all."""
        while self._is_beginning:
            await self._change()
        self.end()
        if self._ending is not None:
            ending = self._ending
            await asyncio.wait([ending], timeout=within_s)
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
        self.let_go()

    # --- the tables ---------------------------------------------------------------------------------------

    async def settle(
        self, lane: int, before: int, upto: int, owed: Working, pause: Callable[[int], Awaitable[bool]] | None = None
    ) -> None:
        """The tables show what is owed to them: for good; or, with a `pause`, so far, and in small portions. It is
        called between them, while the transaction is open, and says whether it is to be called again."""
        await self.connected()
        assert self._tables is not None
        keys, size = [*owed.touched], PORTION if pause is None else PACED
        slice_size, may_pause = size if pause is None else SLICE, pause is not None
        portions = [sorted(keys[at : at + size]) for at in range(0, max(1, len(keys)), size)]
        try:
            async with self._tables.transaction():
                if len(portions) > 1:  # whoever mends waits for all of it, and does not meet it half way
                    await self._tables.execute(_SETTLING, self._engine.space)
                for portion in portions[:-1]:
                    await self._put_statement.fetch(*await _rows(owed, portion, slice_size))
                    if may_pause:
                        may_pause = pause is not None and await pause(len(keys))
                ends = (self._engine.space, lane, before, upto, pause is None)
                await self._settle_statement.fetch(*ends, *await _rows(owed, portions[-1], slice_size))
        except BaseException:
            self.let_go()
            raise

    async def connected(self) -> None:
        """With a connection of its own to the tables."""
        if self._tables is None or self._tables.is_closed():
            engine = self._engine
            # What is put there is in the log already: if a crash takes it back, it is put there again.
            session = engine.member.session
            self._tables = await connect(engine.where, application_name=session, synchronous_commit="off")
            self._put_statement = await self._tables.prepare(PUT)
            self._settle_statement = await self._tables.prepare(SETTLE)

    def let_go(self) -> None:
        """Of the connection."""
        if self._tables is not None:
            self._tables.terminate()
            self._tables = None

    # --- inside -------------------------------------------------------------------------------------------

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()


async def _look_around(
    connection: asyncpg.Connection[Any], work: Working, shelves: list[tuple[bytes, str]], keys: list[str]
) -> None:
    """How it is now, of what was remembered."""
    there: dict[tuple[bytes, str], dict[str, int]] = {}
    named = [(shelf, name) for shelf, name in shelves if shelf in TAKEN]
    found = await connection.fetch(
        _SHELVES, texts([shelf.decode() for shelf, _ in named]), texts([name for _, name in named]), STANDING_MAX + 1
    )
    for shelf, name, order, key in found:
        standing = there.setdefault((shelf, name), {})
        if key is not None:
            standing[key] = order
    wanted: set[str] = set()
    for at, standing in reversed(there.copy().items()):  # the last ones to be used come first
        if len(standing) > STANDING_MAX or len(wanted) + len(standing) > LOOKED_MAX // 2:
            del there[at]
        else:
            wanted.update(standing)
    wanted.update(keys[len(wanted) - LOOKED_MAX :])
    for row in await connection.fetch(_RECORDS, list(wanted), RECORD_BYTES_MAX):
        work.take_in(row["key"], row["kind"], row["body"])
    for at, standing in there.items():
        if all(key in work.records for key in standing):
            work.remember_shelf(at, standing)


async def _rows(owed: Working, keys: Sequence[Key], size: int) -> Sequence[Any]:
    """Those of these keys, so many at once: in between, who waits for what an append has brought has a turn."""
    rows, until_s = Rows(Moved()), monotonic() + SLICING_S
    for at in range(0, len(keys), size):
        if at and monotonic() < until_s:
            await asyncio.sleep(0)
        rows.add_with_places(owed, keys[at : at + size])
    rows.moved.taken.sort()
    return rows.values(owed)
