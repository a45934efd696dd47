"""The worker behind the published agent, in the test's hands."""

from __future__ import annotations

import asyncio
from typing import Any

from covenant.exchange.exchange import Exchange
from covenant.model import command as c
from covenant.model.peer import Caller
from covenant.model.task import Result
from covenant.model.view import Delivery


class Workplace:
    def __init__(self, exchange: Exchange, writer: Caller) -> None:
        self.exchange = exchange
        self.writer = writer

    async def lease(self) -> Delivery:
        command = self.exchange.lease(self.writer, None, "worker-1")
        async with asyncio.timeout(10):
            delivery: Delivery = (await self.exchange.take(self.writer, command, 5000))[0]
        return delivery

    async def work(self, command: c.Command) -> Any:
        return await self.exchange.run(self.writer, command)

    async def finish(self, delivery: Delivery, result: Result | None = None) -> Any:
        return await self.work(self.exchange.post(self.writer, result or Result.ok(delivery), "worker-1"))
