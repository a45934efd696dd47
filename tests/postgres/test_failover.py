"""The database goes away, comes back, or another takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import asyncpg
import pytest

from covenant import AgentId, CovenantError, Mailbox
from covenant.model import command as c
from covenant.model.error import StoreUnavailable
from covenant.model.peer import Caller, Role
from covenant.model.query import GetTask
from covenant.store.postgres import pulse as pulses
from covenant.store.postgres.connection import Where, borrowed
from covenant.store.postgres.engine import Postgres
from covenant.store.postgres.lane import Lane
from covenant.store.postgres.reader import Reader
from covenant.store.postgres.view import Working
from tests.conformance.support import PATIENCE_MS, finish, plain, take, uid
from tests.postgres import started_server, store_url
from tests.postgres.servers import forget, over_tcp, replica_of, socket_of
from tests.postgres.support import engine_of, sql, until

ANN, BOB = AgentId.named("ann@lab"), AgentId.named("bob@lab")


@asynccontextmanager
async def connected(server: Any) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(server.get_uri())
    try:
        yield connection
    finally:
        await connection.close()


async def said(connection: asyncpg.Connection[Any], sql: str, *values: Any) -> None:
    """Until the server says so."""
    async with asyncio.timeout(30):
        while not await connection.fetchval(sql, *values):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_server_without_tls_is_refused_where_tls_is_asked_for(certified: tuple[Path, Path]) -> None:
    server = started_server()
    with over_tcp(server) as port:
        plain_url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        for mode in ("require", f"verify-full&sslrootcert={certified[0]}"):
            with pytest.raises(StoreUnavailable, match="rejected SSL upgrade"):
                await Mailbox.open(f"{plain_url}?sslmode={mode}")
        async with Mailbox.open(f"{plain_url}?sslmode=prefer&schema=tls") as box:
            await finish(box.of("ann@lab"), box.of("bob@lab"), plain(box.of("bob@lab")))
    forget(server)


async def test_a_database_that_is_away_is_told_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulses, "BEAT_S", 0.1)
    server = started_server()
    async with Mailbox.open(f"{server.get_uri()}&schema=away") as box:
        store = box._engine
        assert isinstance(store, Postgres) and store.is_up
        await asyncio.to_thread(server.stop)
        await until(lambda: not store.is_up)
        await asyncio.to_thread(server.ensure_postgres_running)
        await until(lambda: store.is_up)
        await finish(box.of("ann@lab"), box.of("bob@lab"), plain(box.of("bob@lab")))
    forget(server)


async def test_what_a_replica_lacks_is_trusted_no_more() -> None:
    """Acknowledged by the primary, and lost with it: those who ran before know as much as those who come after."""
    primary = started_server()
    replica = await asyncio.to_thread(replica_of, primary)
    async with connected(replica) as standby, AsyncExitStack() as stack:
        hosts = {"host": f"{socket_of(primary)},{socket_of(replica)}", "port": "5432,5432"}
        url = (
            f"postgresql://postgres@/postgres?{urlencode({**hosts, 'target_session_attrs': 'read-write', 'lanes': 1})}"
        )
        box = await stack.enter_async_context(Mailbox.open(url))
        store = engine_of(box)
        lost: list[str] = []
        store.join("key of the realm", lost.append)
        await store.run(c.EnrollPeer(None, ANN, Role.PEER, "kept"))
        async with connected(primary) as owner:
            written = await owner.fetchval("select pg_current_wal_lsn()")
            await said(standby, "select pg_last_wal_replay_lsn() >= $1", written)
            await standby.execute("alter system set primary_conninfo = ''")
            await standby.execute("select pg_reload_conf()")
            await said(owner, "select not exists (select from pg_stat_replication)")
        await store.run(c.EnrollPeer(None, BOB, Role.PEER, "lost"))
        assert store.caller_of("lost") is not None
        await asyncio.to_thread(primary.stop)
        assert await standby.fetchval("select pg_promote()")
        other = engine_of(await stack.enter_async_context(Mailbox.open(url)))
        for number in range(50):  # so that trust has gone further than it had, by its numbers
            await other.run(c.EnrollPeer(None, AgentId.named(f"{number}@lab"), Role.PEER, f"new {number}"))
        await other.run(c.RevokePeer(None, ANN.pubkey, "a thief"))
        for token, agent in (("kept", ANN), ("lost", BOB)):
            with pytest.raises(CovenantError) as refused:
                await store.run(c.Call(Caller(agent, Role.PEER, token), c.LeaseTasks(agent, agent, "worker", 1)))
            assert refused.value.code == "unauthenticated"
            assert store.caller_of(token) is None
        assert set(lost) == {ANN.pubkey, BOB.pubkey}
    forget(primary, replica)


async def test_a_store_whose_trust_has_gone_back_is_believed() -> None:
    """As when a backup was put in its place, with the connections as they were."""
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as box, sql(url) as owner:
        store = engine_of(box)
        await store.run(c.EnrollPeer(None, ANN, Role.PEER, "kept"))
        await store.refresh()
        before = store.known.learnt
        await store.run(c.EnrollPeer(None, BOB, Role.PEER, "lost"))
        await store.refresh()
        await owner.execute("delete from place where shelf = 'N' and ord > $1", before)
        await owner.execute("delete from record where kind = 'e' and ord > $1", before)
        await owner.execute("update meta set trust = $1", before)
        with pytest.raises(CovenantError) as refused:
            await store.run(c.Call(Caller(BOB, Role.PEER, "lost"), c.LeaseTasks(BOB, BOB, "worker", 1)))
        assert refused.value.code == "unauthenticated"
        assert (store.caller_of("lost"), store.known.learnt) == (None, before)
        assert store.caller_of("kept") is not None


@pytest.mark.parametrize("part", [Lane, Reader])
async def test_a_store_that_somebody_else_here_found_gone_back_is_believed(
    part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a command or a question was on its way: its own look finds nothing new."""
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as box, sql(url) as owner, borrowed(Where.of(url)) as other:
        store = engine_of(box)
        await store.run(c.EnrollPeer(None, BOB, Role.PEER, "lost"))
        await store.refresh()
        load = part._load

        async def late(self: Any, work: Working, *more: Any) -> Any:
            if store.known.learnt:
                await owner.execute("delete from place where shelf = 'N'; update meta set trust = 0")
                await store.known.learn(other)
            return await load(self, work, *more)

        monkeypatch.setattr(part, "_load", late)
        caller = Caller(BOB, Role.PEER, "lost")
        lease = c.Call(caller, c.LeaseTasks(BOB, BOB, "worker", 1))
        with pytest.raises(CovenantError) as refused:
            await (store.run(lease) if part is Lane else store.ask(GetTask(BOB, uid(1)), caller))
        assert refused.value.code == "unauthenticated"


