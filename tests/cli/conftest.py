"""A daemon for the whole run, with a peer that works, leases that were left behind hours ago, and a filled cache."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from covenant import Idempotency, Mailbox, OpenMailbox, Result, Task, Text
from covenant.store.clock import ManualClock
from tests.cli.support import Client, serving

SILENT_H: Final = 3


class Stale(NamedTuple):
    """Tasks whose holder has given no sign of life, the oldest first. Each is for one test to move; `kept` stays."""

    gate: str
    kept: str
    unsafe: str
    requeue_text: str
    requeue_json: str
    force_text: str
    force_json: str
    asks: str  # whose holder waits for an answer


class Served(NamedTuple):
    home: Path
    url: str
    token: str  # the operator's
    bob: str  # his token
    stale: Stale
    told: dict[str, str]  # what the daemon says of itself


@pytest.fixture
def home() -> Iterator[Path]:
    """Short: a socket has to fit into it."""
    folder = Path(tempfile.mkdtemp(prefix="cov-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    folder = Path(tempfile.mkdtemp(prefix="cov-"))
    stale = asyncio.run(_prepare(folder))
    with serving(folder) as (_, told):
        enrolled = Client(folder).json("peers", "enroll", "bob", "--grant", "a2a.respond.*", "--grant", "a2a.send.bob")
        assert enrolled["kind"] == "peer_enrolled" and enrolled["display"] == "bob@local" and enrolled["pubkey"]
        token = (folder / "operator.token").read_text().strip()
        yield Served(folder, told["http"], token, enrolled["token"], stale, told)
    shutil.rmtree(folder)


async def _prepare(folder: Path) -> Stale:
    clock = ManualClock(time.time_ns() // 1_000_000 - SILENT_H * 3_600_000)
    async with Mailbox.open(f"file:{folder}/data", clock=clock) as box:
        for key in ("cached-1", "cached-2"):
            await _send(box, key)
            delivery = await box.of("worker@lab").recv_task()
            await box.of("worker@lab").send_result(Result.ok(delivery, [Text("kept")]))
        for name in Stale._fields:
            await _send(box, None if name == "unsafe" else name)
        leased = await box.of("worker@lab").recv_tasks(len(Stale._fields))
        await box.of("worker@lab").ask(leased[-1], "which colour?")
        return Stale(*(delivery.task.id for delivery in leased))


async def _send(box: OpenMailbox, key: str | None) -> None:
    declared = None if key is None else Idempotency("idempotent", key)
    task = Task(recipient=box.of("worker@lab").agent, intent_text=f"about {key}", idempotency=declared)
    await box.of("alice@lab").send_task(task)


@pytest.fixture
def covenant(served: Served) -> Client:
    """The program, as the operator at home."""
    return Client(served.home)


@pytest.fixture
def bob(served: Served) -> Client:
    return Client(served.home, served.bob)
