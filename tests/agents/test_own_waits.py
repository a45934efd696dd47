"""An agent whose function waits for something of its own beside what the run waits for."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from covenant import Result, Text
from covenant.agents import AgentContext, TaskFailed, agent, task
from covenant.agents.local import HOUSE
from covenant.model.record import TaskState
from covenant.testing import AgentTest, Tell, survives_crashes
from covenant.testing.gate import Gate

CAROL = "carol@lab"


async def test_a_function_that_ends_while_its_run_is_parked_ends_the_run() -> None:
    enough = asyncio.Event()

    @agent("leaves")
    async def leaves(ctx: AgentContext) -> str:
        waiting = asyncio.create_task(ctx.wait_for_signal("never"))
        await enough.wait()
        waiting.cancel()
        return "left"

    async with AgentTest(agents=[leaves]) as test, asyncio.timeout(10):
        run = await test.start(leaves)
        await test.until_parked(run)
        enough.set()
        assert await run.result() == "left"


async def test_what_a_function_does_while_its_run_is_parked_is_committed() -> None:
    enough = asyncio.Event()

    @agent("goes on")
    async def goes_on(ctx: AgentContext) -> list[str]:
        waiting = asyncio.create_task(ctx.wait_for_signal("word"))
        await enough.wait()
        await ctx.append("system", "meanwhile")
        other = await ctx.wait_for_signal("other")
        return [await waiting, other]

    async with AgentTest(agents=[goes_on]) as test, asyncio.timeout(10):
        run = await test.start(goes_on)
        await test.until_parked(run)
        enough.set()
        await test.signal(run, "other", "b")
        await test.signal(run, "word", "a")
        assert await run.result() == ["a", "b"]
        assert len(await test.entries(run)) == 1


@pytest.mark.parametrize("idempotent", [False, True], ids=["unsafe", "idempotent"])
async def test_a_run_is_held_while_an_effect_lasts_beside_a_wait(idempotent: bool) -> None:
    """Put away in the middle of it, nobody would know what became of it."""
    began, enough = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def effect() -> str:
        began.set()
        await enough.wait()
        done.append("once")
        return "done"

    @agent("does")
    async def does(ctx: AgentContext) -> list[str]:
        waiting = asyncio.create_task(ctx.wait_for_signal("word"))
        outcome = await ctx.run("charge", effect, idempotent=idempotent)
        return [await waiting, outcome]

    async with AgentTest(agents=[does], warm_max=0) as test, asyncio.timeout(10):
        run = await test.start(does)
        await began.wait()
        await run.say("nothing that is waited for")
        assert (await test.box.get_task(run.id)).state is TaskState.IN_FLIGHT
        enough.set()
        await test.until_parked(run)
        await test.signal(run, "word", "a")
        assert await run.result() == ["a", "done"]
    assert done == ["once"]


async def peek(ctx: AgentContext) -> Any:
    return await ctx.has_signal("there")


async def drain(ctx: AgentContext) -> Any:
    return await ctx.drain_signals("there")


async def choose(ctx: AgentContext) -> Any:
    return (await ctx.select([ctx.task("look", 1, recipient=CAROL)])).value


async def come_first(ctx: AgentContext) -> Any:
    return (await ctx.any_of(ctx.timer(0), ctx.task("look", 1, recipient=CAROL))).value


async def glance(ctx: AgentContext) -> Any:
    return await ctx.wait_for_signal("there", timeout_ms=0)


async def once(ctx: AgentContext) -> Any:
    return await ctx.append("system", "twice?", key="once")


ASKED = [(peek, True), (drain, ["yes"]), (choose, "seen"), (come_first, "seen"), (glance, "yes"), (once, None)]


@agent("sits")
async def sits(ctx: AgentContext) -> None:
    await ctx.wait_for_signal("never")


@pytest.mark.parametrize("is_slow", [False, True], ids=["parked", "being-parked"])
@pytest.mark.parametrize(("ask", "told"), ASKED, ids=[ask.__name__ for ask, _ in ASKED])
async def test_a_function_asks_while_another_place_in_it_waits(
    ask: Callable[[AgentContext], Awaitable[Any]], told: Any, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is taken up for that if it is parked, and is not parked before it is answered."""
    enough, look = asyncio.Event(), Gate._look

    async def slow(gate: Gate, name: str, act: Callable[[], Awaitable[Any]]) -> Any:
        for _ in range(20 if is_slow and name in ("LookAround", "FindEntry") else 0):
            await asyncio.sleep(0)
        return await look(gate, name, act)

    monkeypatch.setattr(Gate, "_look", slow)

    @agent("asks")
    async def asks(ctx: AgentContext) -> Any:
        ctx.task("look", 1, recipient=CAROL)
        entry = await ctx.append("system", "twice?", key="once")
        await ctx.wait_for_signal("begin")
        waiting = asyncio.create_task(ctx.wait_for_signal("word"))
        if not is_slow:
            await enough.wait()
        await asyncio.sleep(0)
        found = await ask(ctx)
        await waiting
        return found if found != entry else None

    async with AgentTest(agents=[asks, sits], warm_max=1) as test, asyncio.timeout(10):
        run = await test.start(asks)
        carol = test.box.of(CAROL)
        (taken,) = await carol.recv_tasks(1)
        await carol.send_result(Result.ok(taken, [Text("seen")]))
        await test.until_parked(await test.start(sits))  # which takes the place of the other
        await test.signal(run, "there", "yes")
        await test.signal(run, "begin")
        await test.until_parked(run)
        enough.set()
        await test.signal(run, "word")
        assert await run.result() == told


