"""Where the tests of agents happen: a store or a daemon, whose agent is bob, whom alice asks and carol helps.

A test waits for a run to stand somewhere, and never for time to pass: whatever a worker does, it tells the house.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from covenant import Answer, Json, Mailbox, OpenMailbox, QueueEntry, Task
from covenant.agents import Agent, AgentContext, AgentWorker, RunFailed, TaskFunction, values
from covenant.model.command import AddMessage
from covenant.model.error import NotARun
from covenant.model.message import Message, Part
from covenant.model.protocol import TaskShown
from covenant.model.query import GetDialog
from covenant.model.record import Outcome
from covenant.model.run import EntrySeen, RunSeen, RunStatus
from covenant.model.task import Result
from covenant.model.view import Dialog
from covenant.store.clock import ManualClock

PATIENCE_S: Final = 30
PAUSE: Final = "pause"
COLD: Final = 0
WARM: Final = 1000
PARKED: Final = frozenset(
    (RunStatus.AWAITING_INPUT, RunStatus.AWAITING_WORK, RunStatus.EFFECT_IN_DOUBT, RunStatus.CHILD_IN_DOUBT)
)


class House:
    """`store` is at the bottom of it; `url` and `tokens`: how its workers come in, if it is not in this process;
    `a2a_url`: where it speaks A2A."""

    def __init__(
        self,
        box: OpenMailbox,
        clock: ManualClock,
        warm_max: int,
        store: Any,
        url: str | None = None,
        tokens: dict[str, str] | None = None,
        a2a_url: str = "",
    ) -> None:
        self.box = box
        self.store = store
        self.a2a_url = a2a_url
        self.clock = clock
        self.alice, self.bob, self.carol = (box.of(f"{name}@lab") for name in ("alice", "bob", "carol"))
        self.places: list[str] = []
        self._warm_max = warm_max
        self._url = url
        self.tokens = tokens or {}
        self._moved = asyncio.Event()

    @property
    def is_cold(self) -> bool:
        """Whether a function is called from its first line each time that its run is taken up."""
        return self._warm_max == COLD

    def worker(self, *agents: Agent, tasks: Sequence[TaskFunction] = (), name: str = "bob", **more: Any) -> AgentWorker:
        where: str | Mailbox = self.box.of(f"{name}@lab")
        if self._url is not None:
            where, more["token"] = self._url, self.tokens[f"{name}@lab"]
        options = {"warm_max": self._warm_max, "clock": self.clock, "probe": self.hear, **more}
        return AgentWorker(where, agents=agents, tasks=tasks, **options)

    def hear(self, place: str) -> None:
        self.places.append(place)
        self._moved.set()

    # --- runs ---------------------------------------------------------------------------------------------

    async def begin(self, agent: Agent | str, input: Any = None, **more: Any) -> str:
        name = agent if isinstance(agent, str) else agent.name
        task = Task(
            recipient=self.bob.agent,
            intent_text=name,
            task_kind=name,
            content=(Json(values.plain(input)),),
            **{"id": str(uuid.uuid4()), **more},
        )
        await self.alice.send_task(task)
        return task.id

    async def through(self, agent: Agent, input: Any = None, *, tasks: Sequence[TaskFunction] = ()) -> tuple[str, Any]:
        """A run from beginning to end: whenever it pauses, it is told to go on. Its id, and what it returned."""
        async with self.worker(agent, tasks=tasks):
            run_id = await self.begin(agent, input)
            while (await self.until(run_id, RunStatus.AWAITING_INPUT, RunStatus.ENDED)).outcome is None:
                await self.signal(run_id, PAUSE)
            return run_id, await self.result(run_id)

    async def say(self, run_id: str, text: str, *, signal: str | None = None, message_id: str | None = None) -> None:
        """As an A2A client says something to a task."""
        message = user_message(text, signal=signal, message_id=message_id)
        await self.store.run(AddMessage(self.alice.agent, run_id, message, None))

    async def signal(self, run_id: str, name: str, value: Any = None, *, key: str | None = None) -> bool:
        """Whether it had been told before."""
        return (await self.alice.signal_run(run_id, name, value, key=key)).duplicate

    async def until(
        self, run_id: str, *statuses: RunStatus, is_so: Callable[[RunSeen], bool] = lambda _: True
    ) -> RunSeen:
        """Until the run stands there, or waits for whatever."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self._moved.clear()
                seen = await self._seen(run_id)
                if seen is not None and seen.status in (statuses or PARKED) and is_so(seen):
                    return seen
                generation = 1 if seen is None else seen.generation
                moving = asyncio.create_task(self._moved.wait())
                telling = asyncio.create_task(self.alice.wait_generation(run_id, generation, wait_ms=1000))
                await asyncio.wait((moving, telling), return_when=asyncio.FIRST_COMPLETED)
                moving.cancel()
                telling.cancel()
                await asyncio.wait((moving, telling))

    async def paused(self, run_id: str) -> None:
        """Until the run waits for nothing but to be told to go on."""
        await self.until(run_id, is_so=lambda seen: list(seen.awaits) == [f"signal {PAUSE}"])

    async def until_task(self, task_id: str, is_so: Callable[[QueueEntry], bool]) -> QueueEntry:
        """Until a task of a run has come so far."""
        async with asyncio.timeout(PATIENCE_S):
            entry = await self.box.get_task(task_id)
            while not is_so(entry):
                entry = await self.box.wait_generation(task_id, entry.generation, wait_ms=1000)
        return entry

    async def _seen(self, run_id: str) -> RunSeen | None:
        try:
            return await self.bob.get_run(run_id)
        except NotARun:
            if await self.alice.get_result(run_id) is not None:
                await self.result(run_id)  # it failed before it was one
            return None

    async def answer(self, run_id: str) -> Answer:
        """How it ended, whatever way."""
        async with asyncio.timeout(PATIENCE_S):
            generation = 0
            while (answer := await self.alice.get_result(run_id)) is None:
                generation = (await self.alice.wait_generation(run_id, generation, wait_ms=1000)).generation
        return answer

    async def result(self, run_id: str) -> Any:
        answer = await self.answer(run_id)
        if answer.status == "error":
            raise RunFailed(run_id, answer.error_message or "")
        return values.value_of(answer.result)

    async def outcome(self, run_id: str) -> Outcome | None:
        await self.answer(run_id)
        return (await self.alice.get_task(run_id)).outcome

    async def failure(self, run_id: str) -> str:
        answer = await self.answer(run_id)
        assert answer.status == "error"
        return answer.error_message or ""

    async def entries(self, run_id: str, *, every: bool = False) -> list[EntrySeen]:
        return list((await self.bob.run_entries(run_id, every=every)).entries)

    async def told(self, run_id: str, *, every: bool = False) -> list[tuple[str, Any]]:
        """The roles and contents of the entries on the way to the leaf."""
        return [(entry.role.value, content_of(entry)) for entry in await self.entries(run_id, every=every)]

    async def roles(self, run_id: str) -> list[str]:
        return [entry.role.value for entry in await self.entries(run_id)]

    async def shown(self, run_id: str) -> TaskShown:
        """The task as the A2A protocol shows it."""
        dialog: Dialog = await self.store.ask(GetDialog(None, run_id, None, True, True))
        return dialog.task

    # --- tasks --------------------------------------------------------------------------------------------

    async def help(self, name: str = "carol") -> _Help:
        """The next task that a run has given to carol."""
        box = getattr(self, name)
        taken = await box.recv_tasks(1, wait_ms=PATIENCE_S * 1000)
        assert taken, "no task came"
        return _Help(box, taken[0])


class _Help:
    def __init__(self, box: Mailbox, delivery: Any) -> None:
        self._box = box
        self.delivery = delivery
        self.task: Task = delivery.task
        self.input = values.input_of(delivery.task)

    async def answers(self, value: Any = None) -> None:
        await self._box.send_result(Result.ok(self.delivery, values.blocks_of(value)))

    async def fails(self, message: str = "broken") -> None:
        await self._box.send_result(Result.error(self.delivery, message))


def content_of(entry: EntrySeen) -> Any:
    return msgspec.json.decode(entry.content) if entry.message is None else values.content_of(entry.message)


def user_message(text: str, *, signal: str | None = None, message_id: str | None = None) -> Message:
    return Message(
        message_id=message_id or str(uuid.uuid4()),
        role="ROLE_USER",
        parts=(Part(text=text),),
        metadata=None if signal is None else {"signal": signal},
    )


async def pause(ctx: AgentContext) -> None:
    """Be put away, and taken up again."""
    await ctx.wait_for_signal(PAUSE)
