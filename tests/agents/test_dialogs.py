"""A run in a dialog: what the sender of its task says, and what it sees."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from covenant import Task
from covenant.agents import AgentContext, agent
from covenant.model.command import AddMessage, SendTask
from covenant.model.error import GenerationMismatch
from covenant.model.run import EntryRole, RunStatus
from tests.agents.house import House, content_of, pause, user_message


async def sent(house: House, text: str, message_id: str = "m-0") -> str:
    """As an A2A client begins."""
    task = Task(
        id=str(uuid.uuid4()),
        recipient=house.bob.agent,
        intent_text=text,
        message=user_message(text, message_id=message_id),
    )
    await house.store.run(SendTask(house.alice.agent, task, True))
    return task.id


@agent("echo")
async def echo(ctx: AgentContext, text: str) -> str:
    await ctx.say(f"first {text}")
    for _ in range(2):
        await ctx.say(f"then {await ctx.wait_for_message()}")
    return "bye"


async def test_a_talk_is_entries_with_the_ids_of_its_messages(house: House) -> None:
    async with house.worker(echo):
        run_id = await sent(house, "hello")
        for number in (1, 2):
            await house.until(run_id, RunStatus.AWAITING_INPUT)
            await house.say(run_id, f"more {number}", message_id=f"m-{number}")
        assert await house.result(run_id) == "bye"
    entries = await house.entries(run_id)
    assert [(entry.role.value, content_of(entry)["text"]) for entry in entries] == [
        ("user", "hello"),
        ("assistant", "first hello"),
        ("user", "more 1"),
        ("assistant", "then more 1"),
        ("user", "more 2"),
        ("assistant", "then more 2"),
    ]
    assert [entry.id for entry in entries if entry.role is EntryRole.USER] == ["m-0", "m-1", "m-2"]
    shown = await house.shown(run_id)
    texts = [message.parts[0].text for message in shown.history]
    assert texts == ["hello", "first hello", "more 1", "then more 1", "more 2", "then more 2"]
    assert shown.status.state == "TASK_STATE_COMPLETED"


async def test_messages_before_the_wait_are_heard_by_it(house: House) -> None:
    """Also those that came before anybody had taken up the task."""
    going = asyncio.Event()

    @agent("slow")
    async def slow(ctx: AgentContext, text: str) -> list[str]:
        await ctx.checkpoint() if ctx.checkpoints == 0 else None
        assert ctx.state is None
        await going.wait()
        return [await ctx.wait_for_message() for _ in range(3)]

    run_id = await sent(house, "hello")
    await house.say(run_id, "one")
    async with house.worker(slow):
        await house.until(run_id, RunStatus.RUNNING)
        await house.say(run_id, "two")
        going.set()
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.say(run_id, "three")
        assert await house.result(run_id) == ["one", "two", "three"]
    assert [content["text"] for _, content in await house.told(run_id)] == ["hello", "one", "two", "three"]


async def test_what_the_run_asks_is_its_status_and_an_answer_moves_it_on(house: House) -> None:
    @agent("asks")
    async def asks(ctx: AgentContext) -> str:
        await ctx.say("which one?")
        return await ctx.wait_for_message()

    async with house.worker(asks):
        run_id = await sent(house, "hello")
        seen = await house.until(run_id, RunStatus.AWAITING_INPUT)
        shown = await house.shown(run_id)
        assert shown.status.state == "TASK_STATE_INPUT_REQUIRED"
        assert shown.status.message is not None and shown.status.message.parts[0].text == "which one?"
        with pytest.raises(GenerationMismatch):
            await house.store.run(AddMessage(house.alice.agent, run_id, user_message("x"), seen.generation - 1))
        await house.store.run(AddMessage(house.alice.agent, run_id, user_message("this"), seen.generation))
        assert await house.result(run_id) == "this"


async def test_a_plain_message_answers_no_question(house: House) -> None:
    """Who says something beside the one thing that the run waits for has approved of nothing."""

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[Any]:
        answer = await ctx.wait_for_signal("approve")
        return [answer, await ctx.wait_for_message()]

    async with house.worker(asks):
        run_id = await sent(house, "hello")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.say(run_id, "wait, not yet")
        seen = await house.alice.get_run(run_id)
        assert (seen.status, seen.signals) == (RunStatus.AWAITING_INPUT, ["message"])
        await house.say(run_id, "yes", signal="approve")
        assert await house.result(run_id) == [{"text": "yes"}, "wait, not yet"]
    assert [content["text"] for _, content in await house.told(run_id)] == ["hello", "yes", "wait, not yet"]


async def test_a_message_may_name_its_signal(house: House) -> None:
    @agent("asks")
    async def asks(ctx: AgentContext) -> list[Any]:
        first = await ctx.any_of(ctx.signal("approve"), ctx.signal("reject"))
        return [first.index, first.value]

    async with house.worker(asks):
        run_id = await sent(house, "hello")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.say(run_id, "just a word")
        assert (await house.alice.get_run(run_id)).status is RunStatus.AWAITING_INPUT
        await house.say(run_id, "no", signal="reject")
        assert await house.result(run_id) == [1, {"text": "no"}]


async def test_drained_messages_are_entries_too(house: House) -> None:
    @agent("drains")
    async def drains(ctx: AgentContext) -> list[Any]:
        heard = await ctx.drain_signals("message")
        await ctx.append("assistant", "I see")
        await pause(ctx)
        return [[one["text"] for one in heard], len(await ctx.load_messages())]

    run_id = await sent(house, "hello")
    for text in ("one", "two"):
        await house.say(run_id, text)
    async with house.worker(drains):
        await house.paused(run_id)
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == [["one", "two"], 4]
    assert [role for role, _ in await house.told(run_id)] == ["user", "user", "user", "assistant"]


async def test_the_first_message_stays_the_root_behind_a_checkpoint(house: House) -> None:
    @agent("checks")
    async def checks(ctx: AgentContext) -> list[str]:
        if ctx.state is None:
            await ctx.checkpoint({"n": 1})
        await ctx.say("one")
        await ctx.wait_for_message()
        return [entry.content["text"] for entry in await ctx.load_messages()]

    async with house.worker(checks):
        run_id = await sent(house, "hello")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.say(run_id, "two")
        assert await house.result(run_id) == ["hello", "one", "two"]


async def test_what_is_said_while_it_works_is_told_at_its_next_commit(house: House) -> None:
    """A status for each, none for a park that changes nothing."""

    @agent("works")
    async def works(ctx: AgentContext) -> str:
        await ctx.say("looking")
        await ctx.task("look", 1, recipient="carol@lab")
        await ctx.say("found")
        return "done"

    async with house.worker(works):
        run_id = await sent(house, "hello")
        asked = await house.help()
        seen = await house.until(run_id, RunStatus.AWAITING_WORK)
        shown = await house.shown(run_id)
        assert (seen.generation, shown.status.state) == (3, "TASK_STATE_WORKING")
        assert shown.status.message is not None and shown.status.message.parts[0].text == "looking"
        await asked.answers()
        assert await house.result(run_id) == "done"
    assert (await house.alice.get_task(run_id)).generation == 6  # said, artifact, completed


async def test_a_message_wakes_one_of_two_places(house: House) -> None:
    @agent("two")
    async def two(ctx: AgentContext) -> list[Any]:
        return list(await asyncio.gather(ctx.wait_for_message(), ctx.wait_for_message()))

    async with house.worker(two):
        run_id = await sent(house, "hello")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.say(run_id, "a")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        await house.say(run_id, "b")
        assert await house.result(run_id) == ["a", "b"]
    assert [content["text"] for _, content in await house.told(run_id)] == ["hello", "a", "b"]
