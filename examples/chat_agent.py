"""A chat agent with tools: it asks its model, does what the model wants done, and tells it what came of that, until the
model has an answer; then it waits for the next message.

    python examples/chat_agent.py [store URL] [seconds]        # default: memory: 0

The model is a script, so no network and no key is needed. On file:./chat the program may be killed at any point, with
kill -9 too: started again, it goes on where it was, and nothing is asked, done or said twice. The seconds are how long
the model thinks, to leave time for that.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass
from typing import Any

from covenant import CovenantError
from covenant.agents import AgentContext, AgentEntry, EntryRole, Local, TaskFailed, agent, task

RUN = "c4a7b0de-0000-4000-8000-000000000001"
LINES = ["Shall I take an umbrella to Bergen?", "What are 17 times 23?", "And divided by 0?", "Bye."]
thinks_s = 0.0


@dataclass
class Move:
    """What the model wants: to say something, or to have a tool used."""

    says: str = ""
    tool: str | None = None
    input: Any = None


SCRIPT = {
    LINES[0]: [Move(tool="weather", input="Bergen"), Move(says="Yes: it is {0} there.")],
    LINES[1]: [Move(tool="calculate", input=["*", 17, 23]), Move(says="They are {0}.")],
    LINES[2]: [Move(tool="calculate", input=["/", 391, 0]), Move(says="I tried: {0}.")],
    LINES[3]: [Move(says="Goodbye.")],
}


@task("model", idempotent=True)
async def model(messages: list[dict[str, Any]]) -> Move:
    """In place of this, call a real one: a task function may do anything."""
    await asyncio.sleep(thinks_s)
    last = max(at for at, message in enumerate(messages) if message["role"] == "user")
    outputs = [message["content"]["output"] for message in messages[last:] if message["role"] == "tool_result"]
    move = SCRIPT[messages[last]["content"]["text"]][len(outputs)]
    return Move(move.says.format(*outputs), move.tool, move.input)


@task("weather", idempotent=True)
def weather(city: str) -> str:
    return {"Bergen": "raining"}.get(city, "dry")


@task("calculate", idempotent=True)
def calculate(formula: tuple[str, int, int]) -> int:
    sign, left, right = formula
    if sign == "/" and right == 0:
        raise ValueError("nothing is divided by 0")
    return left * right if sign == "*" else left // right


@agent("chat")
async def chat(ctx: AgentContext, opening: str) -> str:
    """The messages of the user are entries by themselves; the agent adds what it does and says."""
    turns = 0
    text = opening
    while True:
        turns += 1
        await ctx.say(await think(ctx))
        if text == "Bye.":
            return f"a talk of {turns} turns"
        text = await ctx.wait_for_message()


async def think(ctx: AgentContext) -> str:
    while True:
        move: Move = await ctx.task("model", [shown(entry) for entry in await ctx.load_messages()])
        if move.tool is None:
            return move.says
        call = await ctx.append_tool_call(move.tool, move.input)
        try:
            # Two calls with the same input are two calls: without `instance` they would be the same task.
            output = await ctx.task(move.tool, move.input, instance=call)
        except TaskFailed as failed:
            output = f"it failed ({failed})"
        await ctx.append_tool_result(move.tool, output)


def shown(entry: AgentEntry) -> dict[str, Any]:
    return {"role": entry.role.value, "content": entry.content}


def line(entry: AgentEntry) -> str:
    if entry.role is EntryRole.TOOL_RESULT:
        return f"       <- {entry.content['output']}"
    if "tool_name" in entry.content:
        return f"       -> {entry.content['tool_name']} {entry.content['input']}"
    return f"{'user' if entry.role is EntryRole.USER else 'agent':6} {entry.content['text']}"


async def main(url: str) -> None:
    async with Local(url, agents=[chat], tasks=[model, weather, calculate]) as house:
        run = await house.start(chat, message=LINES[0], run_id=RUN)
        told = 0
        while True:
            goes_on = await run.wants_input()
            entries = await run.entries()
            for entry in entries[told:]:
                print(line(entry), flush=True)
            told = len(entries)
            if not goes_on:
                break
            said = sum(entry.role is EntryRole.USER for entry in entries)
            await run.say(LINES[said])
        print(await run.result())


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    thinks_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "memory:"))
    except CovenantError as refusal:
        sys.exit(f"{refusal.code}: {refusal}")
