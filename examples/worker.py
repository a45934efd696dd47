"""A worker: leases tasks, shows progress, answers, fails, gives one back, and stops in an orderly way.

    python examples/worker.py [store URL]        # default: memory:

The function knows nothing of where the mailbox lives. Behind a daemon, each side has a box of its own, opened with its
token: `Worker(box, measure)` is the same with `Mailbox.open("http://host:8421", token=...)`, on any machine.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from covenant import CovenantError, Mailbox, Task, Text, WorkContext, Worker
from covenant.worker import Release

TEXTS = ["the sea", " ", "try again"]


async def measure(ctx: WorkContext) -> str:
    """What it returns is the result; what it raises is an error for the sender; a Release gives the task back."""
    if ctx.text == "try again":
        if ctx.attempt < 2:
            raise Release(reason="not in the mood")
        return f"took {ctx.attempt} attempts"
    measured = ctx.content[0]
    assert isinstance(measured, Text)
    if not measured.text.strip():
        raise ValueError("nothing to measure")
    await ctx.partial(f"reading {measured.text!r}")
    return f"{measured.text!r} has {len(measured.text)} characters"


async def main(url: str) -> None:
    async with Mailbox.open(url) as box:
        sender, recipient = box.of("sender@lab"), box.of("measurer@lab")
        async with Worker(recipient, measure):
            for text in TEXTS:
                intent = text if text == "try again" else "measure"
                await sender.send_task(Task(recipient=recipient.agent, intent_text=intent, content=[Text(text)]))
            open_tasks = len(TEXTS)
            while open_tasks:
                answer = await sender.recv_result()
                first = answer.content[0] if answer.content else None
                print(f"{answer.status:8} {first.text if isinstance(first, Text) else answer.error_message}")
                open_tasks -= answer.is_final
        print("the worker has stopped")


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "memory:"))
    except CovenantError as refusal:
        sys.exit(f"{refusal.code}: {refusal}")
