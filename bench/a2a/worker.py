"""A worker of the A2A daemon in a process of its own, over the socket: as users run one. All that it does is answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from bench.serve.seats import Served
from bench.work import REPLY, Figures
from covenant import Mailbox, WorkContext, Worker

CONCURRENCY: Final = 128


async def worker(folder: Path, server: str, turns: AsyncIterator[None]) -> AsyncIterator[Figures]:
    served = Served.read(Path(server))
    assert served.worker is not None
    async with (
        Mailbox.open(f"unix:{served.socket}", token=served.worker.token) as box,
        Worker(box, _answer, concurrency=CONCURRENCY),
    ):
        yield {"concurrency": CONCURRENCY}
        async for _ in turns:
            pass


async def _answer(ctx: WorkContext) -> str:
    return REPLY
