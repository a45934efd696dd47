"""The bell between daemons: who commits rings, who waits hears it. (NOTIFY here, on a connection of its own; LISTEN in
the pulse.)

A bell that is not heard costs time, never work: everybody looks by themselves every few seconds. So it rings behind the
commit, in a transaction that need not be durable, and never holds up anybody's commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import asyncpg
import msgspec

from covenant.store.postgres.connection import LOST, connect

if TYPE_CHECKING:
    from covenant.store.postgres.engine import Postgres

_NAMES_MAX: Final = 120  # in one ring: a payload is at most 8,000 bytes
_KEPT_MAX: Final = 10_000  # that could not be told yet
_AGAIN_S: Final = 0.5

log = logging.getLogger("covenant.store")


class Bell:
    def __init__(self, engine: Postgres) -> None:
        self._engine = engine
        self._hand: asyncpg.Connection[Any] | None = None
        self._rung: tuple[dict[str, None], dict[str, None], dict[str, None]] = ({}, {}, {})
        self._is_trust = False
        self._is_much = False  # more than is told by name: everybody looks
        self._stirred = asyncio.Event()

    def close(self) -> None:
        if self._hand is not None:
            self._hand.terminate()
        self._hand = None

    def ring(self, readied: Iterable[str], answered: Iterable[str], changed: Iterable[str], is_trust: bool) -> None:
        """Tell the others, soon, and of all that happened until then at once."""
        for names, new in zip(self._rung, (readied, answered, changed), strict=True):
            names.update(dict.fromkeys(new))
        self._is_trust = self._is_trust or is_trust
        if sum(map(len, self._rung)) > _KEPT_MAX:
            self._is_much = True
            for names in self._rung:
                names.clear()
        self._stirred.set()

    async def work(self) -> None:
        is_told = False
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            try:
                await self.tell()
                is_told = False
            except (*LOST, asyncpg.PostgresError) as lost:
                log.log(logging.INFO if is_told else logging.WARNING, "the bell does not ring: %s", lost)
                is_told = True
                self.close()  # it may have died without a word, and would be waited for
                await asyncio.sleep(_AGAIN_S)
                self._stirred.set()

    async def tell(self) -> None:
        """What was rung until now."""
        while any(self._rung) or self._is_trust or self._is_much:
            is_trust, self._is_trust = self._is_trust, False
            is_much, self._is_much = self._is_much, False
            told: list[list[str]] = []
            room = _NAMES_MAX
            for names in self._rung:
                told.append(list(islice(names, room)))
                room -= len(told[-1])
                for name in told[-1]:
                    del names[name]
            payload = [self._engine.member.id, is_trust, *((None, None, None) if is_much else told)]
            try:
                await self._say(msgspec.json.encode(payload).decode())
            except BaseException:
                self._is_much = self._is_much or is_much
                self.ring(told[0], told[1], told[2], is_trust)  # what could not be told is told again
                raise

    async def _say(self, payload: str) -> None:
        if self._hand is None or self._hand.is_closed():
            self._hand = await connect(
                self._engine.where, synchronous_commit="off", application_name=self._engine.member.session
            )
        await self._hand.execute("select pg_notify($1, $2)", self._engine.channel, payload)
