"""A random program over one mailbox: its own loop, folder, clock and ids."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import ClassVar, TypeVar

from hypothesis.stateful import RuleBasedStateMachine

from covenant import CovenantError, Limits, Mailbox, OpenMailbox
from covenant.store.clock import CountingIds, ManualClock

T = TypeVar("T")


class Machine(RuleBasedStateMachine):
    url: ClassVar[str] = "memory:"
    limits: ClassVar[Limits]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = TemporaryDirectory(prefix="covenant-model-")
        self.clock = ManualClock()
        self.ids = CountingIds()
        self.wait(self.open())

    async def open(self) -> None:
        limits, clock, ids = self.limits, self.clock, self.ids
        self.box: OpenMailbox = await Mailbox.open(await self.address(), limits=limits, clock=clock, ids=ids)

    async def address(self) -> str:
        return self.url.format(folder=self.folder.name)

    def teardown(self) -> None:
        try:
            with suppress(CovenantError):
                self.wait(self.box.close())
        finally:
            self.loop.close()
            self.folder.cleanup()

    def wait(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return self.loop.run_until_complete(awaited())
