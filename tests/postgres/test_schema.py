"""The schema: who makes it, who may only use it, and how it goes forward."""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Final

import asyncpg
import pytest

from covenant import Mailbox
from covenant.cli.database import connected
from covenant.model.error import StoreUnavailable, UnsupportedFormat
from covenant.store.postgres import schema
from covenant.store.postgres.connection import Where, connect
from tests.cli.support import PROGRAM, environment, run
from tests.conformance.support import answer_next, drain, finish, keyed, plain
from tests.docs.support import blocks, page
from tests.postgres import started_server, store_url
from tests.postgres.servers import forget
from tests.postgres.support import as_role, role_name, sql

_TABLES: Final = "select relname from pg_class where relnamespace = to_regnamespace($1) order by 1"


def test_an_empty_database_is_made_a_store_and_said_to_be_one() -> None:
    store = store_url()
    missing = run("db", "status", "--store", store, "--json")
    assert missing.code == 1 and missing.json == {
        "kind": "db_state",
        "schema": Where.of(store).schema,
        "version": 0,
        "newest": 1,
        "current": False,
    }
    assert "run covenant db migrate" in run("db", "status", "--store", store).out
    made = run("db", "migrate", "--store", store, "--json")
    assert made.code == 0 and made.json["version"] == 1 and made.json["current"]
    assert run("db", "migrate", "--store", store, "--json").json == made.json
    assert run("db", "status", "--store", store).code == 0


async def test_what_this_program_cannot_read_is_neither_verified_nor_exported() -> None:
    store = store_url()
    for command in (("audit", "verify"), ("audit", "export")):
        missing = run(*command, "--store", store, "--json")
        assert (missing.code, missing.json["code"]) == (1, "store_unavailable")
        assert "there is no store of version 1" in missing.json["message"]
    run("db", "migrate", "--store", store)
    async with sql(store) as connection:
        await connection.execute("update meta set version = 99")
    for command in (("audit", "verify"), ("audit", "export")):
        newer = run(*command, "--store", store, "--json")
        assert (newer.code, newer.json["code"]) == (1, "unsupported_format")


def test_who_reads_an_export_may_take_time_and_may_leave() -> None:
    store = store_url()
    run("db", "migrate", "--store", store)

    async def fill() -> None:
        async with Mailbox.open(store) as box:
            await box.of("ann@lab").send_task(plain(box.of("bob@lab")))

    asyncio.run(fill())
    setting = "select current_setting('idle_in_transaction_session_timeout')"
    assert connected(store, lambda connection, where: connection.fetchval(setting)) == "0"
    reading, writing = os.pipe()
    os.close(reading)
    command = [*PROGRAM, "audit", "export", "--store", store]
    left = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert (left.returncode, left.stderr) == (1, b"")


@pytest.mark.parametrize(
    "theirs",
    [
        "create table meta (name text)",
        "create table meta (version int)",
        "create table meta (version text); insert into meta values ('2.1')",
        "create table meta (version int); insert into meta values (1)",
        "create view meta as select 1 as version",
        "create table record (name text)",
    ],
)
async def test_a_schema_of_somebody_else_is_said_to_be_one_and_left_alone(theirs: str) -> None:
    store = store_url()
    name = Where.of(store).schema
    async with sql(store) as connection:
        await connection.execute(f"create schema {name}; {theirs}")
        before = await connection.fetch(_TABLES, name)
        for command in ("db migrate", "audit verify", "audit export"):
            refused = await asyncio.to_thread(run, *command.split(), "--store", store, "--json")
            assert (refused.code, refused.json["code"]) == (1, "store_unavailable"), refused
            is_told = f"the schema {name} holds something else" in refused.json["message"]
            assert is_told or (command != "db migrate" and "there is no store" in refused.json["message"])
        assert await connection.fetch(_TABLES, name) == before


def test_what_is_no_database_is_wrong_usage() -> None:
    assert run("db", "status").code == 2
    wrong = run("db", "migrate", "--store", "file:./data", "--json")
    assert (wrong.code, wrong.json["code"]) == (2, "bad_setting")
    away = run("db", "status", "--store", "postgresql://127.0.0.1:1/x", "--json")
    assert (away.code, away.json["code"]) == (1, "store_unavailable")


def test_four_processes_migrate_an_empty_database_at_once() -> None:
    command = [*PROGRAM, "db", "migrate", "--store", store_url(), "--json"]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
        for _ in range(4)
    ]
    ended = [(*process.communicate(timeout=60), process.returncode) for process in started]
    assert [code for _, _, code in ended] == [0] * 4, ended
    assert len({out for out, _, _ in ended}) == 1


NEXT: Final = "alter table record add column note text; create table thing (id integer primary key)"


