"""A real process, killed with a real signal."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covenant import Mailbox, TaskState
from covenant.model.query import GetPlace
from covenant.model.view import Place
from covenant.rules.protocol import steps_in, updates_of
from covenant.store.journal.verify import verify
from tests.beings import Being
from tests.journal.load import LIMITS, work

KILLS_OF_A_FOLDER = 20  # a fresh one now and then: early crashes count too


class Acknowledged:
    """What the processes were told before they died."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.leases: dict[str, str] = {}
        self.answered: set[str] = set()
        self.drained: set[str] = set()
        self.moved: dict[str, int] = {}  # to which generation

    def hear(self, line: str) -> None:
        kind, *rest = line.split()
        if kind == "sent":
            self.sent.add(rest[0])
        elif kind == "leased":
            self.leases[rest[1]] = rest[0]
        elif kind == "answered":
            self.answered.add(rest[0])
        elif kind == "drained":
            self.drained.add(rest[0])
        elif kind == "moved":
            self.moved[rest[0]] = int(rest[1])


def said_by(being: Being) -> Iterator[str]:
    with being.line, open(being.line.fileno(), closefd=False) as lines:
        yield from lines


async def run_and_kill(folder: Path, after_lines: int) -> list[str]:
    """Let it work until it has said this much, then kill -9. What it said in the meantime counts too."""
    being = Being(work, str(folder))
    lines: list[str] = []
    for line in said_by(being):
        lines.append(line)
        if len(lines) == after_lines:
            being.kill()
    assert await being.end() == -9
    return [line for line in lines if line.endswith("\n") and line != "open\n"]


async def check(folder: Path, told: Acknowledged) -> None:
    async with Mailbox.open(f"file:{folder}", limits=LIMITS) as box:
        for task_id in told.sent:
            entry = await box.get_task(task_id)
            if task_id in told.answered:
                assert entry.outcome == "answered"
            if task_id in told.drained:
                assert entry.state == TaskState.RESOLVED
        engine: Any = box._engine
        for task_id, generation in told.moved.items():
            place = await engine.ask(GetPlace(None, task_id))
            assert place.generation >= generation
            assert await generations(engine, place) == list(range(place.generation, 0, -1))


async def generations(engine: Any, place: Place) -> list[int]:
    """As the log tells them, the newest first."""
    seq, generation, found = place.order, place.generation, []
    while generation > 0 and (commits := await engine.log_trail(seq, place.task_id, 100)):
        for logged in commits:
            generation -= steps_in(logged, place.task_id)
            found += [u.generation for u in updates_of(logged, place.task_id, place.context_id, generation)][::-1]
            seq = logged.previous(place.task_id)
    return found


def leases_in(folder: Path) -> dict[str, str]:
    """Read the log as a stranger would: each lease with its task; a second lease without a requeue between is found."""
    holder: dict[str, str] = {}
    leases: dict[str, str] = {}
    for path in sorted(folder.glob("journal-*.jsonl")):
        for line in path.read_text().splitlines():
            for event in json.loads(line).get("events", []):
                if event["type"] == "leased":
                    assert event["key"] not in holder, f"{event['key']} was leased twice"
                    holder[event["key"]] = event["lease_id"]
                    leases[event["lease_id"]] = event["key"]
                elif event["type"] in ("requeued", "answered", "ended"):
                    holder.pop(event["key"], None)
    return leases


@pytest.mark.parametrize("kills", [pytest.param(60, id="some"), pytest.param(2_000, id="many", marks=pytest.mark.soak)])
async def test_kills_lose_nothing_and_lease_nothing_twice(tmp_path: Path, kills: int) -> None:
    rng = random.Random(kills)
    told = Acknowledged()
    for kill in range(kills):
        folder = tmp_path / f"data-{kill // KILLS_OF_A_FOLDER}"
        if kill % KILLS_OF_A_FOLDER == 0:
            shutil.rmtree(tmp_path / f"data-{kill // KILLS_OF_A_FOLDER - 1}", ignore_errors=True)
            told = Acknowledged()
        for line in await run_and_kill(folder, rng.randint(2, 400)):
            told.hear(line)
        if kill % KILLS_OF_A_FOLDER in (0, 1, 7, 19):
            await check(folder, told)
        in_log = leases_in_whole_lines(folder)
        assert all(in_log[lease_id] == task_id for lease_id, task_id in told.leases.items())
        if kill % KILLS_OF_A_FOLDER == KILLS_OF_A_FOLDER - 1:
            assert len(told.sent) > 100
            assert verify(folder).is_sound


def leases_in_whole_lines(folder: Path) -> dict[str, str]:
    """The last line may be torn: it was never acknowledged."""
    for path in folder.glob("journal-*.jsonl"):
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])
    return leases_in(folder)