async def test_a_replica_takes_over_with_everything_that_was_acknowledged() -> None:
    """Two hosts in the URL; the one that can be written to is looked for."""
    primary = started_server("synchronous_commit = on\n")
    replica = await asyncio.to_thread(replica_of, primary)
    owner = await asyncpg.connect(primary.get_uri())
    await owner.execute("alter system set synchronous_standby_names = '*'")
    await owner.execute("select pg_reload_conf()")
    await owner.close()
    hosts = {"host": f"{socket_of(primary)},{socket_of(replica)}", "port": "5432,5432"}
    more = {**hosts, "target_session_attrs": "read-write", "schema": "both"}
    async with Mailbox.open(f"postgresql://postgres@/postgres?{urlencode(more)}") as box:
        ann, bob = box.of("ann@lab"), box.of("bob@lab")
        sent = [(await ann.send_task(plain(bob, f"{n}"))).task_id for n in range(20)]
        await asyncio.to_thread(primary.stop)
        standby: Any = await asyncpg.connect(replica.get_uri())
        await standby.execute("alter system set synchronous_standby_names = ''")
        await standby.execute("select pg_reload_conf()")
        assert await standby.fetchval("select pg_promote()")
        await standby.close()
        assert [(await take(bob)).task.id for _ in sent] == sent
        await ann.send_task(plain(bob, "after"))
        assert await bob.recv_tasks(1, wait_ms=PATIENCE_MS)
    forget(primary, replica)
