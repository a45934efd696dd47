"""A line that breaks: it passes bytes on, and hangs up after so many of them have gone one way or the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import urlsplit

from tests.sockets import answering


class Cutter:
    def __init__(self, target: Callable[[], str]) -> None:
        self._target = target
        self.limits: Iterator[int] = iter(())  # bytes of answers on the next connections; then they hold
        self.asking_limits: Iterator[int] = iter(())  # the same for what is asked
        self.cut = 0
        self.on_cut: Callable[[], None] = lambda: None  # before either side can know

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked, answered = next(self.asking_limits, None), next(self.limits, None)
        there = urlsplit(self._target())
        try:
            answers, questions = await asyncio.open_connection(there.hostname, there.port)
        except OSError:
            writer.transport.abort()
            return
        pumps = [
            asyncio.ensure_future(self._pump(reader, questions, asked)),
            asyncio.ensure_future(self._pump(answers, writer, answered)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            questions.transport.abort()
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data[:left])
                await writer.drain()
                if left is not None and len(data) >= left:
                    self.cut += 1
                    self.on_cut()
                    return
                left = None if left is None else left - len(data)


@contextlib.asynccontextmanager
async def cutting(target: Callable[[], str]) -> AsyncIterator[tuple[Cutter, str]]:
    """The cutter, and the address under which the target is reached through it."""
    cutter = Cutter(target)
    async with answering(cutter.pass_on) as port:
        yield cutter, f"http://127.0.0.1:{port}"
