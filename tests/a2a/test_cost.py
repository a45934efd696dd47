"""What things cost, as ratios with room for a busy machine: a piece costs the same however many there are, and a long
task is not gathered where nobody asked for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from covenant import Limits
from covenant.model import command as c
from tests.a2a.conftest import Town, piece, says
from tests.a2a.towns import place

TRIES = 4


async def _pieces(town: Town, lease_id: str, count: int) -> float:
    """Processor time, which a busy machine does not stretch."""
    began = time.process_time()
    for _ in range(count):
        await town.work(c.AddArtifact(None, lease_id, piece("x" * 40), append=True))
    return time.process_time() - began


@pytest.mark.parametrize("kept_in", ["memory", "file"])
async def test_a_piece_costs_the_same_however_many_there_are(kept_in: str, tmp_path: Path) -> None:
    """Twice as many take at most 2.2 times as long."""
    ratios: list[float] = []
    for n in range(TRIES):
        limits = Limits(finished_tail_max=256, archive_batch=256)
        async with place(kept_in, tmp_path / f"{n}", limits).opened() as town:
            await town.send()
            lease_id = (await town.lease()).lease_id
            first = await _pieces(town, lease_id, 1000)
            second = await _pieces(town, lease_id, 1000)
        ratios.append((first + second) / first)
        if ratios[-1] <= 2.2:
            return
    raise AssertionError(f"{ratios}")


async def test_a_message_to_a_long_task_costs_what_it_costs_to_a_short_one(tmp_path: Path) -> None:
    async with place("memory", tmp_path).opened() as town:
        short, long = (await town.send()).id, (await town.send()).id
        leases = [(await town.lease()).lease_id for _ in range(2)]
        await _pieces(town, leases[1], 3000)

        async def talk(task_id: str) -> float:
            began = time.process_time()
            for _ in range(40):
                message = says(task_id=task_id)
                command = c.AddMessage(town.alice.agent, task_id, message)
                await town.operations._check_there(town.alice, town.agent, task_id)
                await town.exchange.run(town.alice, command)
            return time.process_time() - began

        ratios = [await talk(long) / await talk(short) for _ in range(TRIES)]
        assert min(ratios) < 3, ratios
