"""A house of agents for a test: the real engine in memory, and time that passes when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from covenant.agents.definition import Agent, TaskFunction
from covenant.agents.local import Local, RunHandle
from covenant.agents.worker import WARM_MAX
from covenant.mailbox import Mailbox
from covenant.model.limits import Limits
from covenant.model.run import EntrySeen, RunSeen, Signaled
from covenant.store.clock import ManualClock, RandomIds
from covenant.store.memory import Memory
from covenant.testing.gate import Gate, StillAgentWorker
from covenant.testing.rest import is_still, move_to, next_time, until

_PAGE: Final = 1000


class _StillLocal(Local):
    _worker_type = StillAgentWorker


class AgentTest:
    """`async with AgentTest(agents=[…], tasks=[…]) as test: run = await test.start(agent, input)`."""

    def __init__(
        self,
        *,
        agents: Sequence[Agent],
        tasks: Sequence[TaskFunction] = (),
        limits: Limits | None = None,
        warm_max: int = WARM_MAX,
    ) -> None:
        """With `warm_max` 0 every run that goes on is called from its first line."""
        self.clock = ManualClock()
        self._moved = asyncio.Event()
        self._engine = Memory(limits or Limits(), self.clock, RandomIds())
        gate = Gate(self._engine, self._moved)
        self.box = Mailbox(gate, None, RandomIds().lease())
        self.house: Local = _StillLocal(agents=agents, tasks=tasks, clock=self.clock, warm_max=warm_max, box=self.box)

    async def __aenter__(self) -> AgentTest:
        await self._engine.open()
        await self.house.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.house.__aexit__(kind, error, trace)
        await self._engine.close()

    async def start(self, agent: Agent | str, input: Any = None, *, run_id: str | None = None) -> RunHandle:
        return await self.house.start(agent, input, run_id=run_id)

    async def signal(self, run: RunHandle, name: str, value: Any = None, *, key: str | None = None) -> Signaled:
        return await run.signal(name, value, key=key)

    async def until_parked(self, run: RunHandle) -> RunSeen:
        """Until nothing of any run is under way: this one waits for something from outside, or has ended."""
        await self._rest()
        return await run.status()

    async def advance(self, ms: int) -> None:
        """Let time pass. Whatever comes due on the way happens at its time, and so does what follows from it."""
        target = self.clock.now_ms() + ms
        await self._rest()
        while (when := next_time(self._engine, self.clock.now_ms())) is not None and when <= target:
            move_to(self.clock, when)
            await self._rest()
        move_to(self.clock, target)
        await self._rest()

    async def entries(self, run: RunHandle) -> list[EntrySeen]:
        """All of them, on every branch, oldest first."""
        page = await self.box.run_entries(run.id, _PAGE, every=True)
        entries = list(page.entries)
        while page.before is not None:
            page = await self.box.run_entries(run.id, _PAGE, before=page.before, every=True)
            entries = [*page.entries, *entries]
        return entries

    async def _rest(self) -> None:
        await until(lambda: is_still(self._engine, self.house.worker.incarnation), self._moved)
