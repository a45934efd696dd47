"""The worker of the plays: it does what the last line of a message says."""

from __future__ import annotations

from typing import Final

from covenant import WorkContext

HEARTBEAT_MS: Final = 100  # by which it hears of a cancel


async def work(ctx: WorkContext) -> str | None:
    said = ctx.text.splitlines()[-1]
    word, _, rest = said.partition(" ")
    match word:
        case "echo":
            return rest
        case "chunks":
            name = await ctx.artifact("one ", name="draft")
            await ctx.artifact("two", artifact_id=name, append=True, last=True)
            return "done"
        case "ask":
            answer = await ctx.ask("which colour?")
            return f"painted {answer.parts[-1].text}"
        case "fail":
            raise ValueError("no paint")
        case "reject":
            ctx.reject("not mine")
        case "wait":
            await ctx.update("waiting")
            await ctx.canceled()
            return None
    raise ValueError(f"no such thing: {said}")
