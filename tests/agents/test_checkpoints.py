"""Checkpoints: what they keep, what they forget, and how the function goes on from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from covenant.agents import AgentContext, CheckpointUnread, RunFailed, agent, task
from covenant.model.run import RunStatus, step_key
from tests.agents.house import House, pause


@task("work")
async def work(n: int) -> int:
    return 10 * n


async def test_phases_go_on_as_the_seed_shows(house: House) -> None:
    seen = []

    @agent("phases")
    async def phases(ctx: AgentContext) -> str:
        phase = (ctx.state or {}).get("phase", "init")
        seen.append(phase)
        if phase == "init":
            if not await ctx.load_messages():
                await ctx.append("user", "hello")
            await pause(ctx)
            await ctx.checkpoint({"phase": "second"})
            phase = "second"
        if phase == "second":
            await ctx.append("assistant", "second")
            await pause(ctx)
            await ctx.checkpoint({"phase": "third", "kept": await ctx.task("work", 4)})
        await ctx.append("assistant", "third")
        await pause(ctx)
        return f"{ctx.state['phase']} {ctx.state['kept']}"

    run_id, result = await house.through(phases, tasks=[work])
    assert result == "third 40"
    assert await house.told(run_id, every=True) == [("user", "hello"), ("assistant", "second"), ("assistant", "third")]
    assert seen == (["init", "init", "second", "third"] if house.is_cold else ["init"])


async def test_state_is_what_the_last_checkpoint_kept(house: House) -> None:
    @agent("counts")
    async def counts(ctx: AgentContext) -> list[Any]:
        assert (ctx.state is None) == (ctx.checkpoints == 0)
        while (ctx.state or 0) < 3:
            await ctx.checkpoint((ctx.state or 0) + 1)
            await pause(ctx)
        return [ctx.state, ctx.checkpoints]

    run_id, result = await house.through(counts)
    assert result == [3, 3]
    seen = await house.bob.get_run(run_id)
    assert (seen.checkpoints, msgspec.json.decode(seen.state)) == (3, 3)


async def test_what_came_before_a_checkpoint_is_forgotten(house: House) -> None:
    """The same words are said again, as they are below another checkpoint; a task stays the same in the whole run."""
    done = []

    @task("count")
    async def count(n: int) -> int:
        done.append(n)
        return len(done)

    @agent("forgets")
    async def forgets(ctx: AgentContext) -> list[Any]:
        results = list(ctx.state or [])
        while len(results) < 3:
            await ctx.append("assistant", "the same")
            results.append(await ctx.task("count", 1))
            await pause(ctx)
            await ctx.checkpoint(results)
        return results

    run_id, result = await house.through(forgets, tasks=[count])
    assert result == [1, 1, 1]
    assert done == [1]
    assert await house.told(run_id) == [("assistant", "the same")] * 3


async def test_who_does_not_look_at_the_state_gets_an_error_that_says_so(house: House) -> None:
    @agent("blind")
    async def blind(ctx: AgentContext) -> str:
        await ctx.append("user", "hello")
        await ctx.checkpoint({"n": 1})
        await pause(ctx)
        return "done"

    if house.is_cold:
        with pytest.raises(RunFailed, match=r"ctx\.state"):
            await house.through(blind)
    else:
        assert (await house.through(blind))[1] == "done"


async def test_every_operation_says_that_the_state_was_not_read(house: House) -> None:
    caught = []

    @agent("blind")
    async def blind(ctx: AgentContext) -> int:
        if ctx.resuming:
            operations: list[Any] = [
                lambda: ctx.append("user", "x"),
                lambda: ctx.say("x"),
                lambda: ctx.load_messages(),
                lambda: ctx.join_all([]),
                lambda: ctx.join_all_settled([]),
                lambda: ctx.wait_for_signal("x"),
                lambda: ctx.has_signal("x"),
                lambda: ctx.drain_signals("x"),
                lambda: ctx.sleep(1),
                lambda: ctx.now(),
                lambda: ctx.run("x", lambda: None),
                lambda: ctx.checkpoint(),
                lambda: ctx.any_of(ctx.timer(1)),
            ]
            with pytest.raises(CheckpointUnread):
                ctx.task("work", 1)
            for operation in operations:
                with pytest.raises(CheckpointUnread):
                    await operation()
                caught.append(1)
            return int(ctx.state)
        await ctx.checkpoint(5)
        await pause(ctx)
        return 5

    run_id, result = await house.through(blind, tasks=[work])
    assert result == 5
    assert len(caught) == (13 if house.is_cold else 0)
    assert await house.told(run_id, every=True) == []


@dataclass
class Plan:
    step: int
    done: list[str]


async def test_state_has_the_type_that_was_declared(house: House) -> None:
    @agent("typed", state=Plan)
    async def typed(ctx: AgentContext) -> int:
        if ctx.state is None:
            await ctx.checkpoint(Plan(1, ["a"]))
        while ctx.state.step < 2:
            await pause(ctx)
            assert isinstance(ctx.state, Plan)
            await ctx.checkpoint(Plan(ctx.state.step + 1, ["a"]))
        await pause(ctx)
        assert ctx.state.done == ["a"]
        return int(ctx.state.step)

    assert (await house.through(typed))[1] == 2


async def test_a_checkpoint_remembers_its_leaf(house: House) -> None:
    @agent("branches")
    async def branches(ctx: AgentContext) -> list[Any]:
        if ctx.state is None:
            root = await ctx.append("user", "root")
            await ctx.append("user", "left")
            await ctx.branch(root)
            await ctx.checkpoint({})
            await pause(ctx)
        await ctx.append("user", "right")
        return [entry.content for entry in await ctx.load_messages()]

    assert (await house.through(branches))[1] == ["root", "right"]


async def test_old_checkpoints_leave_nothing_behind(house: House) -> None:
    """What a run remembers is bounded by what it did since the last of them."""

    @agent("long")
    async def long(ctx: AgentContext) -> int:
        n = ctx.state or 0
        while n < 50:
            await ctx.append("assistant", n)
            await ctx.task("work", n)
            n += 1
            await ctx.checkpoint(n)
        await ctx.append("assistant", "the end")
        await pause(ctx)
        return int(n)

    async with house.worker(long, tasks=[work]):
        run_id = await house.begin(long)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        assert len(list(house.store.state.pieces(step_key(run_id, ""), 1, 1000))) == 1
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == 50
