"""A cell: one measurement in a process of its own, so that no memory, thread or import of one disturbs another.

The parent starts `python -m bench.cell <name> <parameters as JSON>`. The child writes its figures as one JSON line; a
cell that stays (a filled store) writes another line for each line that it reads, until its input ends.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import uvloop

from bench.work import Figures

_ROOT: Final = Path(__file__).resolve().parents[1]
_CELLS: Final = {
    "bare": "floor.bare",
    "paced": "floor.paced",
    "group": "floor.group",
    "covenant": "covenant_cycle.cycles",
    "sizes": "covenant_cycle.line_sizes",
    "queue": "peers.queue.cycles",
    "huey": "peers.huey.cycles",
    "dbos": "peers.dbos.cycles",
    "filled": "history.filled",
    "made": "history.made",
    "snapped": "history.snapped",
    "opened": "history.opened",
    "daemon": "serve.daemon.daemon",
    "http floor": "serve.daemon.floor",
    "http": "serve.load.http",
    "ipc": "serve.load.ipc",
    "wakes": "serve.load.wakes",
    "polls": "serve.polls.polls",
    "checks": "serve.checks.checks",
    "a2a daemon": "a2a.daemon.daemon",
    "a2a idle": "a2a.daemon.idle",
    "a2a sdk": "a2a.daemon.sdk",
    "a2a worker": "a2a.worker.worker",
    "messages": "a2a.load.messages",
    "streams": "a2a.streams.streams",
    "chunks": "a2a.streams.chunks",
    "agents covenant": "agents.covenant.run",
    "agents wakes": "agents.figures.wakes",
    "agents resumed": "agents.figures.resumed",
    "agents paused": "agents.figures.paused",
    "agents dbos": "agents.dbos.run",
    "agents langgraph": "agents.langgraph.run",
    "postgres covenant": "postgres.covenant.cycles",
    "postgres waiting": "postgres.covenant.waiting",
    "postgres queue": "postgres.queue.cycles",
    "postgres procrastinate": "postgres.procrastinate.cycles",
    "postgres dbos": "peers.dbos.cycles",
    "postgres absurd": "postgres.absurd.cycles",
    "postgres statements": "postgres.statements.repeated",
}


class CellFailed(Exception):
    """The child ended without its figures."""


class Cell:
    """The parent's end. Leave the `with` block and the child ends."""

    def __init__(self, name: str, folder: Path, **parameters: Any) -> None:
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        asked = json.dumps({"folder": str(folder), **parameters})
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bench.cell", name, asked],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Cell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._child.kill()
        self._child.communicate()

    def figures(self) -> Figures:
        """The next line of figures."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise CellFailed(f"the cell {self.name} failed; its error is above")
        figures: Figures = json.loads(line)
        return figures

    def turn(self) -> Figures:
        """Ask a cell that stays for one more measurement."""
        self.ask()
        return self.figures()

    def ask(self) -> None:
        """The same, without waiting for its figures: others are asked meanwhile."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write("\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise CellFailed(f"the cell {self.name} is gone; its error is above") from None


def measure(name: str, folder: Path, **parameters: Any) -> Figures:
    """One cell, one measurement."""
    with Cell(name, folder, **parameters) as cell:
        return cell.figures()


# --- the child's end --------------------------------------------------------------------------------------


def _main(name: str, asked: str) -> None:
    parameters = json.loads(asked)
    parameters["folder"] = Path(parameters["folder"])
    module, _, function = _CELLS[name].rpartition(".")
    cell = getattr(__import__(f"bench.{module}", fromlist=[function]), function)
    if inspect.isasyncgenfunction(cell):
        uvloop.run(_stay(cell(turns=_turns(), **parameters)))
    elif inspect.iscoroutinefunction(cell):
        _tell(uvloop.run(_once(cell(**parameters))))
    else:
        _tell(cell(**parameters))


async def _once(cell: Coroutine[Any, Any, Figures]) -> Figures:
    return await cell


async def _stay(cell: AsyncIterator[Figures]) -> None:
    async for figures in cell:
        _tell(figures)


async def _turns() -> AsyncIterator[None]:
    """One for each line of the input; the loop stays free meanwhile."""
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        yield


def _tell(figures: Figures) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # a peer may leave threads behind that would keep the process
