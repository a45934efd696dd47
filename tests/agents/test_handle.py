"""Runs of a house: how they are begun, talked to and read."""

from __future__ import annotations

import asyncio

import pytest

from covenant.agents import AgentContext, AgentEntry, Local, agent
from covenant.model.error import KeyReused, Malformed, TaskConflict

PATIENCE_S = 20
RUN = "00000000-0000-4000-8000-000000000001"


@agent("echo")
async def echo(ctx: AgentContext, text: str) -> int:
    count = 0
    while text != "bye":
        count += 1
        await ctx.say(f"you said {text}")
        text = await ctx.wait_for_message()
    return count


def told(entries: list[AgentEntry]) -> list[str]:
    return [f"{entry.role}: {entry.content['text']}" for entry in entries]


async def test_a_run_that_begins_with_a_message_has_it_as_its_first_entry() -> None:
    async with asyncio.timeout(PATIENCE_S), Local(agents=[echo]) as house:
        run = await house.start(echo, message="hello")
        assert await run.wants_input()
        assert told(await run.entries()) == ["user: hello", "assistant: you said hello"]


async def test_what_is_said_to_a_run_becomes_an_entry_where_it_is_heard() -> None:
    async with asyncio.timeout(PATIENCE_S), Local(agents=[echo]) as house:
        run = await house.start(echo, message="one")
        for text in ("two", "bye"):
            assert await run.wants_input()
            await run.say(text)
        assert not await run.wants_input()
        assert await run.result() == 2
        spoken = ["user: one", "assistant: you said one", "user: two", "assistant: you said two", "user: bye"]
        assert told(await run.entries()) == spoken


async def test_the_same_message_under_the_same_id_is_the_same_run() -> None:
    async with asyncio.timeout(PATIENCE_S), Local(agents=[echo]) as house:
        first = await house.start(echo, message="hello", run_id=RUN)
        again = await house.start(echo, message="hello", run_id=RUN)
        assert first.id == again.id
        with pytest.raises(TaskConflict):
            await house.start(echo, message="hallo", run_id=RUN)


async def test_a_run_begins_with_an_input_or_with_a_message() -> None:
    async with asyncio.timeout(PATIENCE_S), Local(agents=[echo]) as house:
        with pytest.raises(Malformed):
            await house.start(echo, "one", message="two")


async def test_all_entries_are_read_however_many_there_are() -> None:
    @agent("talker")
    async def talker(ctx: AgentContext) -> None:
        for number in range(250):
            await ctx.append("assistant", number)

    async with asyncio.timeout(PATIENCE_S), Local(agents=[talker]) as house:
        run = await house.start(talker)
        await run.result()
        assert [entry.content for entry in await run.entries()] == list(range(250))


async def test_an_entry_under_one_key_is_there_once_also_before_it_is_committed() -> None:
    @agent("careful")
    async def careful(ctx: AgentContext) -> bool:
        first = await ctx.append("assistant", "once", key="k")
        await ctx.append("assistant", "between")
        assert await ctx.append("assistant", "once", key="k") == first
        with pytest.raises(KeyReused):
            await ctx.append("assistant", "other", key="k")
        await ctx.checkpoint()
        with pytest.raises(KeyReused):
            await ctx.append("assistant", "other", key="k")
        return await ctx.append("assistant", "once", key="k") == first

    async with asyncio.timeout(PATIENCE_S), Local(agents=[careful]) as house:
        run = await house.start(careful)
        assert await run.result() is True
        assert (await run.status()).entries == 2
