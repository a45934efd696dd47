"""A client that works through every death of its daemon.

It sends to the other, and receives, answers and drains for itself, each call again until it is acknowledged; what was
acknowledged it writes to its log, one line a call, after the call has returned. It ends when its line is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any, TextIO
from uuid import uuid4

from covenant import AgentId, CovenantError, Mailbox, Result, Task, Text
from covenant.model.error import Draining, StoreClosed, StoreError, Unreachable
from tests.beings import until_hung_up

_AGAIN = (Unreachable, StoreError, Draining)


class Client:
    def __init__(self, url: str, token: str, me: str, other: str, log: TextIO) -> None:
        self._url = url
        self._token = token
        self._me = me
        self._other = AgentId.named(other)
        self._log = log
        self._is_over = asyncio.Event()

    def end(self) -> None:
        self._is_over.set()

    async def work(self) -> None:
        box = await self._insist(lambda: Mailbox.open(self._url, token=self._token).__aenter__())
        while not self._is_over.is_set():
            task = Task(id=str(uuid4()), recipient=self._other, intent_text=f"work of {self._me}")
            await self._insist(lambda: box.send_task(task))  # noqa: B023
            self._note("sent", task.id)
            for delivery in await self._insist(lambda: box.recv_tasks(4, wait_ms=0)):
                self._note("leased", delivery.task.id, delivery.lease_id)
                result = Result.ok(delivery, [Text("done")])
                await self._insist(lambda: box.send_result(result))  # noqa: B023
                self._note("posted", delivery.task.id)
            for answer in await self._insist(lambda: box.recv_results(4, wait_ms=0)):
                self._note("drained", answer.task_id)

    def _note(self, *words: str) -> None:
        print(*words, file=self._log, flush=True)

    async def _insist(self, call: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await call()
            except StoreClosed:
                raise
            except _AGAIN:
                await asyncio.sleep(0.02)
            except CovenantError as refusal:
                self._note("refused", refusal.code)
                raise


async def main(line: Connection, client: Client) -> None:
    working = asyncio.create_task(client.work())
    over = asyncio.create_task(until_hung_up(line))
    await asyncio.wait((working, over), return_when=asyncio.FIRST_COMPLETED)
    client.end()
    await asyncio.wait([working], timeout=20)
    working.cancel()


def work(line: Connection, url: str, token: str, me: str, other: str, log: str) -> None:
    with open(log, "w") as file:
        asyncio.run(main(line, Client(url, token, me, other, file)))
