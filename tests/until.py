"""Waiting for what tells nobody: a thread, or the other end of a line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PATIENCE_S = 60


async def until(is_true: Callable[[], Awaitable[bool] | bool]) -> None:
    """Turn after turn of the loop."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = is_true()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0)
