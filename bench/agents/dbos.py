"""A peer for agents: DBOS, a workflow with one step per turn, its system database in SQLite.

The database file is put into WAL mode beforehand (DBOS leaves the slower rollback journal), and synchronous is set to
FULL, which is SQLite's usual default but not that of every build. The forms:

- step: the turn's entry is the step's result. One commit per turn; the transcript is rebuilt by the replay.
- async: the same, as coroutines.
- stream: the workflow also writes the entry to a stream of DBOS, where others can read it. Two commits per turn.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import uvloop
from dbos import DBOS, DBOSConfig, SetWorkflowID
from sqlalchemy import Engine, event

from bench.agents.script import Entry, Stopwatch, Tool, digest_of, entry_of
from bench.work import Figures

FORMS: Final = ("step", "async", "stream")
_RUN: Final = "agent-1"
_STREAM: Final = "transcript"
_RESULT_POLL_S: Final = 0.02
_FULL: Final = 2


def run(folder: Path, steps: int, form: str, dies_at: int | None = None) -> Figures:
    """Starts the agent, or goes on with the one that it finds in the folder."""
    tool = Tool(dies_at)
    start = {"step": _by_steps, "async": _by_coroutines, "stream": _by_stream}[form](tool)
    event.listen(Engine, "connect", _make_durable)
    begun = _launch(folder / "dbos.db")
    stopwatch = Stopwatch(steps, tool)
    if begun:
        digest: str = DBOS.retrieve_workflow(_RUN).get_result(polling_interval_sec=_RESULT_POLL_S)
    else:
        with SetWorkflowID(_RUN):
            digest = start(steps)
    return stopwatch.figures(digest)


def _launch(path: Path) -> bool:
    """Whether there is an agent to go on with. DBOS does so by itself, while it launches."""
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.close()
    config: DBOSConfig = {"name": "bench", "system_database_url": f"sqlite:///{path}", "log_level": "ERROR"}
    DBOS(config=config)
    DBOS.launch()
    return DBOS.get_workflow_status(_RUN) is not None


def _make_durable(connection: sqlite3.Connection, _record: Any) -> None:
    connection.execute("PRAGMA synchronous = FULL")
    ((synchronous,),) = connection.execute("PRAGMA synchronous")
    ((journal,),) = connection.execute("PRAGMA journal_mode")
    if (synchronous, journal) != (_FULL, "wal"):
        raise RuntimeError(f"DBOS runs with synchronous {synchronous}, journal mode {journal}")


def _by_steps(tool: Tool) -> Callable[[int], str]:
    @DBOS.step()
    def turn(number: int) -> Entry:
        return entry_of(number, tool.lookup_now(number))

    @DBOS.workflow()
    def agent(steps: int) -> str:
        return digest_of([turn(number) for number in range(steps)])

    return agent


def _by_coroutines(tool: Tool) -> Callable[[int], str]:
    @DBOS.step()
    async def turn(number: int) -> Entry:
        return entry_of(number, await tool.lookup(number))

    @DBOS.workflow()
    async def agent(steps: int) -> str:
        return digest_of([await turn(number) for number in range(steps)])

    def start(steps: int) -> str:
        call: Coroutine[Any, Any, str] = agent(steps)
        return uvloop.run(call)

    return start


def _by_stream(tool: Tool) -> Callable[[int], str]:
    @DBOS.step()
    def turn(number: int) -> Entry:
        return entry_of(number, tool.lookup_now(number))

    @DBOS.workflow()
    def agent(steps: int) -> str:
        transcript = []
        for number in range(steps):
            transcript.append(turn(number))
            DBOS.write_stream(_STREAM, transcript[-1])
        return digest_of(transcript)

    return agent
