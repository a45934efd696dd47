"""An agent whose function waits for something of its own beside what the run waits for."""

from __future__ import annotations

import asyncio

from covenant.agents import AgentContext, agent
from covenant.testing import AgentTest


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
