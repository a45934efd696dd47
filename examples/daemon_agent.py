"""A daemon agent: it lives on events, for ever, and its history does not grow, because it has checkpoints.

    python examples/daemon_agent.py [store URL] [seconds]        # default: memory: 0

The agent keeps a stock: what is taken is counted, and what gets low is ordered. On file:./stock the program may be
killed at any point, with kill -9 too: started again, it goes on with the next event, and counts and orders nothing
twice. The seconds are how long an order takes, to leave time for that.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from covenant import CovenantError
from covenant.agents import AgentContext, Local, RunHandle, agent, task

RUN = "570c4000-0000-4000-8000-000000000001"
ENOUGH = 5
EVENTS = [("tea", 2), ("salt", 1), ("tea", 2), ("rice", 4), ("tea", 3), ("salt", 1), ("rice", 4), ("tea", 1)]
order_s = 0.0


@dataclass
class Taken:
    what: str
    count: int


@dataclass
class Stock:
    """What the agent knows: all that is left of the events that it has seen."""

    seen: int = 0
    left: dict[str, int] = field(default_factory=dict)
    orders: int = 0


@task("order", idempotent=True)
async def order(what: str) -> int:
    """In place of this, write to a shop, with the task's key, so that it is one order however often it is asked for."""
    await asyncio.sleep(order_s)
    return 10


@agent("keeper", state=Stock)
async def keeper(ctx: AgentContext) -> Stock:
    stock: Stock = ctx.state or Stock()
    while True:
        event = await ctx.any_of(ctx.signal("taken.*"), ctx.signal("close"))
        if event.index == 1:
            return stock
        taken = msgspec.convert(event.value, Taken)
        stock.seen += 1
        left = stock.left.get(taken.what, 10) - taken.count
        if left < ENOUGH:
            left += await ctx.task("order", taken.what, instance=stock.seen)
            stock.orders += 1
        stock.left[taken.what] = left
        await ctx.checkpoint(stock)  # what lies before is forgotten


async def known(run: RunHandle) -> Stock:
    """By the last checkpoint."""
    return msgspec.json.decode((await run.status()).state, type=Stock | None) or Stock()


async def main(url: str, events: Sequence[tuple[str, int]] = EVENTS) -> Stock:
    async with Local(url, agents=[keeper], tasks=[order]) as house:
        run = await house.start(keeper, run_id=RUN)
        while await run.wants_input():
            stock = await known(run)
            print(f"seen {stock.seen}, left {stock.left}, orders {stock.orders}", flush=True)
            if stock.seen == len(events):
                await run.signal("close", key="close")
                continue
            what, count = events[stock.seen]
            # Under its key an event is heard once, also if this program dies before it has seen the answer.
            await run.signal(f"taken.{what}", Taken(what, count), key=f"event {stock.seen}")
        result: Stock = await run.result()
        print(f"closed after {result.seen} events and {(await run.status()).checkpoints} checkpoints")
        return result


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    order_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "memory:"))
    except CovenantError as refusal:
        sys.exit(f"{refusal.code}: {refusal}")
