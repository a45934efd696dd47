"""The database goes away, comes back, or another takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import asyncpg
import pytest

from covenant import Mailbox
from covenant.model.error import StoreUnavailable
from covenant.store.postgres import engine as engines
from covenant.store.postgres.engine import Postgres
from tests.conformance.support import PATIENCE_MS, finish, plain, take
from tests.postgres import started_server
from tests.postgres.servers import forget, over_tcp, replica_of, socket_of


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110
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
    monkeypatch.setattr(engines, "BEAT_S", 0.1)
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
