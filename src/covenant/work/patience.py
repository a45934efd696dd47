"""Asking again, as long as the other side is away."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from covenant.mailbox import Mailbox
from covenant.model.error import (
    CovenantError,
    Draining,
    Internal,
    RateLimited,
    StoreClosed,
    StoreUnavailable,
    TooManyWaiters,
    Unreachable,
)

FIRST_DELAY_S = 0.05
_DELAY_S_MAX: Final = 5.0
_PASSING: Final = (Unreachable, StoreUnavailable, Draining, RateLimited, TooManyWaiters, Internal)

T = TypeVar("T")

log = logging.getLogger("covenant.worker")


class Patience:
    """Asks again while the other side is away. Whatever goes through here may be repeated."""

    def __init__(self, box: Mailbox) -> None:
        self._engine: Any = box._engine
        self._is_away = False

    async def until_answered(self, call: Callable[[], Awaitable[T]]) -> T:
        delay_s = FIRST_DELAY_S
        while True:
            try:
                answer = await call()
            except (*_PASSING, StoreClosed) as failed:
                if isinstance(failed, StoreClosed) and self._is_closed():
                    raise
                self._say(failed)
                wait_s = max(delay_s * random.uniform(0.5, 1), failed.details.get("retry_after_ms", 0) / 1000)
                await asyncio.sleep(min(wait_s, _DELAY_S_MAX))
                delay_s = min(2 * delay_s, _DELAY_S_MAX)
            else:
                self._is_away = False
                return answer

    def _is_closed(self) -> bool:
        """A daemon that was closed comes back; a box in this process does not."""
        return bool(getattr(self._engine, "is_closed", True))

    def _say(self, failed: CovenantError) -> None:
        """Once, as long as it lasts."""
        if not self._is_away:
            log.warning("waiting for the mailbox: %s (%s)", failed, failed.code)
        self._is_away = True
