"""Effects inside an agent. (Contract 21.)"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from covenant.agents import AgentContext, agent, run_local

PATIENCE_S = 20


async def performed(function: Callable[..., Any]) -> Any:
    @agent("effective")
    async def effective(ctx: AgentContext) -> Any:
        return await ctx.run("it", function, idempotent=True)

    async with asyncio.timeout(PATIENCE_S):
        return await run_local(effective)


@pytest.mark.parametrize("function", [lambda step="own": step, lambda *rest, step="own": step], ids=["default", "rest"])
async def test_an_effect_keeps_the_arguments_that_it_brings(function: Callable[..., Any]) -> None:
    assert await performed(function) == "own"


async def test_an_effect_that_needs_an_argument_gets_its_key() -> None:
    key = await performed(lambda key: key)
    assert key == await performed(lambda key: key), "the same run, the same effect"
    assert ":" in key
