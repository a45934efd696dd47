"""A line to a daemon, or from one to its database: it holds until it is told to break, at any byte of an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from tests.sockets import answering

Connect: TypeAlias = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Line:
    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._open: set[asyncio.StreamWriter] = set()
        self._left: int | None = None  # bytes of answers before it breaks
        self.broken = asyncio.Event()
        self.port = 0

    def cut(self) -> None:
        """All of its connections, now."""
        for writer in list(self._open):
            writer.transport.abort()
        self._left = None
        self.broken.set()

    def cut_after(self, size: int) -> None:
        """All of its connections, when so many bytes more have been answered: what was asked is done, and nobody hears
        of it."""
        self._left = size
        self.broken.clear()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, questions = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        both = {writer, questions}
        self._open |= both
        pumps = [
            asyncio.ensure_future(self._pump(reader, questions, are_answers=False)),
            asyncio.ensure_future(self._pump(answers, writer, are_answers=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open -= both
            for pump in pumps:
                pump.cancel()
            questions.close()  # what is on its way arrives: who hangs up has said why
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, are_answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if are_answers and self._left is not None:
                    if len(data) >= self._left:
                        self.cut()
                        return
                    self._left -= len(data)
                writer.write(data)
                await writer.drain()


@contextlib.asynccontextmanager
async def lined(connect: Connect) -> AsyncIterator[Line]:
    """To whom this leads at the moment; its own address stays."""
    line = Line(connect)
    async with answering(line.pass_on) as line.port:
        yield line
