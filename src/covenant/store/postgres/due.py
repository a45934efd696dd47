"""What goes by the clock: when something is due, and what of it is left to somebody who holds it.

A timer stands for what is due next. When it fires, steps of `Expire` run until nothing is left that is due and free;
the lanes do the same before any command that finds something due. A record that somebody holds for long is left to
them, and tried again from time to time: it keeps nothing else from its end, and nobody looks for it all the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from covenant.model.command import Expire
from covenant.model.error import CovenantError
from covenant.model.record import Key
from covenant.store.clock import Clock, Timer
from covenant.store.embedded import SYSTEM
from covenant.store.postgres.queue import ASIDE_S
from covenant.store.postgres.reader import Reader
from covenant.store.postgres.rows import DUE

if TYPE_CHECKING:
    from covenant.store.postgres.engine import Postgres

EXPIRY_STEPS: Final = 20  # of the clock, in one transaction
HELD_MAX: Final = 500  # records that are left one by one; where more are held, all that is due is left
_NEXT: Final = """
    select ord from place where shelf = $1 and name = '' and key <> all($2::text[]) order by ord limit 1
"""

log = logging.getLogger("covenant.store")


class Due:
    def __init__(self, engine: Postgres, clock: Clock, reader: Reader) -> None:
        self._engine = engine
        self._clock = clock
        self._reader = reader
        self.turn = asyncio.Lock()  # of the lanes: one at a time says what the clock has to say
        self._timer: Timer | None = None
        self._timer_ms: int | None = None
        self._expiring: asyncio.Task[None] | None = None
        self.held: frozenset[Key] = frozenset()  # what somebody held when it was last tried
        self.left: frozenset[Key] = frozenset()  # what of that is not to be tried now
        self._is_all_left = False
        self._is_through = False  # what is free beside all that is left has ended
        self._again: asyncio.TimerHandle | None = None

    def close(self) -> None:
        self._set_timer(None)
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self.held = self.left = frozenset()  # whoever opens it again tries everything
        self._is_all_left = False

    # --- the timer ----------------------------------------------------------------------------------------

    def heed(self, due_ms: int) -> None:
        """Something is due then. An earlier time stays: who read this one may not have seen the last commit, and to
        wake up in vain does no harm."""
        if self._timer_ms is None or due_ms < self._timer_ms:
            self._set_timer(due_ms)

    def _set_timer(self, due_ms: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_ms = due_ms
        if due_ms is not None and not self._engine.is_closing:
            self._timer = self._clock.call_at(due_ms, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._engine.is_closing or self._timer_ms is None:
            return
        if self._timer_ms > self._clock.now_ms():
            self._set_timer(self._timer_ms)
            return
        self._timer_ms = None
        if not self._engine.is_on_time:  # the next look sets it again
            return
        self._expiring = self._engine.replies.begin(self._expire())
        self._expiring.add_done_callback(self._expired)

    def _expired(self, done: asyncio.Task[None]) -> None:
        if done is self._expiring:
            self._expiring = None

    @property
    def next_ms(self) -> int | None:
        """When something is due next, as far as is known; what is being ended is."""
        return 0 if self._expiring is not None else self._timer_ms

    async def passed(self) -> None:
        """Until what was due when this was asked has ended."""
        if self._expiring is not None:
            await asyncio.wait([self._expiring])

    async def _expire(self) -> None:
        try:
            while True:
                entries = [self._engine.submit(Expire(None), SYSTEM) for _ in range(EXPIRY_STEPS)]
                await asyncio.gather(*(entry.future for entry in entries))
                commit = entries[-1].commit
                if commit is None or not commit.events:
                    break
            self.held = self.left
            if self.left:
                self._is_through = True
                self._later()
            found = await self._reader.fetch(_NEXT, DUE, list(self.held))
            if found:
                self.heed(found[0]["ord"])
        except CovenantError as failed:
            log.warning("what is due is left for later: %s", failed)
            if self.held:
                self._later()

    # --- what somebody holds ------------------------------------------------------------------------------

    def leave(self, held: Collection[Key]) -> bool:
        """Somebody holds these. Whether the others can be ended: not where it is unknown what is held, or where more is
        than can be told apart."""
        left = self.left.union(held)
        self._is_all_left = not held or len(left) > HELD_MAX
        self.left = frozenset() if self._is_all_left else left
        self.held = frozenset() if self._is_all_left else self.held.union(held)
        self._is_through = False
        self._later()
        return not self._is_all_left

    def _later(self) -> None:
        if self._again is None and not self._engine.is_closing:
            self._again = asyncio.get_running_loop().call_later(ASIDE_S, self._try_again)

    def _try_again(self) -> None:
        """All of it, once everything beside it was: who begins anew before comes to no end where much is held."""
        self._again = None
        self._is_all_left = False
        if self._is_through:
            self.left = frozenset()
        if self._engine.is_on_time and not self._engine.is_closing:
            self._engine.replies.begin(self._expire())  # and nobody's question waits for it

    def has_come(self, now: int) -> bool:
        """Whether something is known to be due, or to be left that was."""
        return bool(self.held) or self._is_all_left or (self._timer_ms is not None and self._timer_ms <= now)

    async def comes_first(self, connection: asyncpg.Connection[Any], first_ms: int | None, now: int) -> bool:
        """Whether the clock has something to say before a command that finds this due first."""
        if first_ms is None or first_ms > now or self._is_all_left or not self._engine.is_on_time:
            return False
        if not self.held:
            return True
        beside: int | None = await connection.fetchval(_NEXT, DUE, list(self.held))
        return beside is not None and beside <= now
