"""Daemon and worker killed in the middle of a streamed task: who follows it sees every event once, nothing is handed
out again by itself, and after the operator's repair it comes to its end. (Contract 2, 13, 17.)"""

from __future__ import annotations

import asyncio
import random
from multiprocessing.connection import Connection
from typing import Final

import pytest

from covenant import Mailbox, TaskState, WorkContext, Worker
from covenant.a2a import Client, Event, State, Task
from covenant.a2a.interface import JSONRPC, REST
from tests.a2a.cutter import cutting
from tests.a2a.house import House, housed
from tests.beings import Being, until_hung_up
from tests.conformance.support import requeue

PIECES: Final = 20
LONG: Final = "a long one"
SHORT: Final = "a short one"
ROUND_S: Final = 60


async def write(ctx: WorkContext) -> None:
    """The first attempt at something long has no end: it can only die."""
    number = 0
    while ctx.text == LONG and (ctx.attempt == 1 or number < PIECES):
        await ctx.artifact(_piece(ctx.attempt, number), name="draft", append=number > 0)
        number += 1


def _piece(attempt: int, number: int) -> str:
    return f"attempt {attempt}, piece {number}"


def work(line: Connection, url: str, token: str) -> None:
    """A worker in a process of its own."""

    async def main() -> None:
        async with Mailbox.open(url, token=token) as box, Worker(box, write):
            await until_hung_up(line)

    asyncio.run(main())


def hire(house: House) -> Being:
    return Being(work, house.socket, house.tokens["writer"])


async def repair(house: House, client: Client, task_id: str) -> Being:
    """Somebody works again, but not on what the dead one held, until the operator has said so."""
    async with Mailbox.open(house.socket) as operator:
        left = await operator.get_task(task_id)
        assert (left.state, left.attempt) == (TaskState.IN_FLIGHT, 1)
        worker = hire(house)
        other = await client.send(SHORT)
        assert isinstance(other, Task) and other.state == State.COMPLETED
        assert await operator.get_task(task_id) == left
        await requeue(operator, task_id)
    return worker


async def followed_over_deaths(house: House, client: Client, pieces: int, daemon_first: bool) -> list[Event]:
    """What the client sees of a task whose worker and daemon die when it has seen so many pieces."""
    events: list[Event] = []
    workers: list[Being] = []

    async def die_and_repair(task_id: str) -> None:
        if daemon_first:
            await house.kill()
        workers[0].kill()
        await workers[0].end()
        if not daemon_first:
            await house.kill()
        await house.start()
        workers.append(await repair(house, client, task_id))

    async with asyncio.timeout(ROUND_S), asyncio.TaskGroup() as group:
        async for event in client.send_and_follow(LONG):
            events.append(event)
            if event.task is not None:
                workers.append(hire(house))
            if event.generation == 2 + pieces:
                group.create_task(die_and_repair(event.task_id))
    workers[1].kill()
    await workers[1].end()
    return events


def check(events: list[Event], pieces: int) -> None:
    assert [event.generation for event in events] == list(range(1, len(events) + 1))
    assert not any(event.missed for event in events)
    states = [event.status_update.status.state for event in events if event.status_update is not None]
    assert states == [State.WORKING, State.SUBMITTED, State.WORKING, State.COMPLETED]
    texts = [event.artifact_update.artifact.parts[0].text for event in events if event.artifact_update is not None]
    before = len(texts) - PIECES
    assert before >= pieces
    assert texts == [_piece(1, n) for n in range(before)] + [_piece(2, n) for n in range(PIECES)]


def points(count: int) -> list[tuple[int, bool, str]]:
    """After how many pieces, who dies first, and how the client speaks."""
    chance = random.Random(count)
    return [(chance.randrange(200), chance.random() < 0.5, chance.choice((JSONRPC, REST))) for _ in range(count)]


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param([(0, True, JSONRPC), (1, False, REST), (7, True, REST), (60, False, JSONRPC)], id="some"),
        pytest.param(points(100), id="many", marks=pytest.mark.soak),
    ],
)
async def test_a_streamed_task_is_seen_whole_when_daemon_and_worker_are_killed(
    deaths: list[tuple[int, bool, str]],
) -> None:
    async with housed() as house, cutting(lambda: house.url) as (_, url):
        for pieces, daemon_first, binding in deaths:
            async with house.client(binding, url) as client:
                events = await followed_over_deaths(house, client, pieces, daemon_first)
                check(events, pieces)
                uncut = [event async for event in client.follow(events[0].task_id, 1)]
                assert events[1:] == uncut
                [draft] = (await client.get(events[0].task_id)).artifacts
                assert [part.text for part in draft.parts] == [_piece(2, n) for n in range(PIECES)]
