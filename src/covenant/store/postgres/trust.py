"""Whom this process trusts: the peers, grants, cards and the horizon of the store, held in memory.

A lane compares them with the store in every transaction and learns what is new. A store may also come to know less: a
replica that lacked the last commits took over, or a backup was put in its place. What was learnt from those commits
holds no more, so memory begins anew where the store's trust has gone back, or its history is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import asyncpg
from msgspec import Struct

from covenant.model import event as e
from covenant.model.peer import Peer
from covenant.model.record import Key
from covenant.rules.context import Context
from covenant.store.directory import Directory
from covenant.store.postgres.rows import TRUST, decoded

_STORE: Final = "select pg_is_in_recovery() as is_standby, store as lineage from meta"
# A promotion begins a new timeline, which the name of a WAL file tells.
_LINEAGE: Final = """
    select pg_is_in_recovery() as is_standby, (select store from meta) ||
        case when pg_is_in_recovery() then '' else ' ' || left(pg_walfile_name(pg_current_wal_lsn()), 8) end as lineage
"""
# Some managed servers keep their WAL to themselves: there, a store that has gone back is known by its trust alone.
_UNTOLD: Final = (
    asyncpg.InsufficientPrivilegeError,
    asyncpg.ObjectNotInPrerequisiteStateError,
    asyncpg.FeatureNotSupportedError,
    asyncpg.UndefinedFunctionError,
)
_ROWS: Final = """
    select p.ord, p.key, r.kind, r.body from place p left join record r on r.key = p.key
    where p.shelf = $1 and p.name = '' and p.ord > $2 order by p.ord
"""
TRUST_EVENTS: Final = frozenset(
    (
        e.Enrolled,
        e.ActionHeld,
        e.TokenRotated,
        e.PeerRevoked,
        e.Granted,
        e.GrantRevoked,
        e.GrantExpired,
        e.CardPublished,
        e.CardWithdrawn,
        e.Compacted,
    )
)  # they change whom to trust
_KEYS: Final = "select distinct pubkey from daemon where pubkey is not null"

log = logging.getLogger("covenant.store")


class _Read(Struct):
    trust: int
    records: list[tuple[int, Key, Any]]
    keys: set[str]


class Trust:
    def __init__(self, context: Context) -> None:
        self._context = context
        self.state = Directory()
        self.keys: set[str] = set()  # of daemons
        self.learnt = 0  # what the store called the last event that touched trust
        self._seen = 0  # the last one that was taken in: uses of grants are counted between those
        self._lineage: str | None = None
        self.on_lost: Callable[[str], None] = lambda pubkey: None
        self.on_anew: Callable[[], None] = lambda: None

    async def meet(self, connection: asyncpg.Connection[Any]) -> None:
        """A connection was made: to the store that is known, or to one with another history."""
        try:
            found = await connection.fetchrow(_LINEAGE)
        except _UNTOLD:
            found = await connection.fetchrow(_STORE)
        assert found is not None
        if found["is_standby"]:
            raise ConnectionError("this server is a standby, and cannot be written to")
        if found["lineage"] != self._lineage:
            read = await _read(connection, 0)
            if found["lineage"] != self._lineage:  # no other connection has found that out meanwhile
                self._begin_anew(read)
                self._lineage = found["lineage"]

    async def learn(self, connection: asyncpg.Connection[Any]) -> None:
        """As it is now. The connection must show what is committed at this moment, and not a snapshot from before."""
        while True:
            state, learnt, seen = self.state, self.learnt, self._seen
            read = await _read(connection, seen)
            if self.state is not state:
                raise ConnectionError("this connection is to a store that has gone back meanwhile")
            if read.trust < learnt:
                read = await _read(connection, 0)
                if self.state is state and self.learnt == learnt:
                    self._begin_anew(read)
                    return
            elif self.learnt == learnt:
                self._take_in(read)
                return

    def _take_in(self, read: _Read) -> None:
        self.keys |= read.keys
        for order, key, record in read.records:
            self.put(key, record)
            self._seen = max(self._seen, order)
        self.learnt = read.trust
        self._seen = max(self._seen, read.trust)

    def _begin_anew(self, read: _Read) -> None:
        before, self.state, self.keys, self._seen = self.state, Directory(), set(), 0
        # What is remembered of ways and grants goes by numbers of events, and those may come again.
        self._context.ways.clear()
        self._context.recalled.clear()
        self._take_in(read)
        if self._lineage is None:
            return
        log.warning("the store has gone back, or has another history: what is trusted is learnt anew from it")
        for key, known in before.records.items():
            if isinstance(known, Peer) and _is_lost(known, self.state.get(key)):
                self.on_lost(known.agent.pubkey)
        self.on_anew()

    def put(self, key: Key, record: Any) -> None:
        """Memory is told. What it knows already may be newer: another lane was faster."""
        known = self.state.get(key)
        if record is not None and known is not None and (record.order < known.order or record == known):
            return
        self.state.put(key, record)
        if isinstance(known, Peer) and isinstance(record, Peer) and _is_lost(known, record):
            self.on_lost(record.agent.pubkey)


async def _read(connection: asyncpg.Connection[Any], after: int) -> _Read:
    trust = await connection.fetchval("select trust from meta")  # before the look: no more is claimed than was seen
    found = await connection.fetch(_ROWS, TRUST, after)
    keys = await connection.fetch(_KEYS)
    records = [(order, key, None if kind is None else decoded(kind, body)) for order, key, kind, body in found]
    return _Read(trust, records, {row["pubkey"] for row in keys})


def _is_lost(known: Peer, now: object) -> bool:
    """Whether what was opened with this peer's token must end."""
    return not isinstance(now, Peer) or now.token != known.token or now.revoked_ms is not None
