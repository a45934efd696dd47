"""A lane: one connection that has one transaction open at a time, and the chain of what it committed.

The commands that wait are decided together: what they need is loaded and locked, in the order of the keys, each is
decided on what the ones before it have made, and all is saved at once. Nobody is answered before the commit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import asyncpg
import msgspec

from covenant.model import command as c
from covenant.model.card import CARD_PREFIX
from covenant.model.error import CovenantError
from covenant.model.record import Key
from covenant.rules.context import Commit, Need
from covenant.rules.decide import decide
from covenant.store.journal.line import GENESIS, Line
from covenant.store.postgres.array import numbers, texts
from covenant.store.postgres.chain import Chain
from covenant.store.postgres.connection import LOG_AHEAD, LOST, RETRIED, connect
from covenant.store.postgres.due import EXPIRY_STEPS
from covenant.store.postgres.entry import Entry
from covenant.store.postgres.family import children_of_each, is_of_children, keys_of
from covenant.store.postgres.hint import hint
from covenant.store.postgres.listing import DEEP, DIALOG_COUNT, LISTINGS, WAITING, only_keys
from covenant.store.postgres.moved import Moved
from covenant.store.postgres.numbers import BLOCK
from covenant.store.postgres.pulse import name_session
from covenant.store.postgres.recall import in_order_with, is_borne
from covenant.store.postgres.rows import DIALOGS, READY, SIGNALS, TRUST, kind_name
from covenant.store.postgres.saving import APPEND, SAVE, appended, on_loaded, on_remembered, saved
from covenant.store.postgres.trust import TRUST_EVENTS
from covenant.store.postgres.view import Working
from covenant.store.postgres.want import Depth, First, Fresh, Listing, ShelfName, Waiting

if TYPE_CHECKING:
    from covenant.store.postgres.engine import Postgres

LOCK_TIMEOUT: Final = "500ms"  # for a record or for trust; others wait meanwhile
LOAD_BYTES: Final = 16 << 20  # of records, in one look; at least one is loaded, and the rest when its turn comes
SAVE_BYTES: Final = 16 << 20  # of lines, in one transaction; those of one command are not parted
STEP_EVENTS: Final = 100  # in one transaction of steps; those of one are not parted
_EXCLUSIVE: Final = frozenset(
    (
        c.EnrollPeer,
        c.RotateToken,
        c.RevokePeer,
        c.GrantCapability,
        c.RevokeCapability,
        c.EndGrants,
        c.PublishCard,
        c.WithdrawCard,
        c.CompactHistory,
    )
)
# Arrays go out as text, which the server reads faster than the driver writes its own form of them; bodies do not.
LOAD: Final = """select what, key, kind, ord, body from load($1, $2, $3::text::text[],
    $4::text::integer[], $5::text::"char"[], $6::text::text[], $7::text::integer[],
    $8::text::integer[], $9::text::"char"[], $10::text::text[], $11::text::integer[], $12::text::text[], $13)"""
_HELD: Final = """
    with free as (select key from record where key = any($1) for update skip locked)
    select key from record where key = any($1) and key not in (select key from free)
