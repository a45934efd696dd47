"""News of the log: one future for all who follow it."""

from __future__ import annotations

import asyncio


class Growth:
    def __init__(self) -> None:
        self.is_awaited = False  # somebody follows the log
        self._future: asyncio.Future[None] | None = None

    def future(self) -> asyncio.Future[None]:
        """Done when more of the log is durable, or the store has stopped. All who follow the log share it: it is waited
        for, and never cancelled."""
        if self._future is None:
            self.is_awaited = True
            self._future = asyncio.get_running_loop().create_future()
        return self._future

    def tell(self) -> None:
        if self._future is not None:
            self._future.set_result(None)
            self._future = None
            self.is_awaited = False
