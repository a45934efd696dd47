"""News of the log: one future for all who follow it."""

from __future__ import annotations

import asyncio


class Growth:
    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None  # there while somebody follows the log

    @property
    def is_awaited(self) -> bool:
        return self._future is not None

    def future(self) -> asyncio.Future[None]:
        """Done when more of the log is durable, or the store has stopped. All who follow the log share it: it is waited
        for, and never cancelled."""
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        return self._future

    def tell(self) -> None:
        if self._future is not None:
            self._future.set_result(None)
            self._future = None
