"""The bell between daemons: who commits rings, who waits hears it. (NOTIFY and LISTEN, on connections of their own.)

A bell that is not heard costs time, never work: everybody looks by themselves every few seconds. So it rings behind the
commit, in a transaction that need not be durable, and never holds up anybody's commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import asyncpg
import msgspec

from covenant.store.postgres.connection import LOST, connect

if TYPE_CHECKING:
    from covenant.store.postgres.engine import Postgres

_NAMES_MAX: Final = 120  # in one ring: a payload is at most 8,000 bytes
_AGAIN_S: Final = 0.5

log = logging.getLogger("covenant.store")


class Bell:
    def __init__(self, engine: Postgres) -> None:
        self._engine = engine
        self._channel = f"covenant_{engine.where.schema}"
        self._ears: asyncpg.Connection[Any] | None = None
        self._hand: asyncpg.Connection[Any] | None = None
        self._rung: tuple[dict[str, None], dict[str, None], dict[str, None]] = ({}, {}, {})
        self._is_trust = False
        self.leads = False  # it does what one daemon does for all
        self._stirred = asyncio.Event()

    async def open(self) -> None:
        self._ears = await connect(self._engine.where, application_name=self._engine.session)
        self._ears.add_termination_listener(lambda _: self._stirred.set())
        await self._ears.add_listener(self._channel, self._hear)

    async def try_to_lead(self) -> bool:
        """Whether this daemon leads from now on, and did not before. Who leads does so as long as its ears live: the
        server knows when they are gone, and lets the next one."""
        if self.leads or self._engine.pubkey is None or self._ears is None or self._ears.is_closed():
            return False  # one that is no daemon has none of that work to do
        try:
            self.leads = await self._ears.fetchval("select pg_try_advisory_lock($1, 3)", self._engine.space)
        except (*LOST, asyncpg.PostgresError):
            return False
        return self.leads

    async def close(self) -> None:
        self.leads = False
        for connection in (self._ears, self._hand):
            if connection is not None:
                connection.terminate()
        self._ears = self._hand = None

    def ring(self, readied: Iterable[str], answered: Iterable[str], changed: Iterable[str], is_trust: bool) -> None:
        """Tell the others, soon, and of all that happened until then at once."""
        for names, new in zip(self._rung, (readied, answered, changed), strict=True):
            names.update(dict.fromkeys(new))
        self._is_trust = self._is_trust or is_trust
        self._stirred.set()

    async def work(self) -> None:
        is_told = False
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            try:
                if self._ears is None or self._ears.is_closed():
                    await self.close()
                    await self.open()
                    self._engine.wake_all()
                await self._tell()
                is_told = False
            except (*LOST, asyncpg.PostgresError) as lost:
                log.log(logging.INFO if is_told else logging.WARNING, "the bell does not ring: %s", lost)
                is_told = True
                await asyncio.sleep(_AGAIN_S)
                self._stirred.set()

    async def _tell(self) -> None:
        rung, self._rung = self._rung, ({}, {}, {})
        is_trust, self._is_trust = self._is_trust, False
        ready, answered, changed = (list(names) for names in rung)
        while ready or answered or changed or is_trust:
            payload: list[Any] = [self._engine.daemon_id, is_trust]
            is_trust = False
            room = _NAMES_MAX
            for names in (ready, answered, changed):
                payload.append(names[:room])
                del names[:room]
                room -= len(payload[-1])
            if self._hand is None or self._hand.is_closed():
                self._hand = await connect(
                    self._engine.where, synchronous_commit="off", application_name=self._engine.session
                )
            await self._hand.execute("select pg_notify($1, $2)", self._channel, msgspec.json.encode(payload).decode())

    def _hear(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        try:
            who, is_trust, readied, answered, changed = msgspec.json.decode(payload)
        except (msgspec.MsgspecError, ValueError):
            self._engine.wake_all()
            return
        if who != self._engine.daemon_id:
            self._engine.rung(readied, answered, changed, is_trust)
