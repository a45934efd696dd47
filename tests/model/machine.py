"""A random program over one mailbox: its own loop, folder, clock and ids; and a floor under how often each of its steps
is done, see tests/floors.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import wraps
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from tests.floors import reached, reaches

from covenant import CovenantError, Limits, Mailbox, OpenMailbox
from covenant.store.clock import CountingIds, ManualClock

T = TypeVar("T")
Step = Callable[..., None]
_steps: set[str] = set()  # of all machines, as `MailboxMachine.send`


def counted(does: Step) -> Step:
    """Count how often a rule is done, under its name. One that is a part of another does not count."""

    @wraps(does)
    def counting(self: Machine, *args: Any, **kwargs: Any) -> None:
        is_whole, self.is_in_step = not self.is_in_step, True
        if is_whole:
            reached(does.__name__)
        try:
            does(self, *args, **kwargs)
        finally:
            self.is_in_step = not is_whole

    _steps.add(does.__qualname__)
    return counting


def run(machine: type[Machine], bounds: settings, least: int) -> None:
    """Play random programs, each step of the machine at least that often over all of them."""
    floors = {name: least for kind in machine.__mro__ for name in vars(kind) if f"{kind.__qualname__}.{name}" in _steps}
    with reaches(**floors):
        run_state_machine_as_test(machine, settings=bounds)


class Machine(RuleBasedStateMachine):
    url: ClassVar[str] = "memory:"
    limits: ClassVar[Limits]
    is_in_step = False

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
