"""Questions: those that wait are answered together, from one snapshot that shows only what is committed."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from covenant.model.error import CovenantError
from covenant.model.peer import Caller
from covenant.model.query import Query
from covenant.rules.context import Need
from covenant.rules.peer import check_caller
from covenant.rules.query import answer
from covenant.store.postgres.connection import LOST, connect, told
from covenant.store.postgres.family import children_of_each, is_of_children, keys_of
from covenant.store.postgres.listing import DEEP, DIALOG_COUNT, LISTINGS, in_portion, of_shelves
from covenant.store.postgres.rows import DIALOGS, READY
from covenant.store.postgres.view import Working
from covenant.store.postgres.want import ANYBODY, Depth, First, Listing

if TYPE_CHECKING:
    from covenant.store.postgres.engine import Postgres

_LOOK: Final = """
    select s.key, s.kind, s.ord, case when s.upto - octet_length(s.body) <= $2 then s.body end as body
    from (select r.*, sum(octet_length(r.body)) over (rows unbounded preceding) as upto
          from unnest($1::text[]) u(key) join record r on r.key = u.key) s
    union all select null, null, m.trust, null from meta m
"""
_BATCH: Final = 64
READ_BYTES: Final = 16 << 20  # of records, in one look; at least one is loaded, and more when it is asked for
AT_ONCE_BYTES: Final = 64 << 20  # held for the questions of one batch; then each is by itself, and its page ends
_AHEAD: Final = 200  # looked for with one that is asked for, or as many more as there are already
_LEVELS: Final = 64  # of a tree, in one look
TURN_S: Final = 0.01  # in which questions are answered; then others have theirs
PATIENCE_S: Final = 20.0

log = logging.getLogger("covenant.store")


class _Behind(Exception):
    """A snapshot shows that trust has changed."""


class Asked:
    __slots__ = ("caller", "future", "query", "until_s")

    def __init__(self, query: Query, caller: Caller | None, future: asyncio.Future[Any]) -> None:
        self.query = query
        self.caller = caller
        self.future = future
        self.until_s = asyncio.get_running_loop().time() + PATIENCE_S


class Reader:
    def __init__(self, engine: Postgres) -> None:
        self._engine = engine
        self._connection: asyncpg.Connection[Any] | None = None
        self._look: Any = None
        self._queue: deque[Asked] = deque()
        self._idle: asyncio.Future[None] | None = None
        self._turn = asyncio.Lock()  # of the connection
        self._following: dict[str, tuple[list[str], int]] = {}  # what is listed and not loaded: where it stands
        self._held = 0  # bytes that were loaded for what is asked now

    def ask(self, query: Query, caller: Caller | None) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append(Asked(query, caller, future))
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        return future

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def connected(self) -> asyncpg.Connection[Any]:
        if self._connection is None or self._connection.is_closed():
            connection = await connect(self._engine.where, application_name=self._engine.member.session)
            try:
                if not self._engine.is_closing:  # at the start there may be no store yet
                    await self._engine.known.meet(connection)
            except BaseException:
                connection.terminate()
                raise
            self._connection, self._look = connection, None
            self._engine.ahead.is_owed = True  # somebody may have ended the former one, and gone ahead since
        return self._connection

    async def _whole(self) -> asyncpg.Connection[Any]:
        """The connection, and tables that lack nothing."""
        connection = await self.connected()
        await self._engine.ahead.mend(connection)
        return connection

    async def fetch(self, sql: str, *values: Any) -> list[Any]:
        """For what is no question of the rules: the log, the daemons."""
        until = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                async with self._engine.ahead.whole(), self._turn:
                    return await (await self._whole()).fetch(sql, *values)  # type: ignore[no-any-return]  # untyped driver
            except LOST as lost:
                await self._lost(lost, until)
            except asyncpg.PostgresError as failed:
                raise told(failed, "not_stored") from failed

    async def use(self, work: Callable[[asyncpg.Connection[Any]], Awaitable[None]]) -> None:
        """Lend the connection."""
        try:
            async with self._engine.ahead.whole(), self._turn:
                await work(await self._whole())
        except (*LOST, asyncpg.PostgresError) as failed:
            raise told(failed, "not_stored") from failed

    async def _lost(self, lost: BaseException, until: float) -> None:
        await self.close()
        if self._engine.is_closing or asyncio.get_running_loop().time() >= until:
            raise told(lost, "not_stored") from lost
        await asyncio.sleep(0.1)

    async def work(self) -> None:
        while True:
            while not self._queue:
                self._idle = asyncio.get_running_loop().create_future()
                await self._idle
            asked = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH))]
            asked = [one for one in asked if not one.future.done()]
            try:
                await self._answer_each(asked)
            except asyncio.CancelledError:
                for one in [*asked, *self._queue]:
                    _fail(one, self._engine.closed_error())
                raise

    async def _answer_each(self, asked: list[Asked]) -> None:
        """Together; where that fails, each by itself: one of them is the cause."""
        try:
            await self._answer(asked)
        except Exception as failed:
            left = [one for one in asked if not one.future.done()]
            if len(left) == 1:
                log.exception("a question could not be answered")
                _fail(left[0], told(failed, "not_stored"))
                return
            for one in left:
                await self._answer_each([one])

    async def _answer(self, asked: list[Asked]) -> None:
        is_behind = False
        while asked:
            try:
                async with self._engine.ahead.whole(), self._turn:
                    connection = await self._whole()
                    if is_behind:
                        await self._engine.known.learn(connection)
                        is_behind = False
                    left = await self._answer_at_once(asked)
                    if left:
                        async with connection.transaction(isolation="repeatable_read", readonly=True):
                            await self._answer_all(left)
                return
            except _Behind:
                is_behind = True
            except LOST as lost:
                await self.close()
                now_s = asyncio.get_running_loop().time()
                for one in asked:  # each waits as long as it would alone
                    if self._engine.is_closing or one.until_s <= now_s:
                        _fail(one, told(lost, "not_stored"))
                await asyncio.sleep(0.1)
            asked = [one for one in asked if not one.future.done()]

    async def _answer_at_once(self, asked: list[Asked]) -> list[Asked]:
        """What one look at a few records answers; the rest."""
        work = self._working()
        wanted = await self._try(asked, work)
        keys = [want for want in wanted if type(want) is str]
        if len(keys) < len(wanted):
            return [one for one in asked if not one.future.done()]
        await self._load(work, wanted)
        await self._try(asked, work)
        return [one for one in asked if not one.future.done()]

    async def _answer_all(self, asked: list[Asked]) -> None:
        work = self._working()
        wanted: list[Any] = []
        while True:
            await self._load(work, wanted)
            wanted = await self._try(asked, work)
            if not wanted:
                return
            if self._held > AT_ONCE_BYTES and len(asked) > 1:
                for one in [one for one in asked if not one.future.done()]:
                    await self._answer_all([one])
                return
            work.is_spent = self._held > AT_ONCE_BYTES

    def _working(self) -> Working:
        self._following.clear()
        self._held = 0
        work = Working(self._engine.trust, self._engine.depths.of)
        work.is_snapshot = True
        return work

    async def _try(self, asked: list[Asked], work: Working) -> list[Any]:
        """Answer what can be; what the others still want."""
        engine = self._engine
        wanted: list[Any] = []
        ctx = engine.context
        begun_s = perf_counter()  # the loop's own clock may stand still within a turn
        for one in asked:
            if perf_counter() - begun_s >= TURN_S:
                await asyncio.sleep(0)
                begun_s = perf_counter()
            if one.future.done():
                continue
            ctx.now, ctx.compaction = engine.now(), work.compaction
            try:
                if not work.is_fresh:
                    raise Need
                if one.caller is not None:
                    check_caller(one.caller, work)
                one.future.set_result(answer(one.query, work, ctx))
            except Need as need:
                wanted += need.wanted
            except CovenantError as refusal:
                one.future.set_exception(refusal)
        if not work.is_fresh:  # what they want is guessed before trust is known to be up to date
            for one in asked:
                try:
                    answer(one.query, work, ctx)
                except Need as need:
                    wanted += need.wanted
                except CovenantError:
                    pass
        return wanted

    async def _load(self, work: Working, wanted: list[Any]) -> None:
        assert self._connection is not None
        keys = dict.fromkeys(want for want in wanted if type(want) is str)
        ahead = max(_AHEAD, len(work.records))
        for key in [*keys]:
            listed, at = self._following.get(key, ((), 0))
            keys.update(dict.fromkeys(listed[at : at + ahead]))
        for key in [key for key in keys if key in work.records]:
            del keys[key]
        if self._look is None:
            self._look = await self._connection.prepare(_LOOK)
        for key, kind, order, body in await self._look.fetch(list(keys), READ_BYTES):
            if key is None:
                if order != self._engine.known.learnt:
                    await self._catch_up(order)
            elif body is None:
                del keys[key]  # it is there, and there was no room for it
            else:
                self._take_in(work, key, kind, body)
        work.trust = self._engine.trust  # a lane may have begun anew meanwhile
        work.take_absent(keys)
        work.is_fresh = True
        await self._load_below(work, [want for want in wanted if is_of_children(want)])
        loads = [partial(self._load_shelves, work, firsts) for firsts in _alike(wanted)]
        others = dict.fromkeys(want for want in wanted if type(want) not in (str, First) and not is_of_children(want))
        for load in (*loads, *(partial(self._load_listing, work, want) for want in others)):
            await load()
            if self._held > AT_ONCE_BYTES:
                return  # whoever asked for the others asks again

    def _take_in(self, work: Working, key: str, kind: bytes, body: bytes) -> None:
        self._held += len(body)
        work.take_in(key, kind, body)

    async def _catch_up(self, trust: int) -> None:
        """A snapshot cannot tell what memory should know by now: it is left first."""
        assert self._connection is not None
        if not self._connection.is_in_transaction():
            await self._engine.known.learn(self._connection)
        elif trust > self._engine.known.learnt:
            raise _Behind

    async def _load_below(self, work: Working, wanted: list[Listing]) -> None:
        """Children, and theirs: a tree is gone over anew for each look, so there must be few of them, however deep it
        is."""
        assert self._connection is not None
        room = max(_AHEAD, len(work.lists))
        listed: list[str] = []
        while wanted and len(listed) < room:
            found = await children_of_each(self._connection, wanted, _LEVELS, room)
            following: list[Listing] = []
            for want, family in found.items():
                _, _, limit, agent = want.args
                keys = work.lists[want] = keys_of(family)
                listed += keys
                if len(family) == limit:
                    following.append(Listing("children", (want.args[0], family[-1][0], limit, agent)))
                following += [Listing("children", (key, 0, limit, agent)) for key in keys]
            wanted = [want for want in following if want not in work.lists]
        for at, key in enumerate(listed):
            self._following[key] = listed, at

    async def _load_shelves(self, work: Working, firsts: dict[str, First]) -> None:
        """What stands first on each, in one statement. What there is no room for is asked for again."""
        assert self._connection is not None
        first = next(iter(firsts.values()))
        there: dict[str, list[str]] = {name: [] for name in firsts}
        rows = await self._connection.fetch(*_flat(of_shelves(first.shelf, [*firsts], first.limit, READ_BYTES)))
        for name, key, kind, body in rows:
            if body is None:
                there.pop(name, None)
            elif name in there:
                self._take_in(work, key, kind, body)
                there[name].append(key)
        for name, keys in there.items():
            work.take_shelf(firsts[name], keys)

    async def _load_listing(self, work: Working, want: Any) -> None:
        connection = self._connection
        assert connection is not None
        if type(want) is Depth:
            await self._engine.depths.learn(connection, want.recipient)
        else:
            assert type(want) is Listing
            if want.method == "dialog_count":
                sender, recipient = want.args
                work.lists[want] = await connection.fetchval(DIALOG_COUNT, DIALOGS, f"{sender}/{recipient}")
            elif want.method == "deep":
                deep = await connection.fetch(DEEP, READY, max(want.args[0], 0))
                work.lists[want] = {row["key"]: row["depth"] for row in deep}
            else:
                rows = await connection.fetch(*_flat(in_portion(LISTINGS[want.method](*want.args), READ_BYTES)))
                for row in rows:
                    if row["body"] is not None:
                        self._take_in(work, row["key"], row["kind"], row["body"])
                listed = work.lists[want] = [row["key"] for row in rows]
                for at, row in enumerate(rows):
                    if row["body"] is None:
                        self._following[row["key"]] = listed, at


def _alike(wanted: list[Any]) -> list[dict[str, First]]:
    """The shelves that may be loaded together, by their names."""
    groups: dict[tuple[bytes, int], dict[str, First]] = {}
    for want in wanted:
        if type(want) is First:
            if want.name == ANYBODY or want.kinds is not None:
                raise AssertionError("no question is about everybody's shelf, or about kinds")
            groups.setdefault((want.shelf, want.limit), {})[want.name] = want
    return [*groups.values()]


def _flat(statement: tuple[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    sql, values = statement
    return (sql, *values)


def _fail(one: Asked, failure: CovenantError) -> None:
    if not one.future.done():
        one.future.set_exception(failure)
