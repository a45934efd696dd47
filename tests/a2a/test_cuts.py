"""Streams that are cut at any byte, over every binding, while the daemon is killed and comes back: what a client puts
together is byte for byte what an uncut stream brings. (Contract 17.)"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import pytest

from covenant import Artifact, Part, WorkContext, Worker
from covenant.a2a import Task
from covenant.a2a.interface import JSONRPC
from tests.a2a.cutter import Cutter, cutting
from tests.a2a.house import House, housed
from tests.a2a.subscribers import SUBSCRIBERS, Cut, Heard, Subscribe

BYTES_MAX: Final = 2_500  # of answers, before a line is cut: a few events
LEAD_MAX: Final = 30  # events that the writer is ahead of the slowest


class Follower:
    """A client on a line that is cut so often, and what it has put together."""

    def __init__(self, subscribe: Subscribe, cutter: Cutter, url: str, cuts: int, chance: random.Random) -> None:
        self._subscribe = subscribe
        self._url = url
        self._cuts = cuts
        self.cutter = cutter
        cutter.limits = self._limits(chance)
        self.heard: list[Heard] = []

    def _limits(self, chance: random.Random) -> Iterator[int]:
        while self.is_to_be_cut:
            yield chance.randrange(BYTES_MAX)

    @property
    def is_to_be_cut(self) -> bool:
        return self.cutter.cut < self._cuts

    @property
    def known(self) -> int:
        return self.heard[-1].generation if self.heard else 1

    async def follow(self, house: House, task_id: str, moved: asyncio.Condition) -> None:
        while not (self.heard and self.heard[-1].is_last):
            await house.is_up.wait()
            try:
                async for heard in self._subscribe(house, self._url, task_id, self.known):
                    self.heard.append(heard)
                    await _tell(moved)
            except Cut:
                await _tell(moved)


async def _tell(moved: asyncio.Condition) -> None:
    async with moved:
        moved.notify_all()


def piece(number: int, chance: random.Random) -> Artifact:
    """Of any size, and not only plain text."""
    text = f"{number} " + "naïve 名前 \n\n" * chance.randrange(12)
    facts = {name: chance.choice([number, 0.5, None, "x", {"in": [1, 2], "deep": True}]) for name in "qwertz"}
    return Artifact(artifact_id="draft", parts=(Part(text=text), Part(data=facts)), metadata=facts)


async def cut_and_put_together(cuts: int, kills: int) -> None:
    """One task, followed by a client of each kind on a line of its own, until each was cut so often."""
    chance, moved = random.Random(cuts), asyncio.Condition()
    followers: dict[str, Follower] = {}

    async def write(ctx: WorkContext) -> str:
        """Sometimes ahead of the followers, sometimes waited for."""
        number = 0
        while any(follower.is_to_be_cut for follower in followers.values()):
            for _ in range(chance.randrange(1, LEAD_MAX)):
                number += 1
                if number > 1 and chance.random() < 0.2:
                    await ctx.update(f"{number} done")
                else:
                    await ctx.artifact(piece(number, chance), append=number > 1 and chance.random() < 0.9)
            least = 2 + number - chance.randrange(LEAD_MAX)
            async with moved:
                await moved.wait_for(lambda: min(one.known for one in followers.values()) >= least)  # noqa: B023
        return "done"

    async def kill(house: House) -> None:
        for count in range(1, kills + 1):
            due = count * cuts * len(followers) // (kills + 1)
            async with moved:
                await moved.wait_for(lambda: sum(one.cutter.cut for one in followers.values()) >= due)  # noqa: B023
            await house.kill()
            await house.start()

    async with housed() as house, AsyncExitStack() as stack:
        for name, (binding, subscribe) in SUBSCRIBERS.items():
            cutter, url = await stack.enter_async_context(cutting(partial(house.place, binding)))
            followers[name] = Follower(subscribe, cutter, url, cuts, random.Random(f"{cuts} {name}"))
        async with house.client(JSONRPC, house.url) as client:
            task = await client.send("write", blocking=False)
        assert isinstance(task, Task)
        async with house.box("writer") as writer, Worker(writer, write), asyncio.TaskGroup() as group:
            for follower in followers.values():
                group.create_task(follower.follow(house, task.id, moved))
            group.create_task(kill(house))

        await house.kill()
        await house.start(is_stranger=True)
        for name, (binding, subscribe) in SUBSCRIBERS.items():
            follower = followers[name]
            uncut = [heard async for heard in subscribe(house, house.place(binding), task.id, 1)]
            assert follower.cutter.cut == cuts, name
            assert [heard.generation for heard in uncut] == list(range(2, len(uncut) + 2)), name
            assert follower.heard == uncut, name


@pytest.mark.parametrize(
    ("cuts", "kills"),
    [pytest.param(60, 4, id="some"), pytest.param(1_000, 40, id="many", marks=pytest.mark.soak)],
)
async def test_a_stream_cut_anywhere_is_put_together_again_over_every_binding(cuts: int, kills: int) -> None:
    async with asyncio.timeout(10 * cuts):
        await cut_and_put_together(cuts, kills)
