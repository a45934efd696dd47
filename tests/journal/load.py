"""A process under load, to be killed: it works on a journal and says what was acknowledged, line by line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from covenant import Idempotency, Limits, Mailbox, OpenMailbox, Result, Task, Text
from covenant.model import command as c
from covenant.model.message import Artifact, Message, Part

CLIENTS = 6
LIMITS = Limits(segment_bytes=60_000, snapshot_every_bytes=100_000, finished_tail_max=16, archive_batch=16)


Say = Callable[..., None]


async def client(box: OpenMailbox, number: int, say: Say) -> None:
    sender, worker = box.of(f"sender{number}@lab"), box.of(f"worker{number}@lab")
    turn = 0
    while True:
        turn += 1
        key = Idempotency("idempotent", key=f"{os.getpid()}-{number}-{turn // 2}") if turn % 3 == 0 else None
        sent = await sender.send_task(Task(recipient=worker.agent, intent_text="work", task_kind="w", idempotency=key))
        say("sent", sent.task_id)
        for delivery in await worker.recv_tasks(2, wait_ms=0):
            say("leased", delivery.task.id, delivery.lease_id, delivery.attempt)
            if turn % 7 == 0:
                await worker.release(delivery)
                say("released", delivery.task.id, delivery.lease_id)
            elif turn % 5 != 0:  # every fifth lease is left hanging
                await worker.send_result(Result.ok(delivery, [Text(f"done {turn}")]))
                say("answered", delivery.task.id, delivery.lease_id)
        if turn % 4 == 0:
            await talk(box, number, say)
        for answer in await sender.recv_results(10, wait_ms=0):
            say("drained", answer.task_id)


async def talk(box: OpenMailbox, number: int, say: Say) -> None:
    """A conversation of an A2A client with its agent; how far it has come is said after each act."""
    engine: Any = box._engine
    sender, talker = box.of(f"sender{number}@lab").agent, box.of(f"talker{number}@lab").agent
    message = Message(message_id="m", role="ROLE_USER", parts=(Part(text="more"),))
    task = Task(recipient=talker, intent_text="talk", message=message)
    task_id = (await engine.run(c.SendTask(sender, task, protocol=True))).task_id
    say("moved", task_id, 1)
    for delivery in await engine.run(c.LeaseTasks(talker, talker, "one")):
        task_id, lease_id = delivery.task.id, delivery.lease_id
        say("leased", task_id, lease_id, delivery.attempt)
        for command in (
            c.UpdateTask(talker, lease_id, message),
            c.AddArtifact(talker, lease_id, Artifact(artifact_id="a", parts=message.parts), append=True),
            c.AddMessage(sender, task_id, message),
            c.RejectTask(talker, lease_id, message),
        ):
            moved = await engine.run(command)
            say("moved", task_id, moved.generation)


def work(line: Connection, folder: str) -> None:
    def say(*words: object) -> None:
        os.write(line.fileno(), (" ".join(map(str, words)) + "\n").encode())

    async def main() -> None:
        async with Mailbox.open(f"file:{folder}", limits=LIMITS) as box:
            say("open")
            await asyncio.gather(*(client(box, number, say) for number in range(CLIENTS)))

    asyncio.run(main())
