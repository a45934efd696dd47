"""Two daemons of Covenant on one database, a worker at each; the second daemon knows nothing but the database's URL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from bench.replicas.work import PACE_S, PIECES, heard, piece
from covenant import Mailbox, WorkContext, Worker

_CARD: Final = {"name": "writer", "description": "writes piece by piece"}


@asynccontextmanager
async def daemons(database: str, homes: Path) -> AsyncIterator[tuple[str, str, str]]:
    """The agent's place at either daemon, and the token of who may send to it."""
    with _daemon(homes / "a", database) as first, _daemon(homes / "b", database) as second:
        writer = _enroll(homes / "a", "writer", "a2a.respond.*")
        client = _enroll(homes / "a", "client", "a2a.send.*", "a2a.cancel.*")
        await _publish(first, (homes / "a" / "operator.token").read_text().strip())
        async with _worker("A", first, writer), _worker("B", second, writer):
            yield f"{first}/agents/writer", f"{second}/agents/writer", client


@contextmanager
def _daemon(home: Path, database: str) -> Iterator[str]:
    command = ["serve", "--home", str(home), "--store", database, "--http", "127.0.0.1:0", "--ipc", str(home / "sock")]
    with subprocess.Popen([sys.executable, "-m", "covenant", *command], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        try:
            lines = (line.split() for line in daemon.stdout)
            url = next((words[1] for words in lines if words[:1] == ["http"]), None)
            if url is None:
                raise RuntimeError("the daemon did not start; its error is above")
            yield url
        finally:
            daemon.terminate()


def _enroll(home: Path, name: str, *grants: str) -> str:
    """The token of a new peer."""
    words = ["peers", "enroll", name, "--json", *(word for grant in grants for word in ("--grant", grant))]
    done = subprocess.run(
        [sys.executable, "-m", "covenant", "--home", str(home), *words], capture_output=True, text=True, check=True
    )
    token: str = json.loads(done.stdout)["token"]
    return token


async def _publish(url: str, operator: str) -> None:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {operator}"}) as http:
        published = await http.post(f"{url}/a2a/agents", json={"name": "writer", "card": _CARD})
        published.raise_for_status()


@asynccontextmanager
async def _worker(replica: str, url: str, token: str) -> AsyncIterator[None]:
    async def write(ctx: WorkContext) -> None:
        listening = asyncio.create_task(_listen(ctx, replica))
        try:
            for number in range(PIECES):
                await ctx.artifact(piece(replica, number), name=piece(replica, number))
                await asyncio.sleep(PACE_S)
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async with Mailbox.open(url, token=token) as box, Worker(box, write, concurrency=4, grace_ms=0):
        yield


async def _listen(ctx: WorkContext, replica: str) -> Any:
    async for message in ctx.inputs():
        text = heard(replica, message.parts[0].text or "")
        await ctx.artifact(text, name=text)
