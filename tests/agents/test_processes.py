"""Agents in processes of their own, killed and frozen with real signals. (Contract 22-24.)"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import uuid
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pytest

from covenant import Limits, Mailbox, Task
from covenant.agents import AgentContext, AgentWorker, agent, task
from covenant.model.content import Json
from covenant.model.run import EntrySeen
from tests.a2a.house import SMALL, House, housed
from tests.beings import Being, until_hung_up

_PATIENCE_S: Final = 300
_STEPS: Final = 200
_LAPSE_MS: Final = 700


def _scripted(line: Connection, socket: str, token: str, home: str | None, log: str, gate: str | None) -> None:
    """A worker with the scripted agent: each step asks its tool, which notes in a file that it was called."""
    told = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    @task("lookup", idempotent=True)
    async def lookup(number: int) -> dict[str, Any]:
        os.write(told, f"{os.getpid()} {number}\n".encode())
        while gate is not None and number == 3 and not Path(gate).exists():  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # what it waits for is done by another process
        return {"found": number * number}

    @agent("scripted")
    async def scripted(ctx: AgentContext, steps: int) -> int:
        await ctx.append("user", {"text": f"do {steps} steps"})
        total = 0
        for number in range(steps):
            found = await ctx.task("lookup", number)
            total += found["found"]
            await ctx.append_tool_result("lookup", found)
            if number % 50 == 49:
                await ctx.say(f"{number + 1} done")
        return total

    async def main() -> None:
        async with AgentWorker(
            socket, agents=[scripted], tasks=[lookup], token=token, home=home, heartbeat_ms=_LAPSE_MS // 4
        ):
            line.send("up")
            await until_hung_up(line)

    asyncio.run(main())


def _transcript(entries: list[EntrySeen]) -> list[tuple[str, bytes, str]]:
    return [
        (entry.role, bytes(entry.content), "" if entry.message is None else str(entry.message.parts[0].text))
        for entry in entries
    ]


async def _entries(box: Mailbox, run_id: str) -> list[EntrySeen]:
    found: list[EntrySeen] = []
    before: int | None = None
    while True:
        page = await box.run_entries(run_id, 100, before=before)
        found[:0] = page.entries
        if page.before is None:
            return found
        before = page.before


async def _start(box: Mailbox, house: House, steps: int) -> str:
    async with house.box("writer") as writer:
        recipient = writer.agent
    run_id = str(uuid.uuid4())
    content = (Json(steps),)
    await box.send_task(Task(id=run_id, recipient=recipient, intent_text="go", task_kind="scripted", content=content))
    return run_id


async def _kill_often(kills: int, seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            asyncio.timeout(_PATIENCE_S + kills),
            housed(SMALL) as house,
            house.box("alice") as alice,
            house.box("writer") as writer,
        ):
            token = house.tokens["writer"]
            log = f"{folder}/log"

            async def worker() -> Being:
                being = await asyncio.to_thread(Being, _scripted, house.socket, token, f"{folder}/home", log, None)
                assert await being.hear() == "up"
                return being

            steps = _STEPS
            killed = 0
            rounds = 0
            while killed < kills:
                run_id = await _start(alice, house, steps)
                rounds += 1
                while True:
                    being = await worker()
                    delay_s = chance.uniform(0.0, 0.08)
                    entry = await alice.wait_generation(run_id, 2**40, wait_ms=max(1, int(1000 * delay_s)))
                    if entry.outcome is not None or killed >= kills:
                        break
                    being.kill()
                    assert await being.end() == -9
                    killed += 1
                entry = await alice.wait_generation(run_id, 2**40, wait_ms=60_000)
                assert entry.outcome == "answered", entry
                answer = await alice.get_result(run_id)
                assert answer is not None and answer.result.content == (Json(sum(n * n for n in range(steps))),)
                being.kill()
                await being.end()
                await _check(writer, run_id, steps, Path(log), rounds, killed)


async def _check(box: Mailbox, run_id: str, steps: int, log: Path, runs: int, killed: int) -> None:
    """The transcript is that of a run that nobody disturbed, and no step was done again whose result was there."""
    expected = [("user", b'{"text":"do %d steps"}' % steps, "")]
    for number in range(steps):
        content = b'{"tool_name":"lookup","output":{"found":%d}}' % (number * number)
        expected.append(("tool_result", content, ""))
        if number % 50 == 49:
            expected.append(("assistant", b"null", f"{number + 1} done"))
    assert _transcript(await _entries(box, run_id)) == expected
    calls = Counter(int(line.split()[1]) for line in log.read_text().splitlines())
    assert set(calls) == set(range(steps))
    assert sum(calls.values()) <= runs * steps + killed  # a kill interrupts one call, and only that is made again


async def test_a_worker_that_is_killed_over_and_over_repeats_no_finished_step() -> None:
    """Contract 24: real SIGKILLs, at any moment."""
    await _kill_often(8, 1)


@pytest.mark.soak
async def test_a_worker_that_is_killed_500_times_repeats_no_finished_step() -> None:
    """Contract 24."""
    await _kill_often(500, 2)


async def test_a_frozen_worker_whose_run_went_on_elsewhere_writes_nothing() -> None:
    """Contract 23: every commit of a run carries its lease, and an old holder is refused."""
    limits = Limits(run_lapse_ms=_LAPSE_MS)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            asyncio.timeout(_PATIENCE_S),
            housed(limits) as house,
            house.box("alice") as alice,
            house.box("writer") as writer,
        ):
            token, gate = house.tokens["writer"], f"{folder}/gate"
            first = await asyncio.to_thread(Being, _scripted, house.socket, token, None, f"{folder}/first", gate)
            assert await first.hear() == "up"
            run_id = await _start(alice, house, 10)
            while not Path(f"{folder}/first").exists() or "3\n" not in Path(f"{folder}/first").read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # until it is in the middle of its fourth step
            os.kill(first.pid, signal.SIGSTOP)
            second = await asyncio.to_thread(Being, _scripted, house.socket, token, None, f"{folder}/second", None)
            assert await second.hear() == "up"
            entry = await alice.wait_generation(run_id, 2**40, wait_ms=60_000)
            assert entry.outcome == "answered"
            before = await _entries(writer, run_id)
            Path(gate).touch()
            os.kill(first.pid, signal.SIGCONT)
            other = await _start(alice, house, 2)  # it takes part again
            assert (await alice.wait_generation(other, 2**40, wait_ms=60_000)).outcome == "answered"
            second.kill()
            third = await _start(alice, house, 2)
            assert (await alice.wait_generation(third, 2**40, wait_ms=60_000)).outcome == "answered"
            assert (await alice.get_task(run_id)).generation == entry.generation
            assert [e.id for e in await _entries(writer, run_id)] == [e.id for e in before]
            first.kill()
