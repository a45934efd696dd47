"""What `covenant.testing` promises to those who test their agents with it."""

from __future__ import annotations

import asyncio

import pytest

from covenant.agents import AgentContext, agent, task
from covenant.model.run import RunStatus
from covenant.testing import AgentTest, Say, Tell, survives_crashes


@task("charge")
async def charge(amount: int) -> str:
    return f"charged {amount}"


@agent("shop")
async def shop(ctx: AgentContext, amount: int) -> str:
    receipt: str = await ctx.task("charge", amount)
    await ctx.say(receipt)
    answer = await ctx.wait_for_signal("review", timeout_ms=60_000)
    await ctx.sleep(1_000)
    await ctx.append("system", [answer, await ctx.now()])
    return receipt


async def test_a_run_is_parked_when_it_waits_for_somebody() -> None:
    async with AgentTest(agents=[shop], tasks=[charge]) as test:
        run = await test.start(shop, 5)
        assert (await test.until_parked(run)).status is RunStatus.AWAITING_INPUT
        await test.signal(run, "review", "good")
        assert (await test.until_parked(run)).status is RunStatus.AWAITING_WORK
        await test.advance(1_000)
        assert (await test.until_parked(run)).status is RunStatus.ENDED
        assert await run.result() == "charged 5"
        assert len(await test.entries(run)) == 2


async def test_what_comes_due_while_time_passes_happens_at_its_time() -> None:
    @agent("ticker")
    async def ticker(ctx: AgentContext) -> list[int]:
        ticks = []
        for _ in range(3):
            await ctx.sleep(100)
            ticks.append(await ctx.now())
        return ticks

    async with AgentTest(agents=[ticker], warm_max=0) as test:
        began_ms = test.clock.now_ms()
        run = await test.start(ticker)
        await test.advance(1_000)
        assert [tick - began_ms for tick in await run.result()] == [100, 200, 300]
        assert test.clock.now_ms() == began_ms + 1_000


async def test_the_time_for_a_signal_is_over_when_the_test_says_so() -> None:
    @agent("impatient")
    async def impatient(ctx: AgentContext) -> str:
        try:
            return str(await ctx.wait_for_signal("word", timeout_ms=1_000))
        except TimeoutError:
            return "nothing"

    async with AgentTest(agents=[impatient]) as test:
        run = await test.start(impatient)
        await test.advance(999)
        assert (await test.until_parked(run)).status is RunStatus.AWAITING_INPUT
        await test.advance(1)
        assert await run.result() == "nothing"


async def test_the_report_says_where_the_worker_died_and_what_was_in_doubt() -> None:
    report = await survives_crashes(shop, 5, tasks=[charge], script=[Tell("review", "good")])
    assert report.points == sum(report.places.values()) > 20
    assert min(report.places[f"{when} CommitRun"] for when in ("before", "after")) > 2
    assert report.doubts > 0
    assert report.outcome["result"]["value"] == "charged 5"


async def test_a_message_of_the_sender_survives_too() -> None:
    @agent("chat")
    async def chat(ctx: AgentContext) -> list[str]:
        return [await ctx.wait_for_message() for _ in range(2)]

    report = await survives_crashes(chat, script=[Say("one"), Say("two")])
    assert report.outcome["result"]["value"] == ["one", "two"]
    assert [entry["content"] for entry in report.outcome["entries"]] == [{"text": "one"}, {"text": "two"}]


async def test_an_agent_that_looks_past_its_context_is_found_out() -> None:
    calls = 0

    @agent("counts")
    async def counts(ctx: AgentContext) -> int:
        nonlocal calls
        calls += 1
        await ctx.append("system", f"call {calls}")
        await ctx.sleep(10)
        return 1

    with pytest.raises(AssertionError, match=r"died at point \d+, (.|\n)*in peace(.|\n)*after the death"):
        await survives_crashes(counts)


async def test_the_deaths_can_be_fewer_than_the_points() -> None:
    report = await survives_crashes(shop, 5, tasks=[charge], max_points=5)
    assert report.points == 5


async def test_a_store_on_disk_survives_too() -> None:
    report = await survives_crashes(
        shop, 5, tasks=[charge], script=[Tell("review", "good")], max_points=8, on_disk=True
    )
    assert report.points == 8


async def test_no_task_of_a_dead_worker_is_left_behind() -> None:
    before = len(asyncio.all_tasks())
    await survives_crashes(shop, 5, tasks=[charge], max_points=5)
    assert len(asyncio.all_tasks()) == before
