"""The few words that the tests of the contract share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest

from covenant import (
    Answer,
    AuditRow,
    CovenantError,
    Delivery,
    Idempotency,
    Mailbox,
    OpenMailbox,
    QueueEntry,
    RepairRequest,
    Requeue,
    Result,
    RetryPolicy,
    Task,
    Text,
)

Reopen: TypeAlias = Callable[[], Awaitable[OpenMailbox]]

PATIENCE_MS = 10_000
DAY_MS = 24 * 60 * 60 * 1000
YEAR_MS = 365 * DAY_MS
DONE = (Text("done"),)


_DECISIONS = ("repair", "cache", "a2a_auto_retry_scheduler_scan")


async def decisions(box: OpenMailbox) -> list[AuditRow]:
    """What the audit says was decided by somebody, oldest first."""
    return [row for row in await box.recent_audit(box.limits.page_max) if row.kind in _DECISIONS]


def uid(number: int) -> str:
    """An id that a test chooses."""
    return f"{number:08x}-0000-4000-8000-000000000000"


def plain(to: Mailbox, intent: str = "work", **more: Any) -> Task:
    """A task that says nothing about duplicates."""
    return Task(recipient=to.agent, intent_text=intent, **more)


def keyed(to: Mailbox, key: str = "key", intent: str = "work", **more: Any) -> Task:
    """A task that may be done twice under its key."""
    return Task(recipient=to.agent, intent_text=intent, idempotency=Idempotency("idempotent", key), **more)


async def take(worker: Mailbox) -> Delivery:
    """The next task, which must come."""
    taken = await worker.recv_tasks(1, wait_ms=PATIENCE_MS)
    assert taken, "no task came"
    return taken[0]


async def nothing_for(worker: Mailbox) -> bool:
    return await worker.try_recv_task_for() is None


async def drain(sender: Mailbox) -> Answer:
    """The next result, which must come."""
    drained = await sender.recv_results(1, wait_ms=PATIENCE_MS)
    assert drained, "no result came"
    return drained[0]


async def drain_many(sender: Mailbox, count: int) -> list[Answer]:
    return [await drain(sender) for _ in range(count)]


async def nothing_back_for(sender: Mailbox) -> bool:
    return await sender.try_recv_result_for() is None


async def answer_next(worker: Mailbox, status: str = "ok") -> Delivery:
    """Take the next task and answer it."""
    delivery = await take(worker)
    await worker.send_result(Result.ok(delivery, DONE) if status == "ok" else Result.error(delivery, "broken"))
    return delivery


async def finish(sender: Mailbox, worker: Mailbox, task: Task) -> str:
    """Send a task, answer it, drain the answer."""
    task_id = (await sender.send_task(task)).task_id
    await answer_next(worker)
    assert (await drain(sender)).task_id == task_id
    return task_id


async def lease_many(sender: Mailbox, worker: Mailbox, tasks: list[Task]) -> list[Delivery]:
    """Send them and lease them all, in this order."""
    await sender.send_tasks(tasks)
    leased = await worker.recv_tasks(len(tasks), wait_ms=PATIENCE_MS)
    assert len(leased) == len(tasks)
    return leased


async def requeue(box: Mailbox, task_id: str) -> None:
    """Repair by hand."""
    await box.repair_task(RepairRequest(task_id, Requeue("operator_accepted"), "the worker is gone"))


async def soon(waiting: Awaitable[Any]) -> Any:
    """What happens without further ado; a test that would hang fails instead."""
    async with asyncio.timeout(PATIENCE_MS / 1000):
        return await waiting


async def turn() -> None:
    """Let what was started come to its first wait."""
    for _ in range(3):
        await asyncio.sleep(0)


async def all_entries(box: Mailbox, page: int = 100, **filters: Any) -> list[QueueEntry]:
    """The whole listing, page by page."""
    found: list[QueueEntry] = []
    cursor: str | None = None
    while True:
        listing = await box.task_queue(page, cursor=cursor, **filters)
        found += listing.tasks
        cursor = listing.cursor
        if cursor is None:
            return found


@contextmanager
def refused(code: str) -> Iterator[pytest.ExceptionInfo[CovenantError]]:
    """The block must be refused with this stable code, or one that says the same more closely."""
    with pytest.raises(CovenantError) as caught:
        yield caught
    codes = [getattr(kind, "code", None) for kind in type(caught.value).__mro__]
    assert code in codes, f"{caught.value.code}: {caught.value}"


def stale(**bounds: Any) -> RetryPolicy:
    """An enabled retry policy that takes every lease for stale, unless bounded otherwise."""
    return RetryPolicy(**{"enabled": True, "min_lease_age_ms": 0, "max_requeues": 100, **bounds})