@pytest.mark.parametrize("is_grouped", [False, True])
async def test_a_function_whose_run_was_taken_away_hears_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_grouped: bool
) -> None:
    """Contract 24: it is put away, and its code cannot take that for an error; nor does anybody else."""
    caught: list[BaseException] = []
    asking = asyncio.Event()
    look = Gate._look

    async def taken_away(gate: Gate, name: str, act: Callable[[], Awaitable[Any]]) -> Any:
        if name == "LookAround" and not asking.is_set():
            asking.set()
            run = await test.box.get_run(run_id)
            other = test.box.of(HOUSE, incarnation="another")
            await other.resume_run(run_id, dead=run.incarnation or "", evidence="attested", reason="it is slow")
        return await look(gate, name, act)

    @agent("asks")
    async def asks(ctx: AgentContext) -> None:
        await ctx.append("user", "one")
        try:
            if is_grouped:
                async with asyncio.TaskGroup() as together:
                    together.create_task(ctx.has_signal("x"))
            await ctx.has_signal("x")
        except Exception as error:
            caught.append(error)

    monkeypatch.setattr(Gate, "_look", taken_away)
    async with AgentTest(agents=[asks]) as test, asyncio.timeout(10):
        run_id = (await test.start(asks)).id
        await asking.wait()
        await test.advance(0)
        assert (await test.box.get_run(run_id)).incarnation == "another"
    gc.collect()
    assert caught == []
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("depth", [1, 3])
async def test_a_run_is_not_parked_while_its_function_leaves_a_group_of_tasks(depth: int) -> None:
    """It takes the event loop some turns: parked meanwhile, with a death behind it, the run would wait for ever for
    what its function had turned away from."""

    @task("fails")
    async def fails() -> None:
        raise ValueError("no")

    @agent("groups")
    async def groups(ctx: AgentContext) -> str:
        async def turn_away() -> None:
            await ctx.wait_for_signal("go")
            await ctx.task("fails")

        async def group(depth: int) -> None:
            async with asyncio.TaskGroup() as together:
                together.create_task(ctx.wait_for_signal(f"never {depth}"))
                together.create_task(turn_away() if depth == 1 else group(depth - 1))

        try:
            await group(depth)
        except* TaskFailed:
            await ctx.append("assistant", "turned away")
        return "done"

    report = await survives_crashes(groups, tasks=[fails], script=[Tell("go")])
    assert report.outcome["result"]["value"] == "done"
