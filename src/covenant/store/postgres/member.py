"""This process as one of the daemons of a store: the name under which the others know it, and how they learn that it
came and went.

The others take one that is silent for dead. If it lives after all, it goes on under a new name, so that what was said
of the former one stays true.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import asyncpg

from covenant.model.daemon import DaemonState, DaemonView
from covenant.rules.context import Ids
from covenant.store.clock import Clock
from covenant.store.postgres.pulse import LAPSE_S, session_of
from covenant.store.postgres.reader import Reader
from covenant.store.process import label_of_process

_REGISTER: Final = """
    insert into daemon (id, pubkey, label, started_ms) values ($1, $2, $3, $4)
    on conflict (id) do update set seen = clock_timestamp() where daemon.ended is null returning id
"""
_OPEN_LANE: Final = f"""
    with mine as ({_REGISTER}) insert into lane (daemon, hash) select id, $5 from mine returning id
"""
_DAEMONS: Final = """
    select id, coalesce(pubkey, '') as pubkey, label, started_ms,
           (extract(epoch from seen) * 1000)::bigint as seen_ms,
           (extract(epoch from ended) * 1000)::bigint as ended_ms,
           case when proof = 'said' then 'ended'
                when proof = 'silent' or seen < clock_timestamp() - $1::text::interval then 'silent'
                else 'alive' end as state,
           (select count(*) from lane l where l.daemon = d.id) as lanes
    from daemon d where ended is null or ended > clock_timestamp() - interval '7 days'
    order by started_ms desc limit 1000
"""

log = logging.getLogger("covenant.store")


class Member:
    def __init__(self, ids: Ids, clock: Clock) -> None:
        self._ids = ids
        self._clock = clock
        self.id = ids.lease()
        self.pubkey: str | None = None  # of the key by which it signs, once it has one

    @property
    def session(self) -> str:
        """What the sessions of this daemon are called in the database."""
        return session_of(self.id)

    async def register(self, connection: asyncpg.Connection[Any]) -> None:
        await connection.execute(_REGISTER, *self._myself())

    async def open_lane(self, connection: asyncpg.Connection[Any], head: str) -> int:
        """A lane under this daemon's name; under a new one, if the others have taken it for dead."""
        while True:
            name = self.id
            lane: int | None = await connection.fetchval(_OPEN_LANE, *self._myself(), head)
            if lane is not None:
                return lane
            self.rename(name)

    def rename(self, name: str) -> None:
        """The others took the daemon of this name for dead."""
        if name == self.id:  # nobody else here has found that out meanwhile
            log.warning("others took this daemon for dead; it goes on under a new name")
            self.id = self._ids.lease()

    async def say_goodbye(self, connection: asyncpg.Connection[Any]) -> None:
        await connection.execute(
            f"""update daemon set ended = clock_timestamp(), proof = 'said' where id = '{self.id}';
            update lane set closed = true where daemon = '{self.id}'"""
        )

    def _myself(self) -> tuple[str, str | None, str, int]:
        return self.id, self.pubkey, label_of_process(), self._clock.now_ms()


async def everybody(reader: Reader) -> list[DaemonView]:
    """Everybody who has the store open, and who had it of late."""
    found = await reader.fetch(_DAEMONS, f"{LAPSE_S} seconds")
    return [DaemonView(**{**row, "state": DaemonState(row["state"])}) for row in found]
