"""Ten thousand open streams on one daemon, and artifact chunks to one task: what an event costs when many listen."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any, Final

from bench.serve.load import HOST
from bench.serve.seats import Served, raise_open_files
from bench.work import Figures, percentile
from covenant import Limits, Task
from covenant.exchange.exchange import Exchange
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model.message import Artifact, Part
from covenant.model.peer import Caller
from covenant.store.clock import RandomIds, SystemClock
from covenant.store.registry import engine_for

_RESERVE: Final = 200  # open files for everything else
_AT_ONCE: Final = 200
_PATIENCE_S: Final = 120


async def streams(folder: Path, server: str, streams: int, events: int) -> Figures:
    """Each stream follows a task of its own. An event is one input to one task, sent by its client; what counts is the
    time from just before the send until the subscriber has the event."""
    served = Served.read(Path(server))
    streams = min(streams, raise_open_files() - _RESERVE)
    seat = served.seats[0]
    asking = await asyncio.open_connection(HOST, served.port)
    tasks = [await _send(asking, seat.token, number) for number in range(streams)]
    heard: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
    followers = []
    for start in range(0, streams, _AT_ONCE):
        some = tasks[start : start + _AT_ONCE]
        followers += await asyncio.gather(*(_follow(served, seat.token, task, heard) for task in some))
    rss = _rss(served.pid)
    took = []
    async with asyncio.timeout(_PATIENCE_S):
        for number in range(events):
            task = tasks[number * (streams // events)]
            began = time.perf_counter()
            await _send(asking, seat.token, number, task)
            while (told := await heard.get())[0] != task:
                pass
            took.append((told[1] - began) * 1000)
    for follower in followers:
        follower.cancel()
    took.sort()
    return {
        "streams": streams,
        "rss_mib": rss,
        "p50_ms": percentile(took, 50),
        "p99_ms": percentile(took, 99),
    }


def _rss(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024 / 1024


def _request(token: str, method: str, params: dict[str, Any]) -> bytes:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    head = (
        f"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {token}\r\na2a-version: 1.0\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


async def _send(
    line: tuple[asyncio.StreamReader, asyncio.StreamWriter], token: str, number: int, task: str | None = None
) -> str:
    reader, writer = line
    message = {"messageId": f"m-{number}", "role": "ROLE_USER", "parts": [{"text": "work"}]}
    if task is not None:
        message["taskId"] = task
    params = {"message": message, "configuration": {"returnImmediately": True}}
    writer.write(_request(token, "SendMessage", params))
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    answer = json.loads(await reader.readexactly(size))
    found: str = answer["result"]["task"]["id"]
    return found


async def _follow(served: Served, token: str, task: str, heard: asyncio.Queue[tuple[str, float]]) -> asyncio.Task[None]:
    """Open when its first event, the task itself, has come."""
    reader, writer = await asyncio.open_connection(HOST, served.port)
    writer.write(_request(token, "SubscribeToTask", {"id": task}))
    await reader.readuntil(b"data: ")

    async def listen() -> None:
        while line := await reader.readline():
            if b"statusUpdate" in line:
                heard.put_nowait((task, time.perf_counter()))
        writer.close()  # kept until here: a writer that nobody holds closes its connection

    return asyncio.create_task(listen())


# --- chunks ------------------------------------------------------------------------------------------------


async def chunks(folder: Path, few: int, many: int) -> Figures:
    """The time of so many chunks to one task, one after the other, in memory: the disk would cover it."""
    times = {name: await _chunks_to_one(count) for name, count in (("few", few), ("many", many))}
    return {"few_ms": times["few"] * 1000, "many_ms": times["many"] * 1000}


async def _chunks_to_one(count: int) -> float:
    clock, ids = SystemClock(), RandomIds()
    store: Any = engine_for("memory:", Limits(), clock, ids)
    exchange = Exchange(store, Realm.throwaway(), clock, ids)
    await exchange.open("token")
    caller: Caller = exchange.authenticate("token")
    await exchange.run(caller, exchange.send(caller, Task(recipient=caller.agent, intent_text="work")))
    delivery = (await exchange.take(caller, exchange.lease(caller, None, "bench"), 0))[0]
    piece = Artifact(artifact_id="draft", parts=(Part(text="x" * 100),))
    began = time.process_time()  # nothing is waited for: the time of a core is the time
    for _ in range(count):
        await exchange.run(caller, c.AddArtifact(None, delivery.lease_id, piece, append=True))
    took = time.process_time() - began
    await exchange.close()
    return took
