"""Receives whose answers were not heard, and what becomes of what they may have taken.

A receive goes under a receipt, a name that is made up for it. When its answer is lost, only the daemon knows whether
something was taken. So before the same agent takes anything more, the daemon is told to give that back; and it is told
so when the box is closed. An outage then leaves no lease behind that nobody knows of.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

from covenant.model.agent import AgentId
from covenant.model.error import CovenantError, RateLimited, StoreClosed, StoreUnavailable, Unreachable

_GIVE_BACK_S: Final = 5.0
_PASSING: Final = (Unreachable, StoreUnavailable, RateLimited)


class Unheard:
    def __init__(self, give_back: Callable[[str, AgentId | None], Awaitable[Any]]) -> None:
        self._give_back = give_back
        self._awaited: dict[str, AgentId | None] = {}
        self._lost: dict[str, AgentId | None] = {}  # nobody waits for these any more
        self._is_closed = False

    async def take(self, receipt: str, by: AgentId | None, ask: Callable[[str], Awaitable[list[Any]]]) -> list[Any]:
        """What is asked for under this receipt. A call that is cancelled takes nothing."""
        await self._settle(by)
        if self._is_closed:
            raise StoreClosed("the mailbox was closed")
        self._awaited[receipt] = by
        try:
            return await ask(receipt)
        except Unreachable as failed:
            if failed.details.get("outcome") != "not_sent":
                self._lost[receipt] = by
            raise
        except asyncio.CancelledError:
            self._lost[receipt] = by
            await _to_its_end(self._settle_in_time({receipt: by}))
            raise
        finally:
            del self._awaited[receipt]

    async def close(self) -> None:
        """Whoever still waits is answered by the daemon with nothing."""
        self._is_closed = True
        await self._settle_in_time({**self._awaited, **self._lost})

    async def _settle(self, by: AgentId | None) -> None:
        for receipt in [receipt for receipt, whose in self._lost.items() if whose == by]:
            await self._settle_one(receipt, by)

    async def _settle_one(self, receipt: str, by: AgentId | None) -> None:
        try:
            await self._give_back(receipt, by)
        except _PASSING:
            raise
        except CovenantError:
            pass  # who may not give it back may not receive either, and is told so there
        self._lost.pop(receipt, None)

    async def _settle_in_time(self, receipts: dict[str, AgentId | None]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_S):
                await asyncio.gather(*(self._settle_at_last(receipt, by) for receipt, by in receipts.items()))

    async def _settle_at_last(self, receipt: str, by: AgentId | None) -> None:
        """The line may break with the answer that is on its way: then once more, on a new one."""
        try:
            await self._settle_one(receipt, by)
        except _PASSING:
            with contextlib.suppress(*_PASSING):
                await self._settle_one(receipt, by)


async def _to_its_end(work: Awaitable[None]) -> None:
    """However often the caller is cancelled."""
    working = asyncio.ensure_future(work)
    while not working.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(working)
