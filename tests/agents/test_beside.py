"""What goes on beside the one line of an agent: tasks taken away, effects that last, values that are changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from covenant.agents import AgentContext, CancelRequested, Local, RunFailed, TaskFailed, agent, task
from covenant.model.error import TaskConflict
from covenant.model.record import TaskState
from covenant.model.run import RunStatus

PATIENCE_S = 20


async def test_a_task_that_is_ended_while_its_run_does_it_is_heard_of() -> None:
    """Contract 3: its result is refused, and the run goes on with what it came to."""
    begun, goes_on = asyncio.Event(), asyncio.Event()

    @task("slow")
    async def slow(number: int) -> int:
        begun.set()
        await goes_on.wait()
        return number

    @agent("waits")
    async def waits(ctx: AgentContext) -> str:
        try:
            return str(await ctx.task("slow", 1))
        except TaskFailed as failed:
            return f"heard: {failed.message}"

    async with asyncio.timeout(PATIENCE_S), Local(agents=[waits], tasks=[slow]) as house:
        run = await house.start(waits)
        await begun.wait()
        (child,) = [entry for entry in (await house.box.task_queue(10)).tasks if entry.task.task_kind == "slow"]
        await house.box.cancel_task(child.task.id, reason="not needed")
        goes_on.set()
        assert await run.result() == "heard: canceled: not needed"


async def test_a_task_that_is_canceled_before_it_is_sent_is_not_done() -> None:
    done = []

    @task("act", idempotent=True)
    def act(number: int) -> None:
        done.append(number)

    @agent("changes its mind")
    async def changes(ctx: AgentContext) -> str:
        await ctx.cancel(ctx.task("act", 1))
        return "nothing to do"

    async with asyncio.timeout(PATIENCE_S), Local(agents=[changes], tasks=[act]) as house:
        run = await house.start(changes)
        assert await run.result() == "nothing to do"
        queue = (await house.box.task_queue(10)).tasks
        assert [entry for entry in queue if entry.state is not TaskState.RESULT_PENDING] == []
        assert done == []


async def test_the_same_question_to_another_is_not_the_same_task() -> None:
    """Contract 19: a match with other content is an error."""

    @agent("asks")
    async def asks(ctx: AgentContext) -> None:
        ctx.task("question", 1, recipient="one@lab")
        ctx.task("question", 1, recipient="another@lab")

    async with asyncio.timeout(PATIENCE_S), Local(agents=[asks]) as house:
        with pytest.raises(RunFailed, match="instance="):
            await (await house.start(asks)).result()
        assert issubclass(TaskConflict, Exception)


async def test_what_a_function_changes_is_its_own(tmp_path: Path) -> None:
    """Contract 20: called again, it finds what there was."""

    @task("list", idempotent=True)
    def listed(number: int) -> Any:
        return ["original", {"count": 1}]

    @agent("changes")
    async def changes(ctx: AgentContext) -> Any:
        found = await ctx.task("list", 1)
        found.append("more")
        found[1]["count"] += 1
        await ctx.wait_for_signal("go")
        return found

    url = f"file:{tmp_path / 'data'}"
    async with asyncio.timeout(PATIENCE_S):
        async with Local(url, agents=[changes], tasks=[listed]) as house:
            run = await house.start(changes)
            while (await house.caller.get_task(run.id)).state is not TaskState.PARKED:
                await house.caller.wait_generation(run.id, (await house.caller.get_task(run.id)).generation, wait_ms=10)
        async with Local(url, agents=[changes], tasks=[listed]) as house:
            run = house.find(changes, run.id)
            await run.signal("go")
            assert await run.result() == ["original", {"count": 2}, "more"]


async def test_a_run_is_held_as_long_as_its_effect_lasts() -> None:
    """Contract 21: nobody takes an effect that is under way for one in doubt."""
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def charge() -> str:
        begun.set()
        await goes_on.wait()
        return "charged"

    @agent("charges")
    async def charges(ctx: AgentContext) -> list[Any]:
        return list(await asyncio.gather(ctx.run("charge", charge), ctx.wait_for_signal("go")))

    async with asyncio.timeout(PATIENCE_S), Local(agents=[charges]) as house:
        run = await house.start(charges)
        await begun.wait()
        assert (await run.status()).status is RunStatus.RUNNING
        await run.signal("go", 1)
        goes_on.set()
        assert await run.result() == ["charged", 1]


async def test_a_cancel_is_told_once_and_cleaning_up_may_wait() -> None:
    """Contract 7."""
    undone = []
    waiting = asyncio.Event()

    @task("undo", idempotent=True)
    def undo(number: int) -> None:
        undone.append(number)

    @agent("cleans up")
    async def cleans(ctx: AgentContext) -> None:
        try:
            waiting.set()
            await ctx.wait_for_signal("never")
        except CancelRequested:
            await ctx.sleep(1)
            await ctx.task("undo", 1)
            raise

    async with asyncio.timeout(PATIENCE_S), Local(agents=[cleans], tasks=[undo]) as house:
        run = await house.start(cleans)
        await waiting.wait()
        await run.cancel("enough", graceful=True)
        with pytest.raises(RunFailed, match="canceled: enough"):
            await run.result()
        assert undone == [1]


async def test_what_is_noted_while_a_checkpoint_is_committed_is_remembered(tmp_path: Path) -> None:
    """Contract 20, 22."""

    @agent("two places")
    async def two(ctx: AgentContext) -> int:
        if ctx.state is None:

            async def other() -> None:
                await asyncio.sleep(0)
                await ctx.append("user", {"text": "hello"})

            await asyncio.gather(ctx.checkpoint({"phase": 1}), other())
        else:
            await ctx.append("user", {"text": "hello"})
        await ctx.wait_for_signal("go")
        return len(await ctx.load_messages())

    url = f"file:{tmp_path / 'data'}"
    async with asyncio.timeout(PATIENCE_S):
        async with Local(url, agents=[two]) as house:
            run = await house.start(two)
            while (await house.caller.get_task(run.id)).state is not TaskState.PARKED:
                await house.caller.wait_generation(run.id, (await house.caller.get_task(run.id)).generation, wait_ms=10)
        async with Local(url, agents=[two]) as house:
            run = house.find(two, run.id)
            await run.signal("go")
            assert await run.result() == 1
