"""A daemon for a whole module, with a peer that works and leases that were left behind ten minutes ago."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from covenant import Idempotency, Mailbox, Task
from covenant.store.clock import ManualClock
from tests.cli.support import Client, serving

_SILENT_MS = 10 * 60 * 1000


class Stale(NamedTuple):
    """Tasks whose holder has given no sign of life."""

    safe: str
    unsafe: str
    spare: str


class Served(NamedTuple):
    home: Path
    url: str
    token: str  # the operator's
    bob: str  # his token
    stale: Stale
    told: dict[str, str]


@pytest.fixture
def home() -> Iterator[Path]:
    """Short: a socket has to fit into it."""
    folder = Path(tempfile.mkdtemp(prefix="cov-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    folder = Path(tempfile.mkdtemp(prefix="cov-"))
    stale = asyncio.run(_leave_leases(folder))
    with serving(folder) as (_, told):
        client = Client(folder)
        bob = client.json("peers", "enroll", "bob", "--grant", "a2a.respond.operator", "--grant", "a2a.send.*")
        token = (folder / "operator.token").read_text().strip()
        yield Served(folder, told["http"], token, bob["token"], stale, told)
    shutil.rmtree(folder)


async def _leave_leases(folder: Path) -> Stale:
    clock = ManualClock(time.time_ns() // 1_000_000 - _SILENT_MS)
    async with Mailbox.open(f"file:{folder}/data", clock=clock) as box:
        alice, worker = box.of("alice@lab"), box.of("worker@lab")
        for key in ("again", None, "once-more"):
            declared = None if key is None else Idempotency("idempotent", key)
            task = Task(recipient=worker.agent, intent_text=f"left behind: {key}", idempotency=declared)
            await alice.send_task(task)
        return Stale(*(delivery.task.id for delivery in await worker.recv_tasks(3)))


@pytest.fixture
def covenant(served: Served) -> Client:
    """The program, as the operator at home."""
    return Client(served.home)


@pytest.fixture
def bob(served: Served) -> Client:
    return Client(served.home, served.bob)
