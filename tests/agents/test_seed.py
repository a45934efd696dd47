"""The scenarios of the seed, by its names: what an agent did before it waited is there once when it goes on."""

from __future__ import annotations

from typing import Any

import pytest

from covenant.agents import AgentContext, EntryRole, agent, task
from covenant.model.run import RunStatus
from tests.agents.house import House

pytestmark = pytest.mark.usefixtures("everywhere")

TURNS = ["user", "assistant", "user", "assistant"]


@agent("guarded")
async def guarded(ctx: AgentContext, question: str) -> str:
    """As the seed writes it: with a look at what is there before anything is added."""
    if not await ctx.load_messages():
        await ctx.append(EntryRole.USER, {"text": question})
        await ctx.append(EntryRole.ASSISTANT, {"text": "what do you mean?"})
    follow_up = await ctx.wait_for_signal("user_message")
    await ctx.append(EntryRole.USER, {"text": follow_up})
    await ctx.append(EntryRole.ASSISTANT, {"text": "I see"})
    return "done"


@agent("plain")
async def unguarded(ctx: AgentContext, question: str) -> str:
    await ctx.append(EntryRole.USER, {"text": question})
    await ctx.append(EntryRole.ASSISTANT, {"text": "what do you mean?"})
    follow_up = await ctx.wait_for_signal("user_message")
    await ctx.append(EntryRole.USER, {"text": follow_up})
    await ctx.append(EntryRole.ASSISTANT, {"text": "I see"})
    return "done"


@pytest.mark.parametrize("chat", [guarded, unguarded], ids=["guarded", "unguarded"])
async def test_entry_counter_collision_fix(house: House, chat: Any) -> None:
    async with house.worker(chat):
        run_id = await house.begin(chat, "why?")
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        assert await house.roles(run_id) == TURNS[:2]
        await house.signal(run_id, "user_message", "because")
        assert await house.result(run_id) == "done"
    assert await house.told(run_id) == [
        ("user", {"text": "why?"}),
        ("assistant", {"text": "what do you mean?"}),
        ("user", {"text": "because"}),
        ("assistant", {"text": "I see"}),
    ]


async def test_entry_idempotency_on_resume(house: House) -> None:
    calls = []

    @agent("patient")
    async def patient(ctx: AgentContext) -> int:
        calls.append(ctx.resuming)
        for turn in range(4):
            await ctx.append(EntryRole.ASSISTANT, "the same words")
            await ctx.append(EntryRole.ASSISTANT, f"turn {turn}")
            await ctx.wait_for_signal("go")
        return len(await ctx.load_messages())

    async with house.worker(patient):
        run_id = await house.begin(patient)
        for _ in range(4):
            await house.until(run_id, RunStatus.AWAITING_INPUT)
            await house.signal(run_id, "go")
        assert await house.result(run_id) == 8
    said = [content for _, content in await house.told(run_id, every=True)]
    assert said == [words for turn in range(4) for words in ("the same words", f"turn {turn}")]
    assert calls == ([False, True, True, True, True] if house.is_cold else [False])


async def test_task_idempotency_on_resume(house: House) -> None:
    done = []

    @task("work")
    async def work(n: int) -> int:
        done.append(n)
        return 10 * n

    @agent("asks")
    async def asks(ctx: AgentContext) -> list[int]:
        first = await ctx.join_all([ctx.task("work", 1), ctx.task("work", 2)])
        await ctx.wait_for_signal("go")
        again = await ctx.join_all([ctx.task("work", 1), ctx.task("work", 2), ctx.task("work", 3)])
        await ctx.wait_for_signal("go")
        return [*first, *again, await ctx.task("work", 3)]

    async with house.worker(asks, tasks=[work]):
        run_id = await house.begin(asks)
        for _ in range(2):
            await house.until(run_id, RunStatus.AWAITING_INPUT)
            await house.signal(run_id, "go")
        assert await house.result(run_id) == [10, 20, 10, 20, 30, 30]
    assert sorted(done) == [1, 2, 3]


async def test_react_style_agent_no_duplicate_entries(house: House) -> None:
    """A loop of phases in the manner of the seed: state says where it is, entries are the memory of the model."""
    replies = []

    @task("llm")
    async def llm(messages: list[Any]) -> dict[str, Any]:
        replies.append(len(messages))
        tools = sum(1 for message in messages if message["role"] == "tool_result")
        return {"text": "the end"} if tools == 2 else {"tool": "search", "input": f"page {tools}"}

    @agent("react")
    async def react(ctx: AgentContext, question: str) -> str:
        state = ctx.state or {"phase": "init"}
        if state["phase"] == "init":
            if not await ctx.load_messages():
                await ctx.append(EntryRole.USER, question)
            state = {"phase": "think"}
            await ctx.checkpoint(state)
        while True:
            if state["phase"] == "think":
                messages = [{"role": m.role.value, "content": m.content} for m in await ctx.load_messages()]
                reply = await ctx.task("llm", messages)
                if "tool" not in reply:
                    await ctx.append(EntryRole.ASSISTANT, reply["text"])
                    return str(reply["text"])
                await ctx.append_tool_call(reply["tool"], reply["input"])
                state = {"phase": "act", "tool": reply["tool"], "input": reply["input"]}
                await ctx.checkpoint(state)
            found = await ctx.task(state["tool"], state["input"], recipient="carol@lab")
            await ctx.append_tool_result(state["tool"], found)
            state = {"phase": "think"}
            await ctx.checkpoint(state)

    async with house.worker(react, tasks=[llm]):
        run_id = await house.begin(react, "who?")
        for page in range(2):
            asked = await house.help()
            await house.until(run_id, RunStatus.AWAITING_WORK)
            assert asked.input == f"page {page}"
            await asked.answers(f"text {page}")
        assert await house.result(run_id) == "the end"
    assert await house.roles(run_id) == ["user", "assistant", "tool_result", "assistant", "tool_result", "assistant"]
    assert replies == [1, 3, 5]


async def test_tool_suspension_does_not_create_error_entry(house: House) -> None:
    """Contract 24: its code cannot take it for an error."""

    @agent("careful")
    async def careful(ctx: AgentContext) -> str:
        await ctx.append_tool_call("search", "x")
        try:
            found = await ctx.task("search", "x", recipient="carol@lab")
        except Exception as failed:
            await ctx.append_tool_result("search", {"error": str(failed)})
            return "failed"
        await ctx.append_tool_result("search", found)
        return "found"

    async with house.worker(careful):
        run_id = await house.begin(careful)
        asked = await house.help()
        await house.until(run_id, RunStatus.AWAITING_WORK)
        await asked.answers("it")
        assert await house.result(run_id) == "found"
    assert await house.told(run_id) == [
        ("assistant", {"tool_name": "search", "input": "x"}),
        ("tool_result", {"tool_name": "search", "output": "it"}),
    ]
