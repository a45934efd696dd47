"""A line that breaks: it passes bytes on, and hangs up after so many of them have come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit


class Cutter:
    def __init__(self, target: Callable[[], str]) -> None:
        self._target = target
        self.limits: list[int] = []  # bytes of answers on the next connections; then they hold
        self.cut = 0

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limit = self.limits.pop(0) if self.limits else -1
        there = urlsplit(self._target())
        try:
            answers, questions = await asyncio.open_connection(there.hostname, there.port)
        except OSError:
            writer.transport.abort()
            return
        asking = asyncio.ensure_future(_pump(reader, questions))
        try:
            while data := await answers.read(65536):
                piece = data if limit < 0 else data[:limit]
                writer.write(piece)
                await writer.drain()
                if limit >= 0 and len(data) >= limit:
                    self.cut += 1
                    return
                limit -= len(data) if limit >= 0 else 0
        except OSError:
            pass
        finally:
            asking.cancel()
            questions.transport.abort()
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def cutting(target: Callable[[], str]) -> AsyncIterator[tuple[Cutter, str]]:
    """The cutter, and the address under which the target is reached through it."""
    cutter = Cutter(target)
    working: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(cutter.pass_on(reader, writer))
        working.add(task)
        task.add_done_callback(working.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield cutter, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(working):
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
