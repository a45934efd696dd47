"""The load on an A2A server, in a process of its own: blocking SendMessage over JSON-RPC from many clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Final

from bench.history import Turns
from bench.serve.client import HttpConnection, Load, UnexpectedReply, itself
from bench.serve.load import HOST
from bench.serve.seats import Served
from bench.work import INTENT, Figures, Tally, Window

_OVERTIME_S: Final = 30.0
_COMPLETED: Final = b"TASK_STATE_COMPLETED"
_BODY: Final = (
    '{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{"message":'
    '{"messageId":"%s","role":"ROLE_USER","parts":[{"text":"%s"}]}}}'
)


class MessageLoad(Load, HttpConnection):
    """One client: it sends, waits for the completed task, and sends again."""

    def __init__(self, token: str, number: int, tallies: list[Tally]) -> None:
        super().__init__()
        self._token = token
        self._name = f"m{number:04}"
        self._numbers = count()
        self._tallies = tallies
        self._start = 0.0

    def _request(self) -> bytes:
        body = _BODY % (f"{self._name}-{next(self._numbers):08}", INTENT)
        head = (
            f"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self._token}\r\na2a-version: 1.0\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return (head + body).encode()

    def _begin(self) -> None:
        self._start = perf_counter()
        self.write(self._request())

    def replied(self, body: bytes) -> None:
        if _COMPLETED not in body:
            raise UnexpectedReply(body[:400])
        now = perf_counter()
        tally = self._tallies[0]
        tally.note(self._start, now)
        if now >= tally.window.end:
            self.end()
        else:
            self._begin()


async def messages(
    folder: Path, server: str, connections: int, warm_s: float, seconds: float, turns: Turns
) -> AsyncIterator[Figures]:
    served = Served.read(Path(server))
    tallies: list[Tally] = []
    tokens = [seat.token for seat in served.seats] or [""]
    loads = [MessageLoad(tokens[n % len(tokens)], n, tallies) for n in range(connections)]
    loop = asyncio.get_running_loop()
    for load in loads:
        await loop.create_connection(itself(load), HOST, served.port)
    yield {"clients": len(loads)}
    async for _ in turns:
        window = Window(warm_s, seconds)
        tallies[:] = [Tally(window)]
        async with asyncio.timeout(seconds + _OVERTIME_S):
            for load in loads:
                load.begin()
            await asyncio.gather(*(load.done for load in loads))
        yield tallies[0].figures()
