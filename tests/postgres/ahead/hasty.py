"""A process that goes ahead of the tables, to be killed: it says what was acknowledged, line by line."""

from __future__ import annotations

import asyncio
import os
from multiprocessing.connection import Connection

from covenant import Mailbox, OpenMailbox, Result, Task, Text
from covenant.store.postgres import ahead, stretch

CLIENTS = 8


async def client(box: OpenMailbox, number: int, line: Connection) -> None:
    def say(*words: object) -> None:
        os.write(line.fileno(), (" ".join(map(str, words)) + "\n").encode())

    sender, worker = box.of(f"sender{number}@lab"), box.of(f"worker{number}@lab")
    turn = 0
    while True:
        turn += 1
        say("sent", (await sender.send_task(Task(recipient=worker.agent, intent_text=f"work {turn}"))).task_id)
        delivery = await worker.recv_task()
        say("leased", delivery.task.id, delivery.lease_id)
        if turn % 9 == 0:
            continue  # this lease is left hanging
        await worker.send_result(Result.ok(delivery, [Text(f"done {turn}")]))
        say("answered", delivery.task.id)
        if turn % 5:
            say("drained", (await sender.recv_result()).task_id)


def work(line: Connection, url: str) -> None:
    ahead.WORTH = 8  # type: ignore[misc]  # for this process alone
    stretch.OWED = 40  # type: ignore[misc]  # likewise
    if os.getpid() % 2:
        stretch.NUMBERS_LEFT_MIN = 1 << 40  # type: ignore[misc]  # each append draws more of them

    async def main() -> None:
        async with Mailbox.open(url) as box:
            os.write(line.fileno(), b"open\n")
            await asyncio.gather(*(client(box, number, line) for number in range(CLIENTS)))

    asyncio.run(main())
