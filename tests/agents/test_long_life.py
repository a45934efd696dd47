"""An agent that lives for long, and is kept warm: its memory is bounded by what it did since its last checkpoint."""

from __future__ import annotations

import asyncio

from covenant.agents import AgentContext, Local, agent, task
from covenant.agents.run import Run

PATIENCE_S = 20
TURNS = 50
runs: list[Run] = []


@task("work", idempotent=True)
def work(number: int) -> int:
    return number * number


@agent("worker")
async def worker(ctx: AgentContext) -> int:
    runs.append(ctx._run)
    number: int = ctx.state or 0
    pending = None
    while await ctx.wait_for_signal("tick"):
        number += 1
        pending = ctx.task("work", number)
        assert await pending == number * number
        await ctx.checkpoint(number)
    assert pending is not None
    again = await ctx.task("work", 1)
    return int(await pending) + int(again)


async def test_what_ended_before_a_checkpoint_is_let_go_and_can_still_be_asked_for() -> None:
    async with asyncio.timeout(PATIENCE_S), Local(agents=[worker], tasks=[work]) as house:
        run = await house.start(worker)
        for _ in range(TURNS):
            assert await run.wants_input()
            await run.signal("tick", True)
        assert await run.wants_input()
        (held,) = runs
        outcomes, tasks, inbox = held.notes.memory.outcomes, held.tasks, held.inbox
        kept = (outcomes, tasks._digests, tasks._sent, tasks._kinds, inbox.seen, inbox.taken)
        assert [len(known) for known in kept] == [0] * len(kept)
        await run.signal("tick", False)
        assert await run.result() == TURNS * TURNS + 1
