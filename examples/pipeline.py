"""Pipeline: a producer hands numbered jobs to a consumer, keeps a few in flight, and reads the answers in order.

python examples/pipeline.py [store URL]       # default: memory:
"""

from __future__ import annotations

import asyncio
import logging
import sys

from covenant import CovenantError, Json, Mailbox, OpenMailbox, Result, Task

JOBS = 12
IN_FLIGHT_MAX = 4


async def produce(box: OpenMailbox) -> None:
    me, consumer = box.of("producer@lab"), box.of("consumer@lab").agent
    sent = answered = 0
    while answered < JOBS:
        while sent < JOBS and sent - answered < IN_FLIGHT_MAX:
            await me.send_task(Task(recipient=consumer, intent_text="square", content=[Json(sent)]))
            sent += 1
        answer = await me.recv_result()
        block = answer.content[0]
        assert isinstance(block, Json)
        print(f"answer {answered:2}: {block.value}")
        answered += 1


async def consume(box: OpenMailbox) -> None:
    me = box.of("consumer@lab")
    while True:
        delivery = await me.recv_task()
        block = delivery.task.content[0]
        if isinstance(block, Json):
            await me.send_result(Result.ok(delivery, [Json(block.value**2)]))
        else:
            await me.send_result(Result.error(delivery, "a number is needed"))


async def main(url: str) -> None:
    async with Mailbox.open(url) as box:
        consumer = asyncio.create_task(consume(box))
        try:
            await produce(box)
        finally:
            consumer.cancel()
            await asyncio.gather(consumer, return_exceptions=True)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s")
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "memory:"))
    except CovenantError as refusal:
        sys.exit(f"{refusal.code}: {refusal}")
