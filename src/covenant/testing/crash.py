"""Deaths at every point: an agent is run in peace, and then again for each point at which its worker could die; what
there is in the end has to be the same. (Contract 24.)"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from covenant.agents.definition import Agent, TaskFunction
from covenant.agents.worker import WARM_MAX
from covenant.model.audit import Logged
from covenant.testing.life import Births, Life
from covenant.testing.script import Step
from covenant.testing.world import Moment, World

_LOGS: Final = ("covenant.agents", "covenant.worker")
_TIMEOUT_S: Final = 60.0


class Report(Struct, frozen=True):
    """`points`: at how many there was a death; `places`: where; `doubts`: how often somebody had to say what had become
    of a task or an effect. `outcome` is what the run came to, every time. Deaths at points between which nothing has
    happened to anybody but the dead leave the same behind, so there are fewer `runs` than points."""

    points: int
    runs: int
    places: dict[str, int]
    doubts: int
    outcome: dict[str, Any]


async def survives_crashes(
    agent: Agent,
    input: Any = None,
    *,
    tasks: Sequence[TaskFunction] = (),
    others: Sequence[TaskFunction] = (),
    script: Sequence[Step] = (),
    max_points: int | None = None,
    deaths: int = 1,
    warm_max: int = WARM_MAX,
    on_disk: bool = False,
    fresh_chance: bool = False,
) -> Report:
    """Kill the agent's worker at every point of its run, before and after every commit and wherever it waits, and show
    that nothing was lost or done twice. If something was, an AssertionError says where, and what.

    `script` is what happens to the run from outside, one thing each time it has come to rest; when it is over, `others`
    do the tasks that were sent to other agents, and time passes, until nothing more comes. `deaths` is how often a run
    dies, `max_points` at how many points, spread over the run. `warm_max` 0 calls the function from its first line
    whenever it goes on. `on_disk`: in a folder, which is opened anew as the disk had it. What `ctx.random` draws is the
    same in every run, or with `fresh_chance` never."""
    if not isinstance(agent, Agent):
        raise TypeError("an agent is needed: decorate the function with @agent")
    story = _Story(agent, input, tasks, others, script, warm_max, on_disk, fresh_chance)
    with Births(), _silence():
        peace = await story.tell()
        places: Counter[str] = Counter()
        runs = doubts = 0
        before: Moment | None = None
        for at in _spread(len(peace.points), max_points):
            moment = peace.moments[at - 1] if peace.moments else None
            if deaths == 1 and moment is not None and before is not None and moment.is_like(before):
                places[moment.place] += 1
                continue
            more = tuple(1 + (at + 7 * n) % len(peace.points) for n in range(1, deaths))
            told = await story.tell_on(peace, at, more)
            _compare(peace, told)
            places.update(told.deaths)
            runs += 1
            doubts += told.doubts
            before = moment
    return Report(places.total(), runs, dict(places), doubts, peace.outcome)


class _Told(Struct, frozen=True):
    """How a run went."""

    outcome: dict[str, Any]
    points: Sequence[str]  # of its first life
    deaths: Sequence[str]
    at: Sequence[int]
    faults: Sequence[str]
    doubts: int
    moments: Sequence[Moment] = ()
    log: Sequence[Logged] = ()


class _Story(Struct, frozen=True):
    agent: Agent
    input: Any
    tasks: Sequence[TaskFunction]
    others: Sequence[TaskFunction]
    script: Sequence[Step]
    warm_max: int
    on_disk: bool
    is_fresh: bool

    async def tell(self, dies_at: tuple[int, ...] = ()) -> _Told:
        """From the beginning."""
        with TemporaryDirectory(prefix="covenant-") if self.on_disk else nullcontext() as folder:
            world = self._world(None if folder is None else Path(folder))
            await world.open()
            return await self._tell(world, dies_at)

    async def tell_on(self, peace: _Told, at: int, dies_at: tuple[int, ...]) -> _Told:
        """From a death at this point. In memory what came before it need not be told again: what it left is known."""
        if self.on_disk:
            return await self.tell((at, *dies_at))
        world = self._world(None)
        moment = peace.moments[at - 1]
        await world.open_at(moment, peace.log)
        told = await self._tell(world, dies_at)
        return structs.replace(told, deaths=[moment.place, *told.deaths], at=[at, *told.at])

    def _world(self, folder: Path | None) -> World:
        return World(self.agent, self.input, self.others, self.script, folder, self.is_fresh)

    async def _tell(self, world: World, dies_at: tuple[int, ...]) -> _Told:
        lives: list[Life] = []
        keeps = not dies_at and not world.dead and not self.on_disk
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                for death in (*dies_at, None):
                    life = Life(world, self.agent, self.tasks, self.warm_max, death)
                    life.moments = [] if keeps else None
                    lives.append(life)
                    life.begin()
                    while (is_still := await life.until_still()) and await world.go_on():
                        pass
                    await life.end()
                    if is_still:
                        break
                    await world.reopen()
        except TimeoutError:
            raise AssertionError(f"after {_deaths_of(lives)} the run does not come to rest") from None
        finally:
            for life in lives:
                await life.end()
            outcome = await world.outcome()
            log = await world.log() if keeps else []
            await world.close()
        died = lives[:-1]
        return _Told(
            outcome,
            lives[0].points,
            [life.points[-1] for life in died],
            [len(life.points) for life in died],
            world.faults,
            world.doubts,
            lives[0].moments or [],
            log,
        )


def _deaths_of(lives: Sequence[Life]) -> str:
    return ", ".join(f"a death at point {len(life.points)} ({life.points[-1]})" for life in lives[:-1]) or "no death"


def _spread(points: int, limit: int | None) -> list[int]:
    if limit is None or limit >= points:
        return list(range(1, points + 1))
    return sorted({1 + at * (points - 1) // max(1, limit - 1) for at in range(limit)})


def _compare(peace: _Told, told: _Told) -> None:
    if told.outcome == peace.outcome and not told.faults and not peace.faults:
        return
    where = " and ".join(f"point {at}, {place}" for at, place in zip(told.at, told.deaths, strict=True))
    lines = [f"the worker died at {where}", *peace.faults, *told.faults]
    if told.at:
        before = peace.points[max(0, told.at[0] - 4) : told.at[0]]
        lines.append(f"the last points before it: {' | '.join(before)}")
    diff = unified_diff(_lines(peace.outcome), _lines(told.outcome), "in peace", "after the death", lineterm="")
    raise AssertionError("\n".join([*lines, *diff]))


def _lines(outcome: dict[str, Any]) -> list[str]:
    return msgspec.json.format(msgspec.json.encode(outcome), indent=1).decode().splitlines()


@contextmanager
def _silence() -> Iterator[None]:
    """What workers say of deaths that somebody wanted is no news."""
    loggers = [logging.getLogger(name) for name in _LOGS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
