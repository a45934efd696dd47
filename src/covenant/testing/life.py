"""One life of a worker, from its start to its death at a point that was chosen before.

A death is sudden for the store: from that moment nothing of the worker reaches it. The worker's tasks are ended with
what ends a task, and not with an error that the agent's code could take for one of its own; whatever they do on their
way out, they do in vain.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import structs

from covenant.agents.definition import Agent, TaskFunction
from covenant.agents.local import Local
from covenant.mailbox import Mailbox
from covenant.testing.gate import Gate, StillAgentWorker
from covenant.testing.rest import is_still, until
from covenant.testing.world import Moment, World
from covenant.worker import WorkContext

T = TypeVar("T")

_TURNS_MAX: Final = 1000
_COMMITS: Final = ("before a commit", "after a commit")  # which the gate sees for itself

_living: contextvars.ContextVar[Life | None] = contextvars.ContextVar("living", default=None)


class Life:
    def __init__(
        self, world: World, agent: Agent, tasks: Sequence[TaskFunction], warm_max: int, dies_at: int | None
    ) -> None:
        self.points: list[str] = []
        self.moments: list[Moment] | None = None  # kept when it is a list
        self.is_dead = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self._world = world
        self._dies_at = dies_at
        self._is_up = False
        gate = Gate(world.engine, world.moved, self.point, self._check)
        self._house = _House(
            agents=[agent],
            tasks=[_watched(function, world) for function in tasks],
            clock=world.clock,
            warm_max=warm_max,
            probe=self._probe,
            box=Mailbox(gate, None, "house"),
        )
        self._house._worker_type = partial(_WatchedWorker, world)

    def begin(self) -> None:
        context = contextvars.copy_context()
        context.run(_living.set, self)
        self._main = asyncio.get_running_loop().create_task(self._live(), context=context)
        self._main.add_done_callback(lambda _: self._world.moved.set())

    async def _live(self) -> None:
        async with self._house:
            self._is_up = True
            self._world.moved.set()
            await asyncio.Event().wait()

    def point(self, place: str) -> None:
        self._check()
        self.points.append(place)
        if self.moments is not None:
            self.moments.append(self._world.moment(place, self._house.worker.incarnation))
        if len(self.points) == self._dies_at:
            self._die()
            raise asyncio.CancelledError

    def _check(self) -> None:
        if self.is_dead:
            raise asyncio.CancelledError

    def _probe(self, place: str) -> None:
        if place not in _COMMITS:
            self.point(place)

    def _die(self) -> None:
        self.is_dead = True
        self._world.dead.add(self._house.worker.incarnation)
        self._world.crash()
        self._world.moved.set()

    async def until_still(self) -> bool:
        """Whether it has come to rest; if not, it has died."""
        await until(self._is_over_or_still, self._world.moved)
        return not self.is_dead

    def _is_over_or_still(self) -> bool:
        if self.is_dead:
            return True
        if self._main.done():
            self._main.result()
        return self._is_up and is_still(self._world.engine, self._house.worker.incarnation)

    async def end(self) -> None:
        """Clear away what is left of it."""
        self.is_dead = True
        for _ in range(_TURNS_MAX):
            left = [task for task in self.tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            await asyncio.sleep(0)
        else:
            raise AssertionError("the agent's code does not let itself be ended")
        for task in self.tasks:
            if not task.cancelled():
                task.exception()  # what the dead complain of is nobody's business


class _House(Local):
    _worker_type: Callable[..., StillAgentWorker]


class _WatchedWorker(StillAgentWorker):
    """One whose effects the world sees."""

    def __init__(self, world: World, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._world = world

    async def perform(self, function: Callable[..., Any], key: str, idempotent: bool) -> Any:
        return await self._world.perform(function, key, idempotent)

    def chance(self, key: str) -> bytes:
        return self._world.chance(key)


def _watched(function: TaskFunction, world: World) -> TaskFunction:
    async def watched(work: WorkContext, value: Any) -> Any:
        return await world.do(function, work, value)

    return structs.replace(function, function=watched, takes_context=True)


class Births:
    """While this is entered, the loop tells each life of the tasks that are born in it."""

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._before = self._loop.get_task_factory()
        self._loop.set_task_factory(self._make)

    def __exit__(self, *_: object) -> None:
        self._loop.set_task_factory(self._before)

    def _make(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
    ) -> asyncio.Future[T]:
        context: contextvars.Context | None = options.get("context")
        life = _living.get() if context is None else context.get(_living)
        task = asyncio.Task(work, loop=loop, **options)
        if life is not None:
            life.tasks.add(task)
        return task
