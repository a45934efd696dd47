"""A supervised agent: it shows its plan, waits for approval, makes another plan when there is none, and then acts.

    python examples/supervised_agent.py [store URL] [seconds]        # default: memory: 0

Its acts may not be done twice. On file:./release the program may be killed at any point, with kill -9 too: started
again, it goes on where it was. If it was killed in the middle of an act, nobody knows whether the act was done; the
agent does not guess, and its supervisor looks at the world and says. The seconds are how long an act takes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from covenant import CovenantError
from covenant.agents import AgentContext, Local, RunHandle, RunInDoubt, agent, task

RUN = "5e1ea5e0-0000-4000-8000-000000000001"
DAY_MS = 24 * 60 * 60 * 1000


class World:
    """What the agent acts upon: lines in a file, or only in memory."""

    def __init__(self, path: Path | None = None, act_s: float = 0) -> None:
        self._path = path
        self._act_s = act_s
        self._done: list[str] = []

    async def act(self, what: str) -> int:
        await asyncio.sleep(self._act_s)
        self._done = [*self.done(), what]
        if self._path is not None:
            self._path.write_text("".join(f"{line}\n" for line in self._done), encoding="utf-8")
        await asyncio.sleep(self._act_s)
        return len(self._done)

    def done(self) -> list[str]:
        is_kept = self._path is not None and self._path.exists()
        return self._path.read_text(encoding="utf-8").splitlines() if self._path and is_kept else self._done


world = World()


@dataclass
class Wish:
    version: str
    without: tuple[str, ...] = ()


@dataclass
class Decision:
    is_yes: bool
    without: str | None = None


@task("plan", idempotent=True)
def plan(wish: Wish) -> list[str]:
    """In place of this, ask a model."""
    steps = [f"tag {wish.version}", "drop the old tables", f"upload {wish.version}", "tell everybody"]
    return [step for step in steps if step not in wish.without]


@agent("release")
async def release(ctx: AgentContext, version: str) -> str:
    without: tuple[str, ...] = ()
    while True:
        steps: list[str] = await ctx.task("plan", Wish(version, without))
        await ctx.say("I would " + ", ".join(steps) + ". Shall I?")
        decision: Decision = await ctx.wait_for_signal("approval", timeout_ms=DAY_MS, type=Decision)
        if decision.is_yes:
            break
        await ctx.append("user", {"text": f"No, do not {decision.without}."})
        without = (*without, decision.without or "")
    await ctx.append("user", {"text": "Yes."})
    for step in steps:
        number = await ctx.run(step, lambda what=step: world.act(what))
        await ctx.say(f"Done, as act {number}: {step}.")
    return f"{version} is out"


async def supervise(run: RunHandle) -> bool:
    """Decide once; whether there may be more to decide."""
    try:
        if not await run.wants_input():
            return False
    except RunInDoubt as doubt:
        for effect in doubt.doubts:
            is_done = effect in world.done()
            verdict = "done" if is_done else "retry"
            print(f"(nobody knows about `{effect}`; the supervisor looks, and says: {verdict})", flush=True)
            number = len(world.done()) if is_done else None
            await run.judge(effect, "done" if is_done else "retry", reason="looked at the world", value=number)
        return True
    asked = (await run.entries())[-1].content["text"]
    decision = Decision(False, "drop the old tables") if "drop" in asked else Decision(True)
    await run.signal("approval", decision, key=asked)
    return True


async def main(url: str) -> None:
    async with Local(url, agents=[release], tasks=[plan]) as house:
        run = await house.start(release, "1.4", run_id=RUN)
        told = 0
        while await supervise(run):
            told = await tell(run, told)
        await tell(run, told)
        print(await run.result())


async def tell(run: RunHandle, told: int) -> int:
    entries = await run.entries()
    for entry in entries[told:]:
        print(f"{'user' if entry.role == 'user' else 'agent':6} {entry.content['text']}", flush=True)
    return len(entries)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    store = sys.argv[1] if len(sys.argv) > 1 else "memory:"
    scheme, _, folder = store.partition(":")
    acts = Path(f"{folder}.acts") if scheme == "file" else None
    world = World(acts, float(sys.argv[2]) if len(sys.argv) > 2 else 0)
    try:
        asyncio.run(main(store))
    except CovenantError as refusal:
        sys.exit(f"{refusal.code}: {refusal}")
