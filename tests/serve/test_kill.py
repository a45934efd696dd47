"""A daemon that is killed under load, again and again: what it acknowledged is there, and nothing happened twice."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from covenant import Limits, Mailbox, TaskState
from covenant.model import event as e
from covenant.serve import wire as w
from covenant.serve.home import Home
from covenant.store.journal.files import Files
from covenant.store.journal.segment import Reader
from covenant.store.journal.verify import verify
from tests.beings import Being
from tests.daemons import WORKING
from tests.serve.kill_client import work
from tests.serve.run_daemon import serve

CLIENTS = 8


def start(home: Path) -> tuple[Being, str]:
    daemon = Being(serve, str(home))
    return daemon, daemon.told()


def kill(daemon: Being) -> None:
    daemon.kill()
    assert daemon.join() == -9
    daemon.line.close()


async def enroll_all(home: Path) -> dict[str, str]:
    tokens = {}
    async with Mailbox.open(f"unix:{home}/sock") as box:
        for number in range(CLIENTS):
            request = w.EnrollPeer(display=f"c{number}@lab", grants=list(WORKING))
            reply: w.PeerEnrolled = await box._engine.call(request, w.PeerEnrolled)  # type: ignore[attr-defined]
            tokens[reply.display] = reply.token
    return tokens


@pytest.mark.parametrize("kills", [pytest.param(8, id="some"), pytest.param(100, id="many", marks=pytest.mark.soak)])
async def test_nothing_acknowledged_is_lost_when_the_daemon_is_killed(tmp_path: Path, kills: int) -> None:
    home = Path(tempfile.mkdtemp(prefix="cov-"))
    daemon, _ = start(home)
    tokens = await enroll_all(home)
    names = list(tokens)
    dice = random.Random(11)
    logs = [tmp_path / f"log-{number}" for number in range(CLIENTS)]
    clients = [
        Being(work, f"unix:{home}/sock", tokens[name], name, names[(number + 1) % CLIENTS], str(logs[number]))
        for number, name in enumerate(names)
    ]
    try:
        for _ in range(kills):
            await asyncio.sleep(dice.uniform(0.1, 0.7))  # the moment of a death is nobody's to choose
            kill(daemon)
            daemon, _ = start(home)
        for client in clients:
            client.line.close()
        for client in clients:
            assert await client.end() == 0
    finally:
        kill(daemon)
        for client in clients:
            client.kill()
    await check(home, [log.read_text() for log in logs])
    shutil.rmtree(home)


async def check(home: Path, logs: list[str]) -> None:
    lines = [line.split() for log in logs for line in log.splitlines()]
    acknowledged = {kind: [words for words in lines if words[0] == kind] for kind in ("sent", "leased", "posted")}
    drained = Counter(words[1] for words in lines if words[0] == "drained")
    assert not [words for words in lines if words[0] == "refused"]
    assert len(acknowledged["posted"]) > 20, "there was hardly any load"
    assert set(drained.values()) <= {1}, "a result was handed out twice"
    async with Mailbox.open(f"file:{home}/data", limits=Limits()) as box:
        for _, task_id in acknowledged["sent"]:
            await box.get_task(task_id)
        for _, task_id, lease_id in acknowledged["leased"]:
            entry = await box.get_task(task_id)
            assert entry.attempt == 1
            assert entry.state is not TaskState.QUEUED
            assert entry.lease_id in (None, lease_id)
        for _, task_id in acknowledged["posted"]:
            assert (await box.get_task(task_id)).outcome == "answered"
        for task_id in drained:
            assert (await box.get_task(task_id)).state is TaskState.RESOLVED
    report = verify(home / "data", realm=Home(home).realm().pubkey)
    assert report.is_sound, report.damage
    assert report.signatures > 0
    leases = Counter(
        event.key for line in Reader(Files(home / "data")) for event in line.events if isinstance(event, e.Leased)
    )
    assert set(leases.values()) == {1}, "a task was leased twice without a requeue"
