"""Batches of commands: each is tried until every one of its commands is answered.

Others may be at the same records, the line may be cut, a record may be held by somebody for long. A batch is tried
again as a whole, then each of its commands by itself; one that wants what somebody holds is put aside, so that the
others go on, and whoever has waited long enough is told what is known of the outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final

import asyncpg

from covenant.model import command as c
from covenant.model.error import CovenantError, StoreUnavailable
from covenant.model.record import Key
from covenant.store.embedded import SYSTEM
from covenant.store.postgres.connection import LANE_CLOSED, LOG_AHEAD, LOST, RETRIED, told
from covenant.store.postgres.due import EXPIRY_STEPS
from covenant.store.postgres.entry import Entry, observed
from covenant.store.postgres.lane import DueFirst, Lane, Tried

if TYPE_CHECKING:
    from covenant.store.postgres.engine import Postgres

TRIES_MAX: Final = 40
TOGETHER_MAX: Final = 8  # tries of a whole batch; then each command stands for itself
HELD_S: Final = 0.4  # or once they have waited so long for what somebody holds; one alone is put aside
HURRIED_S: Final = 0.05  # the same while others are aside

log = logging.getLogger("covenant.store")


class Batches:
    """Those of one lane."""

    def __init__(self, engine: Postgres, lane: Lane) -> None:
        self._engine = engine
        self._lane = lane

    async def work(self) -> None:
        engine, lane = self._engine, self._lane
        while True:
            batch = await engine.queue.next_batch(lane.own, lane.rest)
            if not batch:
                return
            try:
                try:
                    async with engine.ahead.whole(is_lane=True):
                        await self._do(batch)
                finally:
                    engine.queue.done(batch)
                if engine.ahead.is_worth_it:
                    await engine.ahead.begin(lane)
            except asyncio.CancelledError:
                for entry in batch:
                    entry.fail(unknown() if lane.is_in_doubt else engine.closed_error())
                raise
            except Exception as failed:  # a fault of ours must not leave anybody waiting for ever
                log.exception("a batch could not be decided")
                await (lane.end_chain() if lane.is_in_doubt else lane.close())
                for entry in batch:
                    entry.fail(told(failed, "unknown"))

    async def _do(self, batch: list[Entry]) -> None:
        """Until every command is answered, or given back to the queue."""
        queue, lane, tried = self._engine.queue, self._lane, Tried()
        loop = asyncio.get_running_loop()
        tries, begun_s = 0, loop.time()
        may_recall = True
        while batch:
            if batch[0].is_exclusive and len(batch) > 1:
                queue.put_back(batch[1:])
                batch = batch[:1]
            try:
                if may_recall:
                    may_recall = False
                    batch = batch[await lane.transact_recalled(batch) :]
                    continue
                done = await lane.transact(batch, tried)
            except DueFirst:
                await self._expire()
                tried.heeds_clock = False
                continue
            except RETRIED as conflict:
                if lane.is_in_doubt:  # of a commit: how that ended has to be looked for
                    recovered = await self.recover(batch, conflict)
                    batch = [entry for entry in batch[recovered:] if not entry.is_over]
                    continue
                tries += 1
                batch[0].tries += 1
                if held := await self._known_to_be_held(batch[0], tried):
                    batch = self._go_on_without(held, batch, tried, conflict)
                    continue
                now_s = loop.time()
                if tries >= TRIES_MAX or (len(batch) == 1 and batch[0].until_s <= now_s):
                    _give_up(batch, StoreUnavailable(f"others are always at it: {conflict}", outcome="not_stored"))
                    return
                held_s = HURRIED_S if queue.hurries else HELD_S
                if now_s - begun_s >= held_s or batch[0].is_aside:
                    batch = await self._part_with_held(batch, tried, conflict)
                elif len(batch) > 1 and tries >= TOGETHER_MAX:
                    batch = self._part(batch, tried)
                if tries > 1:
                    await asyncio.sleep(min(0.001 * tries, 0.02))
                continue
            except LOST as lost:
                recovered = await self.recover(batch, lost)
                batch = [entry for entry in batch[recovered:] if not entry.is_over]
                if batch and recovered:
                    queue.put_back(batch)
                    return
                continue
            except asyncpg.PostgresError as failed:
                if failed.sqlstate == LANE_CLOSED:
                    await lane.end_chain()
                    continue
                if failed.sqlstate == LOG_AHEAD:
                    self._engine.ahead.is_owed = True
                    continue
                if len(batch) > 1:  # one of them is the cause: each on its own
                    batch = self._part(batch, tried)
                    continue
                log.warning("the database refused a commit: %s", failed)
                _give_up(batch, told(failed, "not_stored"))
                return
            batch = batch[done:]
            if batch and done:
                queue.put_back(batch)
                return

    def _part(self, batch: list[Entry], tried: Tried) -> list[Entry]:
        """Each of the batch stands for itself from now on: what it asks for, and not what the others did."""
        tried.asked.clear()
        self._engine.queue.put_back(batch[1:], alone=True)
        return batch[:1]

    async def _part_with_held(self, batch: list[Entry], tried: Tried, conflict: BaseException) -> list[Entry]:
        """One of the batch wants what somebody holds for long. Each stands for itself from now on; one that does is put
        aside, so that others go on. What is left to do here."""
        first, rest = batch[0], batch[1:]
        if type(first.command) is c.Expire:
            stuck = await self._stuck_at(tried)
            if not stuck and not tried.is_one_by_one:
                tried.is_one_by_one = True
                return batch
            return self._go_on_without(stuck, batch, tried, conflict)
        if rest:
            for entry in batch:
                entry.is_aside = True  # whichever of them want it: they have waited for it once
            return self._part(batch, tried)
        if first.is_exclusive or first.lane is not None:
            return [first]
        self._engine.queue.put_aside(first)
        return []

    # --- what is due --------------------------------------------------------------------------------------

    async def _expire(self) -> None:
        """What the clock has to say, first of all, and by one lane at a time."""
        engine = self._engine
        async with engine.due.turn:
            while True:
                steps = [engine.entry(c.Expire(None), SYSTEM) for _ in range(EXPIRY_STEPS)]
                for step in steps:
                    step.have_patience()
                    step.future.add_done_callback(observed)
                await self._do([*steps])
                ended = [step.commit is not None and bool(step.commit.events) for step in steps if not step.is_over]
                is_cut = not steps[-1].is_over and steps[-1].commit is None  # there was no room for all
                if not any(ended if is_cut else ended[-1:]):
                    break

    async def _known_to_be_held(self, first: Entry, tried: Tried) -> Collection[Key]:
        """Of what is due: somebody held it before, and still does. It is not waited for again."""
        known = self._engine.due.held
        return known & await self._stuck_at(tried) if known and type(first.command) is c.Expire else ()

    async def _stuck_at(self, tried: Tried) -> set[Key]:
        """Which of what is due cannot be ended now."""
        held = await self._lane.held_of(tried.due)
        return held or ({tried.stuck} if tried.stuck is not None else set())

    def _go_on_without(
        self, held: Collection[Key], batch: list[Entry], tried: Tried, conflict: BaseException
    ) -> list[Entry]:
        """Somebody holds these, which are due, or what goes with them: the steps of the clock end the others."""
        steps = [entry for entry in batch if type(entry.command) is c.Expire]
        self._engine.queue.put_back([entry for entry in batch if entry not in steps])
        tried.asked.clear()
        tried.stuck = None
        if self._engine.due.leave(held):
            return steps
        _give_up(steps, StoreUnavailable(f"somebody holds what is due: {conflict}", outcome="not_stored"))
        return []

    # --- a line that was cut ------------------------------------------------------------------------------

    async def recover(self, batch: list[Entry], lost: BaseException) -> int:
        """The connection was lost. How many of the batch were committed all the same. Who has waited long enough is
        told, and is over; where nobody is left who waits, what became of the commit is not looked for any more."""
        lane, loop = self._lane, asyncio.get_running_loop()
        outcome = "unknown" if lane.is_in_doubt else "not_stored"
        await lane.close()
        while not self._engine.is_closing:
            try:
                return await lane.recover(batch)
            except (*LOST, asyncpg.PostgresError) as still:
                lost = still
                await lane.close()
            _give_up([entry for entry in batch if entry.until_s <= loop.time()], told(lost, outcome))
            if all(entry.is_over for entry in batch):
                break
            await asyncio.sleep(0.1)
        _give_up(batch, told(lost, outcome))
        await lane.end_chain()  # whatever became of it
        return 0


def _give_up(batch: Iterable[Entry], failure: CovenantError) -> None:
    for entry in batch:
        entry.fail(type(failure)(failure.message, **failure.details))


def unknown() -> CovenantError:
    return StoreUnavailable("the mailbox was closed while this was being committed", outcome="unknown")
