"""When a house has come to rest: nothing of it is under way, and nothing is ready to be taken up. What happens next
comes from outside: a signal, an answer, or time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from covenant.agents.local import HOUSE
from covenant.model.agent import AgentId
from covenant.store.clock import ManualClock
from covenant.store.embedded import Embedded

HOUSE_KEY: Final = AgentId.named(HOUSE).pubkey
_TURNS: Final = 4  # for a worker to put away what it has let go of
_LEASES_MAX: Final = 10_000


def is_still(engine: Embedded, incarnation: str) -> bool:
    """Whether the worker of this incarnation holds nothing, and nothing waits for it."""
    state = engine.state
    if state.ready(HOUSE_KEY, 1):
        return False
    leased = state.leases(0, _LEASES_MAX, HOUSE_KEY)
    return all(record.lease is None or record.lease.incarnation != incarnation for record in leased)


async def until(is_so: Callable[[], bool], moved: asyncio.Event) -> None:
    """Until it is so, and is still so when everybody has had a few turns."""
    while True:
        while not is_so():
            moved.clear()
            await moved.wait()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if is_so():
            return


def next_time(engine: Embedded, now_ms: int) -> int | None:
    """When something comes due in the store, in time to come."""
    when = engine.state.due_times.next_ms()
    return when if when is not None and when > now_ms else None


def move_to(clock: ManualClock, when_ms: int) -> None:
    clock.advance(max(0, when_ms - clock.now_ms()))
