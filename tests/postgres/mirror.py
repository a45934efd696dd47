"""A store on PostgreSQL for the programs that kill: its records can be looked at without asking, and its process can
die at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import asyncpg

from covenant.mailbox import Mailbox
from covenant.model.limits import Limits
from covenant.store.clock import Clock, RandomIds
from covenant.store.postgres.connection import Where, connect
from covenant.store.postgres.engine import Postgres
from covenant.store.postgres.entry import Entry
from covenant.store.postgres.moved import Moved
from covenant.store.postgres.rows import decoded
from covenant.store.postgres.schema import migrate
from covenant.store.postgres.view import Working
from covenant.store.state import State
from covenant.testing.world import World
from tests.postgres import server_url, settle, store_for


class Mirrored(Postgres):
    """What it commits, it also has in memory; those that share a memory have all of it there."""

    def __init__(self, url: str, clock: Clock, state: State, moved: asyncio.Event) -> None:
        super().__init__(url, Limits(), clock, RandomIds())
        self.state = state
        self._moved = moved

    def committed(self, entries: Iterable[Entry], work: Working, moved: Moved) -> None:
        for key in work.touched:
            record, known = work.records.get(key), self.state.records.get(key)
            if record is None or known is None or record.order >= known.order:
                self.state.put(key, record)  # type: ignore[arg-type]
        self.state.order = max(self.state.order, work.order)
        super().committed(entries, work, moved)
        self._moved.set()

    def die(self) -> None:
        """From this moment nothing more is asked of the database; what it was asked, it may still do."""
        self.is_closing = True
        self.queue.end()
        held = [lane._connection for lane in self._lanes] + [self._reader._connection]
        self._left = [connection.get_server_pid() for connection in held if connection and not connection.is_closed()]
        for connection in held:
            if connection is not None:
                connection.terminate()

    async def bury(self) -> None:
        """Once the server has noticed."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        self._bell.close()
        self._pulse.close()
        admin = await asyncpg.connect(server_url())
        for pid in self._left:
            await admin.execute("select pg_terminate_backend($1, 5000)", pid)
        await admin.close()


async def loaded(url: str) -> State:
    state = State()
    connection = await connect(Where.of(url))
    await migrate(connection, Where.of(url).schema)
    for row in await connection.fetch("select kind, ord, key, body from record order by ord, key"):
        state.restore(row["key"], decoded(row["kind"], row["body"]))
        state.order = row["ord"]
    await connection.close()
    return state


class SharedWorld(World):
    """The world of a run whose store is on PostgreSQL: it has a daemon of its own, which does not die."""

    engine: Mirrored  # type: ignore[assignment]

    async def open(self) -> None:
        self._url = await store_for(str(self._folder))
        self._state = await loaded(self._url)
        self._own = self._engine()
        await self._own.open()
        await super().open()

    def _engine(self) -> Mirrored:  # type: ignore[override]
        return Mirrored(self._url, self.clock, self._state, self.moved)

    def _look_at_store(self) -> None:
        super()._look_at_store()
        self.box = Mailbox(self._own, None, "world")

    def crash(self) -> None:
        self.engine.die()

    async def reopen(self) -> None:
        await self.engine.bury()
        self._state = self._own.state = await loaded(self._url)  # with what it had asked for and was not told of
        self.engine = self._engine()
        await self.engine.open()
        self._look_at_store()

    async def close(self) -> None:
        await self.engine.close()
        await self._own.close()

    async def go_on(self) -> bool:
        is_more = await super().go_on()
        for engine in (self._own, self.engine):
            await settle(engine)
        return is_more or self.engine.is_closing  # it died meanwhile
