"""What the store tells of a run: with every answer, and when it is asked in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from covenant.agents.error import Suspended
from covenant.agents.hold import LOST, Hold
from covenant.agents.inbox import Inbox
from covenant.agents.notes import Notes
from covenant.agents.times import Times
from covenant.agents.waits import Waits
from covenant.model.run import Standing, Wait

T = TypeVar("T")


class Lookout:
    def __init__(
        self, hold: Hold, notes: Notes, times: Times, inbox: Inbox, waits: Waits, drop: Callable[[], None]
    ) -> None:
        self.under_way = 0  # the run is held meanwhile; what they bring may be older than the last commit
        self._hold = hold
        self._notes = notes
        self._times = times
        self._inbox = inbox
        self._waits = waits
        self._drop = drop

    def absorb(self, standing: Standing) -> None:
        self._times.learn(standing.now_ms)
        self._notes.memory.outcomes.update((result.task_id, result) for result in standing.outcomes)
        self._inbox.learn(standing.signals)
        self._hold.cancel_requested = self._hold.cancel_requested or standing.cancel_requested

    async def look(self, wait: Wait) -> None:
        """See what is there, without waiting: of what has been committed."""
        hold, batch = self._hold, self._notes.batch
        sent = frozenset(i for i in wait.tasks if i not in batch.tasks)
        if wait.signals and (not hold.number or batch.takes):
            # A run hears what was said before it began once it has; and the next when it took one.
            await self._waits.flush()
        if sent or wait.signals:
            looked = Wait(sent, wait.first, wait.fail_fast, wait.signals, wait.until_ms)
            self.absorb(await self.look_up(lambda: hold.box.look_around(hold.lease_id, looked)))

    async def look_up(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask the store as the holder of the run: another place in the function may have parked it. Who has lost it is
        put away, and not told of an error that its code could catch."""
        self.under_way += 1
        try:
            if not self._hold.is_held:
                await self._waits.flush()
            return await self._hold.ask(call)
        except LOST as lost:
            self._drop()
            raise Suspended from lost
        finally:
            self.under_way -= 1
            self._hold.news.set()