"""
_DRAW_AHEAD: Final = "select array_agg(nextval('block')) from generate_series(1, $1)"
_IS_AHEAD: Final = "select exists (select from ahead a join lane l on l.id = a.lane where l.id = $1 and l.hash = $2)"
_RECALLS_MAX: Final = 3
_CLOSE_S: Final = 2.0  # for a connection to end in order
_DRAWN_SINCE: Final = "CV002"
_MORE_ON_SHELVES: Final = "CV003"
# Trust, or what is due, or a record: the last by its number, or because others are at it.
_NOT_AS_REMEMBERED: Final = ("CV004", *(error.sqlstate for error in RETRIED))
_names: Final = msgspec.json.Encoder()


class DueFirst(Exception):
    """The clock has something to say before these commands."""


def is_exclusive(command: c.Command | c.Call) -> bool:
    return type(command.command if type(command) is c.Call else command) in _EXCLUSIVE


class Tried:
    """What was learnt from the tries of a batch, for the next one."""

    __slots__ = ("asked", "due", "heeds_clock", "is_one_by_one", "stuck")

    def __init__(self) -> None:
        self.asked: set[Key] = set()  # what is locked first of all, in the order of the keys
        self.due: Mapping[Key, Key] = {}  # as it was listed, each with the slot that it goes with, or itself
        self.heeds_clock = True  # what is due comes before these commands
        self.is_one_by_one = False  # somebody holds something, and it has to be found out with what it goes
        self.stuck: Key | None = None  # what was due and being ended when something was found to be held

    def has_listed(self, due: Mapping[Key, Key]) -> None:
        """One that was not loaded this time goes with what it went with before."""
        self.due = {key: self.due.get(key, key) if slot == key else slot for key, slot in due.items()}

    def asks_for(self, wanted: Iterable[Any]) -> None:
        self.asked.update(want for want in wanted if type(want) is str)


class Lane:
    def __init__(self, engine: Postgres) -> None:
        self._engine = engine
        self._connection: asyncpg.Connection[Any] | None = None
        self._load_statement: Any = None
        self._save_statement: Any = None
        self._append_statement: Any = None
        self.own: deque[Entry] = deque()  # what only this lane can do
        self.id = 0
        self.hash = GENESIS
        self.seq = 0
        self.signed = 0
        self._work: Working
        self._moved = Moved()
        self._block = 0  # of numbers, as it was drawn last
        self._block_end = 0
        self._pending: tuple[bytes, int] | None = None  # the head that a commit of unknown outcome would leave

    # --- the connection -----------------------------------------------------------------------------------

    async def open(self) -> None:
        await self._connected()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await _close(connection)

    async def _connected(self) -> asyncpg.Connection[Any]:
        """The connection, made anew if need be. Where the last commit was cut off, it finds out how that ended: the
        lane's own row tells, once whoever still works on it is done."""
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        session = self._engine.member.session
        connection = await connect(self._engine.where, application_name=session, lock_timeout=LOCK_TIMEOUT)
        try:
            await self._engine.known.meet(connection)
            if self.id == 0:
                self.id = await self._engine.member.open_lane(connection, GENESIS.decode())
                if session != self._engine.member.session:  # so that who takes the new one for dead can end this one
                    await name_session(connection, self._engine.member.session)
                self.hash, self.seq, self.signed, self._pending = GENESIS, 0, 0, None
            self._load_statement = await connection.prepare(LOAD)
            self._save_statement = await connection.prepare(SAVE)
            self._append_statement = await connection.prepare(APPEND)
        except BaseException:
            await _close(connection)
            raise
        self._connection = connection
        return connection

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last commit may have happened or not."""
        return self._pending is not None

    async def recover(self, batch: list[Entry]) -> int:
        """With a new connection: how many of the batch were committed all the same, and are answered now."""
        if self._pending is None:
            await self._connected()
            return 0
        if not await self._was_committed(*self._pending):
            return 0
        done = sum(entry.commit is not None or entry.refusal is not None for entry in batch)
        self._engine.committed(batch[:done], self._work, self._moved)
        return done

    async def _was_committed(self, mark: bytes, seq: int) -> bool:
        connection = await self._connected()
        async with connection.transaction():
            found = await connection.fetchval("select hash from lane where id = $1 for update", self.id)
            is_so = bool(found == mark.decode())
            # What was decided on memory is said in one word, and that may still be on its way: it must not arrive now.
            is_late = not is_so and self._work.is_recalled
            if is_late:
                await connection.execute("update lane set closed = true where id = $1", self.id)
        self._pending = None
        if is_so:
            self.hash, self.seq = mark, seq
        elif is_late:
            await self.end_chain()
        return is_so

    async def end_chain(self) -> None:
        """The next commit begins a new one."""
        self._pending = None
        self.id = 0
        await self.close()

    async def rest(self) -> None:
        """Nothing waits that this lane could do: no transaction stays open for what another has taken."""
        if self._connection is not None:
            await self._roll_back(self._connection)

    async def held_of(self, due: Mapping[Key, Key]) -> set[Key]:
        """Those that somebody holds, or what they go with, as far as it can be told."""
        try:
            found = await (await self._connected()).fetch(_HELD, [*{*due.keys(), *due.values()}])
        except (*LOST, asyncpg.PostgresError):
            return set()
        held = {row["key"] for row in found}
        return {key for key, slot in due.items() if key in held or slot in held}

    # --- one transaction, in one go -----------------------------------------------------------------------

    async def transact_recalled(self, batch: list[Entry]) -> int:
        """Decide on what this daemon remembers, and save it if the store is as it was remembered. How many of the batch
        were committed: those go to its beginning, the others are left to be decided on what is loaded."""
        for _ in range(_RECALLS_MAX):
            connection = await self._connected()
            await self._engine.ahead.mend(connection)
            if connection.is_in_transaction() or batch[0].is_aside or not self._engine.may_recall():
                break
            if not self._engine.recall.numbers.block:
                if all(hint(entry.command) is None for entry in batch):
                    break
                await self._draw_block(connection)
            done = await self._try_recalled(batch)
            if done is not None:
                return done
        return 0

    async def _try_recalled(self, batch: list[Entry]) -> int | None:
        """None where another has drawn numbers meanwhile: with newer ones, all may be well."""
        engine, recall, now = self._engine, self._engine.recall, self._engine.now()
        work = self._work = Working(engine.trust, engine.depths.of)
        work.is_recalled = True
        try:
            chain, done = self._decide_recalled(batch, work, now)
            if not done:
                return 0
            moved = self._moved = work.moved()
            moved.taken.sort()
            block, recall.numbers.last = recall.numbers.block, work.order
            values = saved(work, moved, chain, 0)
            counted_on = on_remembered(block, engine.space, engine.known.learnt, moved)
            self._pending = (chain.mark, chain.lines[-1].last)
            await self._save_statement.fetch(self.id, self.hash.decode(), *values, *counted_on)
        except asyncpg.PostgresError as refused:
            if isinstance(refused, LOST):
                recall.lose(work)
                raise
            self._pending = None  # the server has said no: nothing was saved
            if refused.sqlstate == _DRAWN_SINCE:
                recall.numbers.lose(block)
                return None
            recall.lose(work)
            if refused.sqlstate == _MORE_ON_SHELVES:
                recall.was_wrong([(shelf.encode(), name) for shelf, name in msgspec.json.decode(refused.detail)])
            elif refused.sqlstate == LOG_AHEAD:
                engine.ahead.is_owed = True
            elif refused.sqlstate not in _NOT_AS_REMEMBERED:
                raise
            return 0
        except BaseException:
            recall.lose(work)
            raise
        finally:
            recall.give_back(work)
        self.hash, self.seq = self._pending
        self._pending = None
        engine.committed(batch[:done], work, moved)
        engine.ahead.recalled(done)
        return done

    async def _draw_block(self, connection: asyncpg.Connection[Any]) -> None:
        numbers = self._engine.recall.numbers
        block = await connection.fetchval("select nextval('block')")
        numbers.drawn(block)
        numbers.go_on(block, block, block + BLOCK)

    def _decide_recalled(self, batch: list[Entry], work: Working, now: int) -> tuple[Chain, int]:
        """Those that lead to a commit of what was borrowed: whatever else is said of it must be true, too, and is
        looked for. What was decided comes first in the batch; nobody is overtaken by its like."""
        recall = self._engine.recall
        chain = Chain(self.hash)
        work.order, end = recall.numbers.last, recall.numbers.end
        done: list[Entry] = []
        left: list[Entry] = []
        # What comes after something that is left: a call of which one has to be loaded is left as a whole.
        waiting: set[Any] = {
            id(entry.group) for entry in batch if entry.group is not None and hint(entry.command) is None
        }
        for entry in batch:
            entry.commit = entry.refusal = None
            wanted = hint(entry.command)
            commit = None
            if wanted is not None and (not waiting or waiting.isdisjoint(in_order_with(entry))):
                commit = self._commit_of(entry, wanted, work, now) if recall.lend(work, wanted) else None
            is_full = chain.size >= SAVE_BYTES or (work.due_ms is not None and work.due_ms <= now)
            if commit is None or is_full or work.order + len(commit.events) >= end:
                waiting.update(in_order_with(entry))
                left.append(entry)
                continue
            chain.append(self._apply(entry, commit, work, now))
            entry.commit = commit
            done.append(entry)
        batch[:] = done + left
        return chain, len(done)

    def _commit_of(self, entry: Entry, wanted: Sequence[Any], work: Working, now: int) -> Commit | None:
        """If it can be decided on what is remembered."""
        try:
            commit = self.decide(entry, work, now, is_guess=True)
            work.require(commit.events)
        except (Need, CovenantError):
            return None
        return commit if is_borne(commit, wanted, work) else None

    # --- to the log alone ---------------------------------------------------------------------------------

    async def for_appending(self) -> asyncpg.Connection[Any]:
        """The connection, with nothing begun on it. Of an append that turns out to have been committed, `recover` has
        nothing to tell: the stretch knows whom it concerns."""
        connection = await self._connected()
        if connection.is_in_transaction():
            await connection.execute("rollback")
        engine = self._engine
        self._work, self._moved = Working(engine.trust, engine.depths.of), Moved()
        self._work.is_recalled = True  # an append is said in one word, too
        return connection

    async def is_ahead(self) -> bool:
        """Whether nobody else has come and brought the tables up to date, and the log has all that was appended. No new
        connection can tell: a crash of the server may have taken back what was put into the tables last."""
        connection = self._connection
        if connection is None or connection.is_closed():
            raise ConnectionError("the connection was lost")
        return bool(await connection.fetchval(_IS_AHEAD, self.id, self.hash.decode()))

    async def draw_ahead(self, blocks: int) -> list[int]:
        """So many blocks of numbers: an append is refused if the last of them is not the last any more."""
        connection = self._connection
        if connection is None or connection.is_closed():
            raise ConnectionError("the connection was lost")
        drawn: list[int] = await connection.fetchval(_DRAW_AHEAD, blocks)
        return drawn

    async def append(self, chain: Chain, block: int, fresh: Sequence[Key]) -> None:
        """What was decided ahead of the tables, if nothing is there under keys that were taken for fresh."""
        mark, last = self._pending = (chain.mark, chain.lines[-1].last)
        try:
            before = self.hash.decode()
            await self._append_statement.fetch(self._engine.space, self.id, before, *appended(chain, block, fresh))
        except asyncpg.PostgresError as refused:
            if not isinstance(refused, LOST):
                self._pending = None  # the server has said no
            raise
        self.hash, self.seq = mark, last
        self._pending = None

    # --- one transaction ----------------------------------------------------------------------------------

    async def transact(self, batch: list[Entry], tried: Tried) -> int:
        """How many of the batch were committed, from its beginning."""
        engine = self._engine
        connection = await self._connected()
        await engine.ahead.mend(connection)
        engine.ahead.loaded()
        if batch[0].lane not in (None, self.id):  # of a chain that has ended: the new one has its own head
            batch[0].future.set_result(None)
            return len(batch)
        mode = 2 if batch[0].is_exclusive else 3 if batch[0].is_aside or engine.queue.hurries else 1
        work = self._work = Working(engine.trust, engine.depths.of)
        work.is_careful = batch[0].tries > 0 or batch[0].is_aside
        work.is_one_by_one = tried.is_one_by_one
        now = engine.now()
        for entry in batch:
            entry.commit = entry.refusal = None
        # What a commit has left to be done goes with it, and so before the clock, as what the clock itself does.
        is_before_clock = type(batch[0].command) is c.Expire or batch[0].is_step
        wanted = self._wanted(batch, work, now)
        wanted += tried.asked
        if not connection.is_in_transaction():
            await connection.execute("begin")
        try:
            tried.asks_for(wanted)
            due_ms = await self._load(work, mode, wanted)
            if not is_before_clock and tried.heeds_clock and await engine.due.comes_first(connection, due_ms, now):
                raise DueFirst
            chain = Chain(self.hash)
            self._moved = Moved()
            done = 0
            while done < len(batch) and chain.size < SAVE_BYTES:
                entry = batch[done]
                if batch[0].is_step and (not entry.is_step or chain.events >= STEP_EVENTS):
                    break
                try:
                    commit = self.decide(entry, work, now)
                    work.require(commit.events)
                except Need as need:
                    if done and not _may_follow(entry, need, work):
                        entry.comes_first = True
                    if done and (work.is_full or entry.comes_first):
                        break  # it wants more than is held at once, or to see what is committed
                    more = [*need.wanted]
                    if not work.is_full:
                        more += self._wanted(batch[done + 1 :], work, now, is_first=False)
                    tried.asks_for(more)
                    await self._load(work, 0, more)
                    continue
                except CovenantError as refusal:
                    entry.refusal = refusal
                else:
                    if mode != 2 and any(type(event) in TRUST_EVENTS for event in commit.events):
                        entry.is_exclusive = True
                        break
                    if work.order + len(commit.events) >= self._block_end:
                        if done:
                            break
                        await self._draw(work, len(commit.events))
                    if commit.events or commit.audit:
                        chain.append(self._apply(entry, commit, work, now))
                    entry.commit = commit
                work.ending = None
                if type(entry.command) is not c.Expire:  # one step of the clock goes on from what the one before saw
                    work.forget_lists(but_children=entry.is_step)
                done += 1
                if work.due_ms is not None and work.due_ms <= now and engine.is_on_time:
                    break  # the clock comes before the next command
            if chain.lines:
                await self._save(work, chain, mode)
            await connection.execute("commit and chain" if self._goes_on_loading() else "commit")
        except BaseException:
            if self._pending is None:
                tried.has_listed(work.listed_as_due())
                tried.stuck = work.ending or tried.stuck
                await self._roll_back(connection)
            raise
        if self._pending is not None:
            self.hash, self.seq = self._pending
            self._pending = None
        engine.recall.numbers.go_on(self._block, work.order, self._block_end)
        engine.committed(batch[:done], work, self._moved)
        return done

    def _goes_on_loading(self) -> bool:
        """Whether the next transaction will have to be begun, as far as can be told."""
        following = self._engine.queue.first
        return following is not None and (hint(following.command) is None or not self._engine.may_recall())

    async def _roll_back(self, connection: asyncpg.Connection[Any]) -> None:
        if not connection.is_closed() and connection.is_in_transaction():
            try:
                await connection.execute("rollback")
            except (*LOST, asyncpg.PostgresError):
                await self.close()

    def decide(self, entry: Entry, work: Working, now: int, is_guess: bool = False) -> Commit:
        ctx = self._engine.context
        ids = entry.ids
        ids.rewind()
        ctx.ids, ctx.now, ctx.compaction = ids, now, work.trust.compaction
        draw = ctx.refused
        ctx.refused = _nothing_drawn if is_guess else partial(entry.draw, draw)
        try:
            return decide(entry.command, work, ctx)
        finally:
            ctx.refused = draw

    def _wanted(self, batch: Sequence[Entry], work: Working, now: int, is_first: bool = True) -> list[Any]:
        """What the commands ask for first, or next. They are asked in vain, and decided later; of the commonest it is
        known. One that has to come first is the end of this transaction."""
        wanted: list[Any] = []
        for at, entry in enumerate(batch):
            if entry.comes_first and not (is_first and at == 0):
                break
            if entry.is_step and len(wanted) >= STEP_EVENTS:
                break  # this transaction will hardly come to it
            if type(entry.command) is c.Expire and not (is_first and at == 0):
                continue  # it comes to what the step before it leaves
            known = hint(entry.command)
            if known is not None:
                if is_first:
                    wanted += [want.key if type(want) is Fresh else want for want in known]
                    continue
                if any(type(want) is First for want in known):
                    continue  # who takes asks for nothing else
            try:
                work.require(self.decide(entry, work, now, is_guess=True).events, is_guess=True)
            except Need as need:
                if not (is_first and at == 0) and not _may_follow(entry, need, work):
                    entry.comes_first = True
                else:
                    wanted += need.wanted
            except CovenantError:
                pass  # said again when its turn comes
        return wanted

    def line_of(self, entry: Entry, commit: Commit, work: Working, now: int) -> Line:
        events = commit.events
        return Line(work.order + 1, now, 0, events, entry.by, work.orders_before(events), commit.audit)

    def _apply(self, entry: Entry, commit: Commit, work: Working, now: int) -> Line:
        line = self.line_of(entry, commit, work, now)
        work.follow(line)
        return line

    # --- loading and saving -------------------------------------------------------------------------------

    async def _load(self, work: Working, mode: int, wanted: Iterable[Any]) -> int | None:
        """Lock and load; a fresh block of numbers; trust brought up to date. What is due next."""
        assert self._connection is not None
        keys: set[str] = set()
        firsts: dict[ShelfName, int] = {}
        families: list[Listing] = []
        waiting: set[str] = set()
        for want in wanted:
            if type(want) is str:
                keys.add(want)
            elif type(want) is First:
                firsts[want.place] = firsts.get(want.place, 0) + want.limit
            elif type(want) is Depth:
                await self._engine.depths.learn(self._connection, want.recipient)
            elif type(want) is Waiting:
                waiting.add(want.task_id)
            elif is_of_children(want):
                families.append(want)
            else:
                await self._list(work, want)
        for want, family in (await children_of_each(self._connection, families)).items():
            work.lists[want] = keys_of(family)
        if waiting:
            counted = dict(await self._connection.fetch(WAITING, SIGNALS, list(waiting)))
            for task_id in waiting:
                work.take_waiting(task_id, counted.get(task_id, 0))
        asked = [First(shelf, name, limit, kinds) for (shelf, name, kinds), limit in firsts.items()]
        heads = [at for at, first in enumerate(asked) if first.is_plain]
        others = [at for at, first in enumerate(asked) if not first.is_plain]
        found: list[list[str]] = [[] for _ in asked]
        stood: list[list[int]] = [[] for _ in asked]
        cuts: set[int] = set()
        due: int | None = None
        trust = 0
        for what, key, kind, order, body in await self._load_statement.fetch(
            mode,
            self._engine.space,
            texts(sorted(keys)),
            *_firsts(asked, heads),
            *_firsts(asked, others),
            texts([None if (kinds := asked[at].kinds) is None else _names_of(kinds) for at in others]),
            LOAD_BYTES,
        ):
            if body is not None:
                work.take_in(key, kind, body)
                if what >= 0:
                    found[what].append(key)
                    stood[what].append(order)
                else:
                    work.keyed.add(key)
            elif what == -1:  # it is there, and there was no room for it
                work.is_full = True
                keys.discard(key)
            elif what >= 0:
                cuts.add(what)
            elif what == -2:
                trust = order
            elif what == -3:
                work.order = self._block = order
                self._block_end = order + BLOCK
                self._engine.recall.numbers.drawn(order)
            else:
                due = order
        work.take_absent(keys)
        for at, first in enumerate(asked):
            work.take_shelf(first, found[at], at in cuts, stood[at] if first.is_plain else None)
        if trust != self._engine.known.learnt:
            await self._engine.known.learn(self._connection)
        work.trust = self._engine.trust  # another lane may have begun anew while this one looked
        return due

    async def _draw(self, work: Working, count: int) -> None:
        """So many numbers without a gap: others may draw between two of our blocks, and then we draw on."""
        assert self._connection is not None
        blocks = count // BLOCK + 1
        drawn: list[int] = []
        while len(drawn) < blocks:
            sql = "select nextval('block') as number from generate_series(1, $1)"
            for row in await self._connection.fetch(sql, blocks - len(drawn)):
                if drawn and row["number"] != drawn[-1] + BLOCK:
                    drawn.clear()
                drawn.append(row["number"])
        work.order = drawn[0]
        self._block = drawn[-1]
        self._block_end = drawn[-1] + BLOCK
        self._engine.recall.numbers.drawn(drawn[-1])

    async def _list(self, work: Working, listing: Listing) -> None:
        """Only which ones they are: each is loaded with its lock before anything is decided on it."""
        assert self._connection is not None
        if listing.method == "dialog_count":
            sender, recipient = listing.args
            work.lists[listing] = await self._connection.fetchval(DIALOG_COUNT, DIALOGS, f"{sender}/{recipient}")
        elif listing.method == "deep":
            found = await self._connection.fetch(DEEP, READY, max(listing.args[0], 0))
            work.lists[listing] = {row["key"]: row["depth"] for row in found}
        else:
            args = listing.args
            if listing.method == "due":  # enough for all the steps of one transaction
                args = (args[0], args[1] * EXPIRY_STEPS, list(self._engine.due.left))
            sql, values = only_keys(LISTINGS[listing.method](*args))
            work.lists[listing] = [row["key"] for row in await self._connection.fetch(sql, *values)]

    async def _mark_cards(self, work: Working, moved: Moved) -> None:
        """A card keeps its number when it is published again, and has none when it is withdrawn. So that others learn
        of it all the same, it stands among what is trusted under the number of this commit."""
        cards = [key for key in work.touched if key.startswith(CARD_PREFIX)]
        if cards:
            assert self._connection is not None
            sql = "delete from place where shelf = $1 and name = '' and key = any($2)"
            await self._connection.execute(sql, TRUST, cards)
            moved.taken = [(place, key) for place, key in moved.taken if key not in cards]
            moved.taken += [((TRUST, "", work.order), key) for key in cards]
            moved.moves = [move for move in moved.moves if move[2] not in cards]

    async def _save(self, work: Working, chain: Chain, mode: int) -> None:
        moved = self._moved = work.moved()
        await self._mark_cards(work, moved)
        moved.taken.sort()
        trust = work.order if mode == 2 else 0
        values = saved(work, moved, chain, trust)
        await self._save_statement.fetch(self.id, self.hash.decode(), *values, *on_loaded())
        self._pending = (chain.mark, chain.lines[-1].last)


def _may_follow(entry: Entry, need: Need, work: Working) -> bool:
    """Whether it may be decided behind others in a transaction: a listing shows what is committed. What a cascade lists
    is the same, as long as nothing was sent."""
    listings = [want for want in need.wanted if isinstance(want, Listing)]
    return not listings or (entry.is_step and not work.has_sent and all(map(is_of_children, listings)))


def _nothing_drawn(caller: str) -> int:
    """What is not going to be said draws nothing."""
    return 0


def _names_of(kinds: Iterable[str]) -> str:
    return _names.encode([kind_name(kind) for kind in kinds]).decode()


def _firsts(asked: Sequence[First], which: Sequence[int]) -> Sequence[str]:
    return (
        numbers(which),
        texts([asked[at].shelf.decode() for at in which]),
        texts([asked[at].name for at in which]),
        numbers([asked[at].limit for at in which]),
    )


async def _close(connection: asyncpg.Connection[Any]) -> None:
    try:
        await asyncio.wait_for(connection.close(), _CLOSE_S)
    except (*LOST, asyncpg.PostgresError, TimeoutError):
        connection.terminate()
