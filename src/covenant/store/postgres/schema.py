"""The schema and its versions. Migrations go forward only; one daemon at a time runs them, the others wait."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

import asyncpg
from msgspec import Struct

from covenant.model.error import StoreUnavailable, UnsupportedFormat

_LOCK: Final = 0x436F7665  # one for all stores of a database: making a schema is rare
# Asked of the catalog itself: what a session once found absent by name, it remembers over the wait for a lock.
_COLUMNS: Final = """
    select a.attname::text as name from pg_attribute a join pg_class c on c.oid = a.attrelid
    join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = $1 and c.relname = 'meta' and a.attnum > 0 and not a.attisdropped
"""
_OURS: Final = {"version", "store"}  # by which our table is known, in any version
_FOLDER: Final = files("covenant.store.postgres") / "migrations"


class SchemaState(Struct, frozen=True):
    """`version` is 0 where there is no store yet."""

    schema: str
    version: int
    newest: int

    @property
    def is_current(self) -> bool:
        return self.version == self.newest


def migrations() -> dict[int, str]:
    """What leads to each version from the one before."""
    found = (file for file in _FOLDER.iterdir() if file.name.endswith(".sql"))
    return {int(file.name.removesuffix(".sql")): file.read_text() for file in sorted(found, key=lambda f: f.name)}


async def state_of(connection: asyncpg.Connection[Any], schema: str) -> SchemaState:
    try:
        columns = {row["name"] for row in await connection.fetch(_COLUMNS, schema)}
        is_ours = columns >= _OURS
        version = await connection.fetchval(f'select version from "{schema}".meta') if is_ours else 0
    except asyncpg.InsufficientPrivilegeError as refused:
        why = f"this role may not use the schema {schema}: its owner has to grant that ({refused})"
        raise StoreUnavailable(why, outcome="not_stored") from refused
    except asyncpg.LockNotAvailableError as locked:
        why = f"the schema {schema} is being changed or filled by somebody: try again when that is done"
        raise StoreUnavailable(why, outcome="not_stored") from locked
    if version is None or (columns and not is_ours):
        raise _somebody_elses(schema)
    return SchemaState(schema, version, max(migrations()))


async def checked(connection: asyncpg.Connection[Any], schema: str) -> SchemaState:
    """How it stands; refused where it is newer than this program."""
    found = await state_of(connection, schema)
    check(found)
    return found


async def check_current(connection: asyncpg.Connection[Any], schema: str) -> None:
    """For those who only read: there must be a store, and one that this program knows."""
    found = await checked(connection, schema)
    if not found.is_current:
        raise StoreUnavailable(f"there is no store of version {found.newest} in the schema {schema}")


async def migrate(connection: asyncpg.Connection[Any], schema: str) -> SchemaState:
    """Bring the store to the version of this program: all steps in one transaction, or nothing. Whoever comes at the
    same time waits, and finds it done."""
    before = await checked(connection, schema)
    if before.is_current:
        return before
    await connection.execute("set statement_timeout = 0; set lock_timeout = 0")
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock($1)", _LOCK)
        now = await checked(connection, schema)
        try:
            if not await connection.fetchval("select to_regnamespace($1) is not null", schema):
                await connection.execute(f'create schema "{schema}"')
            for version, sql in migrations().items():
                if version > now.version:
                    await connection.execute(sql)
                    await connection.execute("update meta set version = $1", version)
        except asyncpg.InsufficientPrivilegeError as refused:
            what = f"the schema {schema} must be made or changed, and this role may not"
            why = f"{what}: run `covenant db migrate` as its owner"
            raise StoreUnavailable(why, outcome="not_stored") from refused
        except (asyncpg.DuplicateTableError, asyncpg.DuplicateObjectError) as taken:
            raise _somebody_elses(schema) from taken
    await connection.execute("reset statement_timeout; reset lock_timeout")
    return await state_of(connection, schema)


def _somebody_elses(schema: str) -> StoreUnavailable:
    why = (
        f"the schema {schema} holds something else than a store: give the store one of its own (schema=NAME in its URL)"
    )
    return StoreUnavailable(why, outcome="not_stored")


def check(state: SchemaState) -> None:
    if state.version > state.newest:
        raise UnsupportedFormat(
            f"the store has schema version {state.version}; this program knows {state.newest}: update it",
            version=state.version,
        )
