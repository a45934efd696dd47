"""`python -m bench.two_replicas`: what two replicas on one database lose, and what they keep.

Two servers of the official SDK over one PostgreSQL, with either of its stores, and two daemons of Covenant: the same
agent behind each, the same client, which is the SDK's own, and the same three things done to a task that one replica
works on, by way of the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.types import (
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskState,
)

from bench.postgres.server import Server
from bench.replicas import covenant as replica_covenant
from bench.replicas.work import PIECES, RUN_S, piece

_ROOT: Final = Path(__file__).resolve().parents[1]
_LOOK_S: Final = 0.05
_SLACK_S: Final = 0.5
_PATIENCE_S: Final = 10.0
_SILENCE_S: Final = RUN_S + 2.0
_ENDED: Final = (TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_CANCELED, TaskState.TASK_STATE_FAILED)


class Replica:
    """One of the two, as the official client reaches it."""

    def __init__(self, polling: Client, streaming: Client) -> None:
        self._polling = polling
        self._streaming = streaming

    @staticmethod
    async def reached(http: httpx.AsyncClient, url: str) -> Replica:
        card = await A2ACardResolver(http, url).get_agent_card()
        configs = (ClientConfig(httpx_client=http, streaming=streams, polling=not streams) for streams in (False, True))
        return Replica(*(ClientFactory(config).create(card) for config in configs))

    async def send(self, text: str, task: Task | None = None) -> Task:
        """A first message, or one more to a task; answered as soon as it is taken."""
        message = Message(message_id=str(uuid.uuid4()), role=Role.ROLE_USER, parts=[Part(text=text)])
        if task is not None:
            message.task_id, message.context_id = task.id, task.context_id
        async for answer in self._polling.send_message(SendMessageRequest(message=message)):
            return answer.task
        raise RuntimeError("no answer")

    async def task(self, task_id: str) -> Task:
        return await self._polling.get_task(GetTaskRequest(id=task_id))

    async def cancel(self, task_id: str) -> Task:
        return await self._polling.cancel_task(CancelTaskRequest(id=task_id))

    async def events(self, task_id: str) -> list[str]:
        """All that a subscriber is told, until its stream ends or says nothing for longer than the work takes."""
        told: list[str] = []
        stream = self._streaming.subscribe(SubscribeToTaskRequest(id=task_id))
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            while True:
                event = await asyncio.wait_for(anext(stream), _SILENCE_S)
                told.append(_told(event))
        return told

    async def once(self, task_id: str, holds: Callable[[Task], bool]) -> Task:
        async with asyncio.timeout(_PATIENCE_S):
            while not holds(task := await self.task(task_id)):  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(_LOOK_S)
        return task


Pair = Mapping[str, Replica]  # by the names A and B


# --- the three things ------------------------------------------------------------------------------------------


async def cancel(pair: Pair) -> str:
    task, holder, other = await _begun(pair)
    answered = await other.cancel(task.id)
    await asyncio.sleep(RUN_S + _SLACK_S)  # in which the run would have ended
    later = await holder.task(task.id)
    verdict = "kept" if later.status.state == TaskState.TASK_STATE_CANCELED else "OVERWRITTEN"
    return f"{verdict}: answered {_state(answered)}, {_state(later)} afterwards"


async def follow_up(pair: Pair) -> str:
    task, holder, other = await _begun(pair)
    await other.send("and a title", task)
    await holder.once(task.id, _has_ended)
    await asyncio.sleep(RUN_S + _SLACK_S)  # a second run has had its time, too
    made = _made(await holder.task(task.id))
    runs = sorted({text[0] for text in made})
    pieces = [text for text in made if text in {piece(runs[0], number) for number in range(PIECES)}]
    if len(runs) > 1:
        verdict = "TWO RUNS"
    else:
        verdict = "kept" if len(pieces) == PIECES and len(made) > PIECES else "LOST"
    return f"{verdict}: {', '.join(made)}"


async def subscribe(pair: Pair) -> str:
    task, holder, other = await _begun(pair)
    told = await other.events(task.id)
    pieces = [piece(_made(task)[0][0], number) for number in range(PIECES)]
    seen = told[1:-1]  # between the task as it was and its end
    if told[-1:] != ["COMPLETED"]:
        verdict = "SILENT"
    else:
        verdict = "kept" if seen and seen == pieces[-len(seen) :] else "GAPS"
    return f"{verdict}: {', '.join(told) or 'nothing'}; the task is {_state(await holder.task(task.id))}"


SCENARIOS: Final[dict[str, tuple[str, Callable[[Pair], Awaitable[str]]]]] = {
    "One replica works on a task; the other is told to cancel it": ("CANCELED, and it stays that", cancel),
    "One replica works on a task; the other is sent a follow-up to it": (
        f"the run at work hears it, and makes its {PIECES} pieces",
        follow_up,
    ),
    "One replica works on a task; the other is asked for its events": (
        "the task, each piece as it is made, COMPLETED",
        subscribe,
    ),
}


async def _begun(pair: Pair) -> tuple[Task, Replica, Replica]:
    """A task sent to A of which a piece is made; at which replica, the piece says. And the other one."""
    sent = await pair["A"].send("write")
    task = await pair["A"].once(sent.id, lambda task: len(task.artifacts) >= 1)
    holder = _made(task)[0][0]
    return task, pair[holder], pair["B" if holder == "A" else "A"]


def _made(task: Task) -> list[str]:
    return [artifact.parts[0].text for artifact in task.artifacts]


def _has_ended(task: Task) -> bool:
    return task.status.state in _ENDED


def _state(task: Task) -> str:
    name: str = TaskState.Name(task.status.state)
    return name.removeprefix("TASK_STATE_")


def _told(event: object) -> str:
    kind = event.WhichOneof("payload")  # type: ignore[attr-defined]
    told = getattr(event, kind)
    if kind == "artifact_update":
        return str(told.artifact.parts[0].text)
    if kind == "status_update":
        return _state(told)
    return f"the task ({_state(told)})" if kind == "task" else str(kind)


# --- the three sides -------------------------------------------------------------------------------------------


async def sdk(database: str, store: str) -> list[str]:
    with ExitStack() as stack:
        places = [stack.enter_context(_sdk_replica(name, database, store)) for name in ("A", "B")]
        async with httpx.AsyncClient(timeout=_PATIENCE_S) as http:
            return await _seen(http, places)


@contextmanager
def _sdk_replica(name: str, database: str, store: str) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.replicas.sdk", name, database, store]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()  # a subscriber that waits for nothing would keep it


async def covenant(database: str) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="cov-") as homes:
        async with replica_covenant.daemons(database, Path(homes)) as (first, second, token):
            headers = {"Authorization": f"Bearer {token}"}
            async with httpx.AsyncClient(timeout=_PATIENCE_S, headers=headers) as http:
                return await _seen(http, [first, second])


async def _seen(http: httpx.AsyncClient, places: Sequence[str]) -> list[str]:
    pair = {name: await Replica.reached(http, place) for name, place in zip("AB", places, strict=True)}
    return await asyncio.gather(*(scenario(pair) for _, scenario in SCENARIOS.values()))  # each has a task of its own


SIDES: Final[dict[str, Callable[[str], Coroutine[Any, Any, list[str]]]]] = {
    "a2a-sdk, DatabaseTaskStore": lambda database: sdk(database, "plain"),
    "a2a-sdk, its cluster store": lambda database: sdk(database, "cluster"),
    "Covenant": covenant,
}


def shown(found: dict[str, list[str]]) -> str:
    lines = []
    for number, (title, (expected, _)) in enumerate(SCENARIOS.items()):
        lines += [title, f"  {'expected':26}  {expected}"]
        lines += [f"  {side:26}  {outcomes[number]}" for side, outcomes in found.items()]
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.two_replicas", description=__doc__)
    parser.add_argument("--only-sdk", action="store_true", help="leave out Covenant")
    options = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    found: dict[str, list[str]] = {}
    with Server() as server:
        for name, side in SIDES.items():
            if options.only_sdk and side is covenant:
                continue
            with server.database() as url:
                found[name] = asyncio.run(side(url))
    print(shown(found))


if __name__ == "__main__":
    main()
