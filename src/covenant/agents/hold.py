"""The hold of a worker on a run: its lease, how far the run has come, and how the mailbox is asked for it.
(Contract 23.)"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from covenant.agents.error import Suspended
from covenant.agents.host import Host
from covenant.model.error import CovenantError, LeaseSuperseded, TaskTerminal, Unauthenticated, UnknownLease
from covenant.model.run import RunLoaded

T = TypeVar("T")

LOST: Final = (LeaseSuperseded, TaskTerminal, UnknownLease, Unauthenticated)

log = logging.getLogger("covenant.agents")


class Hold:
    def __init__(self, run_id: str, host: Host) -> None:
        self.run_id = run_id
        self.box = host.box
        self.probe = host.probe
        self.lease_id = ""
        self.number = 0  # of the last commit
        self.is_held = False  # else the run is parked, or somebody else's
        self.is_dropped = False  # the function was put away
        self.is_resuming = False
        self.cancel_requested = False
        self.news = asyncio.Event()  # something has happened: look again what there is to do
        self._host = host
        self._aside: set[asyncio.Future[Any]] = set()

    def learn(self, loaded: RunLoaded) -> None:
        self.number = loaded.step
        self.is_resuming = loaded.step > 0
        self.cancel_requested = loaded.cancel_requested

    def check_alive(self) -> None:
        if self.is_dropped:
            raise Suspended
        self.probe("an operation")

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._host.patiently(call)

    def wake(self) -> None:
        """Another place in the function has more to do while the run is parked."""

        async def wake() -> None:
            try:
                await self.ask(lambda: self.box.wake_run(self.run_id))
            except CovenantError as refused:
                log.info("run %s could not be woken: %s", self.run_id, refused.code)

        self.beside(wake())

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)
        return task
