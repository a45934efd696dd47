"""A line between a client and its daemon that loses answers when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from covenant.serve.daemon import Daemon


class Proxy:
    def __init__(self, daemon: Daemon, socket: Path | None) -> None:
        self.url = ""
        self.is_down = False
        self.loses: tuple[bytes, ...] = ()  # words: an answer that has one of them gets lost, and the line with it
        self.loses_every = 1  # of these answers, one in so many
        self.goes_down = False  # for good, with the first answer that gets lost
        self.may_answer = asyncio.Event()  # while it is not set, answers wait and nobody hangs up
        self.may_answer.set()
        self.may_read = asyncio.Event()  # the same for requests
        self.may_read.set()
        self.lost = 0
        self._met = 0
        self._daemon = daemon
        self._socket = socket
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Proxy]:
        if self._socket is not None:
            server = await asyncio.start_unix_server(self._serve, self._socket)
            self.url = f"unix:{self._socket}"
        else:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.may_answer.set()
            self.may_read.set()
            self.hang_up()
            if self._serving:
                await asyncio.wait(self._serving)

    def hang_up(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        if self.is_down:
            writer.transport.abort()
            return
        if self._socket is not None:
            there = await asyncio.open_unix_connection(str(self._daemon.settings.ipc))
        else:
            assert self._daemon.address is not None
            there = await asyncio.open_connection(*self._daemon.address)
        self._open |= {writer, there[1]}
        await asyncio.gather(self._pass(reader, there[1], False), self._pass(there[0], writer, True))
        self._open -= {writer, there[1]}

    def _gets_lost(self, answer: bytes) -> bool:
        if not any(word in answer for word in self.loses):
            return False
        self._met += 1
        if self._met % self.loses_every:
            return False
        self.lost += 1
        self.is_down = self.is_down or self.goes_down
        return True

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, are_answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await (self.may_answer if are_answers else self.may_read).wait()
                if are_answers and self._gets_lost(data):
                    break
                if self.is_down:
                    break
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
