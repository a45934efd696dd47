"""What a daemon does again and again, whether anybody asks or not: it looks for what nobody rang for, goes on with what
a crash left half done, and lets go what is past its time.

Each round stands for itself: one that fails, or waits, keeps no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from covenant.model.command import CancelChildren, Command, EndGrants, SettleSlot, SweepRun
from covenant.model.error import CovenantError
from covenant.store.embedded import SYSTEM
from covenant.store.postgres.reader import Reader
from covenant.store.postgres.rows import CASCADES, DUE, FOLLOWERS, PUSHES, SWEEPS

if TYPE_CHECKING:
    from covenant.store.postgres.engine import Postgres

POLL_S: Final = 5.0  # the slow look, in case nobody rang
TIDY_S: Final = 60.0
_LOOK: Final = """
    select 'r' as what, n as name from unnest($1::text[]) n
        where exists (select 1 from place p where p.shelf = 'R' and p.name = n)
    union all select 'a', n from unnest($2::text[]) n
        where exists (select 1 from place p where p.shelf = 'A' and p.name = n)
    union all (select distinct 'u', name from place where shelf = $3)
    union all (select 'd', ord::text from place where shelf = $4 order by name, ord limit 1)
"""
_LEFT: Final = """
    (select shelf, key from place where shelf = $1 limit 100)
    union all (select shelf, key from place where shelf = $2 limit 100)
"""
# Slots whose result has not reached all their followers.
_UNSETTLED: Final = """
    select distinct p.name from place p join record r on r.key = p.name
    join place s on s.shelf = 'S' and s.name = '' and s.ord = r.ord and s.key = r.key
    where p.shelf = $1 limit 100
"""

log = logging.getLogger("covenant.store")


class Rounds:
    def __init__(self, engine: Postgres, reader: Reader) -> None:
        self._engine = engine
        self._reader = reader

    def all(self) -> Sequence[Coroutine[Any, Any, None]]:
        return self._keep_looking(), self._keep_going_on(), self._keep_house()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.look()
            except CovenantError as failed:
                log.warning("the database could not be looked at: %s", failed)
            except Exception:
                log.exception("the slow look failed")

    async def _keep_going_on(self) -> None:
        """Beside the look, which must not wait for a step that somebody holds up."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.go_on()
            except CovenantError as failed:
                log.warning("what was left half done is left for later: %s", failed)
            except Exception:
                log.exception("what was left half done could not be looked for")

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            try:
                if self._engine.is_on_time:
                    await self._engine.housekeeper.tidy()
            except CovenantError as failed:
                log.warning("what is past its time is left for later: %s", failed)
            except Exception:
                log.exception("what is past its time could not be forgotten")

    async def look(self) -> None:
        """What should have been noticed and may not have been."""
        engine = self._engine
        recipients, senders, tasks = engine.waking.waited_for()
        told_of: dict[str, list[str]] = {"r": [], "a": [], "u": [], "d": []}
        for what, name in await self._reader.fetch(_LOOK, recipients, senders, PUSHES, DUE):
            told_of[what].append(name)
        engine.waking.found(told_of["r"], told_of["a"])
        if told_of["d"] and engine.is_on_time:
            engine.due.heed(int(told_of["d"][0]))
        orders = await self._reader.fetch("select key, ord from record where key = any($1)", tasks) if tasks else ()
        engine.waking.saw({row["key"]: row["ord"] for row in orders})
        engine.hooks.replace(set(told_of["u"]))

    async def go_on(self) -> None:
        """With what a crash has left half done."""
        found = await self._reader.fetch(_LEFT, CASCADES, SWEEPS)
        steps: list[Command] = [
            CancelChildren(None, key) if shelf == CASCADES else SweepRun(None, key.split(":")[1])
            for shelf, key in found
        ]
        steps += [SettleSlot(None, row["name"]) for row in await self._reader.fetch(_UNSETTLED, FOLLOWERS)]
        steps += [EndGrants(None, pubkey) for pubkey in self._engine.trust.left_grants()]
        for step in steps:
            try:
                await self._engine.submit(step, SYSTEM).future
            except CovenantError as refused:  # one of them, and no reason to leave the others
                log.warning("a step is left for later: %s", refused)