async def test_a_store_in_use_goes_forward_and_an_older_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_url()
    where = Where.of(store)
    async with Mailbox.open(store) as box:
        ann, bob = box.of("ann@lab"), box.of("bob@lab")
        before = (await ann.send_task(plain(bob))).task_id
        with monkeypatch.context() as newer:
            steps = schema.migrations()
            newer.setattr(schema, "migrations", lambda: {**steps, 2: NEXT})
            connection = await connect(where)
            assert (await schema.state_of(connection, where.schema)).version == 1
            assert (await schema.migrate(connection, where.schema)).version == 2
            assert (await schema.migrate(connection, where.schema)).is_current
            await connection.close()
        assert (await answer_next(bob)).task.id == before
        assert (await drain(ann)).task_id == before
        await finish(ann, bob, keyed(bob))
    with pytest.raises(UnsupportedFormat, match="has schema version 2; this program knows 1: update it"):
        await Mailbox.open(store)
    refused = run("db", "migrate", "--store", store, "--json")
    assert (refused.code, refused.json["code"], refused.json["version"]) == (1, "unsupported_format", 2)
    assert "update the program" in run("db", "status", "--store", store).out


async def test_a_step_that_fails_leaves_the_store_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_url()
    where = Where.of(store)
    assert run("db", "migrate", "--store", store).code == 0
    monkeypatch.setattr(schema, "migrations", lambda: {1: "", 2: NEXT, 3: "select 1 / 0"})
    connection = await connect(where)
    with pytest.raises(Exception, match="division by zero"):
        await schema.migrate(connection, where.schema)
    assert (await schema.state_of(connection, where.schema)).version == 1
    assert await connection.fetchval("select to_regclass('thing')") is None
    await connection.close()


# --- least rights ------------------------------------------------------------------------------------------


def granted(schema: str, role: str) -> str:
    """What the page tells the owner to run, for this schema and role."""
    (block,) = [block for block in blocks(page("postgres.md"), "sql") if "grant usage" in block]
    return block.replace("covenant_daemon", role).replace(" covenant", f" {schema}")


async def test_a_daemon_needs_no_right_beyond_those_of_the_page() -> None:
    store = store_url()
    role = role_name(store)
    assert run("db", "migrate", "--store", store).code == 0
    async with sql(store) as owner:
        await owner.execute(f"create role {role} login; {granted(Where.of(store).schema, role)}")
    limited = as_role(store, role)
    async with Mailbox.open(limited) as box:
        ann, bob = box.of("ann@lab"), box.of("bob@lab")
        await finish(ann, bob, keyed(bob))
        await box.compact(older_than_ms=0)
        assert (await box.recent_audit(10))[-1].kind
    assert run("audit", "verify", "--store", limited).code == 0
    async with sql(limited) as daemon:
        for forbidden in (
            "update log set at = 0",
            "drop table log",
            "create table more (id integer)",
            "delete from meta",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await daemon.execute(forbidden)


async def test_a_right_that_is_missing_is_said_to_be_one() -> None:
    store = store_url()
    role = role_name(store)
    assert run("db", "migrate", "--store", store).code == 0
    async with sql(store) as owner:
        await owner.execute(f"create role {role} login; {granted(Where.of(store).schema, role)}")
        await owner.execute(f"revoke insert on log from {role}")
    async with Mailbox.open(as_role(store, role)) as box:
        with pytest.raises(StoreUnavailable, match=r"a right is missing.* grant.*: permission denied for table log"):
            await box.of("ann@lab").send_task(plain(box.of("bob@lab")))


async def test_a_server_that_tells_nothing_of_its_wal_serves_all_the_same() -> None:
    server = started_server()
    store = store_url(server.get_uri())
    role = role_name(store)
    assert run("db", "migrate", "--store", store).code == 0
    async with sql(store) as owner:
        await owner.execute(f"create role {role} login; {granted(Where.of(store).schema, role)}")
        await owner.execute("revoke execute on function pg_catalog.pg_walfile_name(pg_lsn) from public")
    async with Mailbox.open(as_role(store, role)) as box:
        await finish(box.of("ann@lab"), box.of("bob@lab"), keyed(box.of("bob@lab")))
    forget(server)


async def test_without_the_right_to_make_the_schema_one_is_told_who_can() -> None:
    store = store_url()
    role = role_name(store)
    limited = as_role(store, role)
    async with sql(store) as owner:
        await owner.execute(f"create role {role} login")
    with pytest.raises(StoreUnavailable, match="run `covenant db migrate` as its owner"):
        await Mailbox.open(limited)
    assert run("db", "migrate", "--store", store).code == 0
    with pytest.raises(StoreUnavailable, match="may not use the schema"):
        await Mailbox.open(limited)
