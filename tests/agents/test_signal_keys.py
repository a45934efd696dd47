"""The keys of signals that a long-lived run has heard."""

from __future__ import annotations

from covenant import Limits
from covenant.agents import AgentContext, agent
from covenant.model.run import RunStatus
from tests.agents.conftest import Open

DEDUP_MS = 60_000


@agent("ticking")
async def ticking(ctx: AgentContext) -> int:
    count: int = ctx.state or 0
    while await ctx.wait_for_signal("tick"):
        count += 1
        await ctx.checkpoint(count)
    return count


async def test_the_keys_of_signals_are_forgotten_when_they_are_old(open_house: Open, everywhere: None) -> None:
    house = await open_house(Limits(retention_ms=DEDUP_MS, dedup_ms=DEDUP_MS))
    async with house.worker(ticking):
        run_id = await house.begin(ticking)

        async def tick(key: str) -> bool:
            is_duplicate = await house.signal(run_id, "tick", True, key=key)
            await house.until(run_id, RunStatus.AWAITING_INPUT)
            return is_duplicate

        assert [await tick(key) for key in ("a", "b", "a")] == [False, False, True]
        house.clock.advance(DEDUP_MS - 1)
        assert [await tick(key) for key in ("c", "a")] == [False, True]
        house.clock.advance(1)
        assert not await tick("d")
        assert [await tick(key) for key in ("a", "c", "d")] == [False, True, True]
        await house.signal(run_id, "tick", False)
        assert await house.result(run_id) == 5
