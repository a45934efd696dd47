"""An agent that talks, and its worker in a process of its own. Nothing else is imported here: whoever is killed often
has to begin quickly."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

from covenant.agents import AgentContext, AgentWorker, agent, task
from tests.beings import until_hung_up


@task("spell", idempotent=True)
def spell(word: str) -> str:
    return "-".join(word)


@agent("talker")
async def talker(ctx: AgentContext, opening: str) -> str:
    text, turns = opening, 0
    while True:
        turns += 1
        await ctx.say(f"you said {await ctx.task('spell', text)}")
        await ctx.say(f"that was turn {turns}")
        if text == "bye":
            return f"{turns} turns"
        text = await ctx.wait_for_message()


def work(line: Connection, url: str, token: str, home: str, dies_at: int) -> None:
    """A worker that stands still at one of its steps, and says so: there it is killed."""
    steps = 0

    def probe(place: str) -> None:
        nonlocal steps
        steps += 1
        if steps == dies_at:
            line.send(place)
            line.recv()

    async def main() -> None:
        async with AgentWorker(url, agents=[talker], tasks=[spell], token=token, home=home, probe=probe):
            await until_hung_up(line)

    asyncio.run(main())
