"""Processes that die as processes do: by SIGKILL, at any point.

They are forked from a server that has done the imports: who kills as often as these tests would otherwise wait for
nothing else. Each ends by itself when the test's end of its line is gone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

PATIENCE_S: Final = 60
_FORKS: Final = multiprocessing.get_context("forkserver")
_SPAWN: Final = multiprocessing.get_context("spawn")
_FORKS.set_forkserver_preload(
    [
        "covenant.client.http",
        "covenant.client.unix",
        "covenant.serve.a2a.rpc",
        "covenant.store.journal.engine",
        "tests.a2a.house",
        "tests.a2a.senders",
        "tests.journal.load",
        "tests.serve.kill_client",
        "tests.serve.run_daemon",
        "uvicorn",
    ]
)


class Being:
    """A process that lives until it is killed, or has done what it was made for. A stranger shares nothing with the
    others: what depends on where things lie in memory is not the same."""

    def __init__(self, does: Callable[..., Any], *given: Any, is_stranger: bool = False) -> None:
        self.line, theirs = _FORKS.Pipe()
        make: Any = _SPAWN.Process if is_stranger else _FORKS.Process
        self._process = make(target=does, args=(theirs, *given), daemon=True)
        self._process.start()
        theirs.close()

    async def hear(self) -> Any:
        """What it says next."""
        return await asyncio.to_thread(self.told)

    def told(self) -> Any:
        """The same, for who may block."""
        if not self.line.poll(PATIENCE_S):
            raise AssertionError("it says nothing")
        return self.line.recv()

    @property
    def pid(self) -> int:
        number: int = self._process.pid
        return number

    def kill(self) -> None:
        self._process.kill()

    async def end(self) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self.join)

    def join(self) -> int:
        """The same, for who may block."""
        self._process.join(PATIENCE_S)
        code: int | None = self._process.exitcode
        assert code is not None, "it does not end"
        return code


async def until_hung_up(line: Connection) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(line.fileno(), over.set)
    await over.wait()
