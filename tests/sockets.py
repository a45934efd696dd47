"""A port of one's own, for as long as it is needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable


@contextlib.asynccontextmanager
async def answering(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """The port. What is still under way at the end is cancelled: the server itself would wait for it."""
    working: set[asyncio.Future[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(answer(reader, writer))
        working.add(task)
        task.add_done_callback(working.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(working):
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
