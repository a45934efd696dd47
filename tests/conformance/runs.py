"""The words that the tests of durable agents share. Bob is the agent: his run is task 1, which alice has sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Raw

from covenant import Delivery, Idempotency, Mailbox, Result, Task, Text
from covenant.model.message import Message, Part
from covenant.model.run import EntryDraft, EntryRole, Memo, RunCommit, Standing, Wait

from .support import PATIENCE_MS, plain, take, uid

RUN = uid(1)
DONE = (Text("done"),)


def raw(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))


def plainly(value: Raw) -> Any:
    return msgspec.json.decode(value)


def step(number: int, **more: Any) -> RunCommit:
    return RunCommit(number=number, **more)


def entry(number: int, text: str = "thought", **more: Any) -> EntryDraft:
    return EntryDraft(id=uid(0xE000 + number), role=EntryRole.ASSISTANT, content=raw(text), **more)


def part(number: int, to: Mailbox, key: str | None = None, **more: Any) -> Task:
    """A task of the run."""
    declared = None if key is None else Idempotency("idempotent", key)
    return Task(id=uid(number), recipient=to.agent, intent_text=f"part {number}", idempotency=declared, **more)


def parts(*numbers: int) -> frozenset[str]:
    return frozenset(uid(number) for number in numbers)


def memo(number: int) -> Memo:
    """That the run has asked for this task."""
    return Memo(f"task {number}", task=uid(number))


def answer(task_id: str, lease_id: str, text: str = "done") -> Result:
    return Result(task_id, "ok", (Text(text),), None, lease_id)


def says(text: str, signal: str | None = None) -> Message:
    metadata = None if signal is None else {"signal": signal}
    return Message(message_id=f"m-{text}", role="ROLE_USER", parts=(Part(text=text),), metadata=metadata)


async def begin(
    alice: Mailbox, bob: Mailbox, commit: RunCommit | None = None, **task: Any
) -> tuple[Delivery, Standing]:
    """Alice's task is leased by bob, and his run makes its first step."""
    await alice.send_task(plain(bob, "research", id=RUN, **task))
    delivery = await take(bob)
    return delivery, await bob.commit_run(delivery, commit or step(1))


async def parked_on(alice: Mailbox, bob: Mailbox, wait: Wait, **more: Any) -> Delivery:
    delivery, standing = await begin(alice, bob, step(1, wait=wait, **more))
    assert standing.parked
    return delivery


async def answered(worker: Mailbox, status: str = "ok") -> str:
    """The worker does one of the run's tasks."""
    delivery = await take(worker)
    await worker.send_result(Result.ok(delivery, DONE) if status == "ok" else Result.error(delivery, "broken"))
    return delivery.task.id


async def is_so(look: Callable[[], Awaitable[bool]]) -> None:
    """What follows from a commit by steps comes to be."""
    async with asyncio.timeout(PATIENCE_MS / 1000):
        while True:
            if await look():
                return
            await asyncio.sleep(0)
