"""The same agent as a run of Covenant, in a file store. The forms:

- task: a turn is a task of the run, done by a function of the same process, and an entry. One sync per turn.
- effect: a turn is an effect that may be done twice (`ctx.run`), and an entry; one commit each.
"""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.agents.script import Found, Stopwatch, Tool, digest_of, entry_of
from bench.work import Figures
from covenant.agents import Agent, AgentContext, Local, TaskFunction, agent, task

FORMS: Final = ("task", "effect")
_RUN: Final = str(uuid.UUID(int=1))


async def run(folder: Path, steps: int, form: str, dies_at: int | None = None) -> Figures:
    """Starts the agent, or goes on with the one that it finds in the folder."""
    tool = Tool(dies_at)
    made, tasks = {"task": _by_tasks, "effect": _by_effects}[form](tool)
    async with Local(f"file:{folder / 'data'}", agents=[made], tasks=tasks) as house:
        stopwatch = Stopwatch(steps, tool)
        handle = await house.start(made, steps, run_id=_RUN)
        digest: str = await handle.result()
        return stopwatch.figures(digest)


def _by_tasks(tool: Tool) -> tuple[Agent, list[TaskFunction]]:
    @task("lookup", idempotent=True)
    async def lookup(number: int) -> Found:
        return await tool.lookup(number)

    @agent("scripted")
    async def scripted(ctx: AgentContext, steps: int) -> str:
        transcript: list[Any] = []
        for number in range(steps):
            transcript.append(entry_of(number, await ctx.task("lookup", number)))
            await ctx.append("tool_result", transcript[-1])
        return digest_of(transcript)

    return scripted, [lookup]


def _by_effects(tool: Tool) -> tuple[Agent, list[TaskFunction]]:
    @agent("scripted")
    async def scripted(ctx: AgentContext, steps: int) -> str:
        transcript: list[Any] = []
        for number in range(steps):
            found = await ctx.run(f"lookup {number}", partial(tool.lookup, number))
            transcript.append(entry_of(number, found))
            await ctx.append("tool_result", transcript[-1])
        return digest_of(transcript)

    return scripted, []
