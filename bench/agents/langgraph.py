"""A peer for agents: LangGraph, a graph with one node that goes round once per turn, its checkpoints in SQLite.

`durability="sync"`: the next turn waits for the checkpoint of the last. The saver chooses WAL; synchronous is set to
FULL, which is SQLite's usual default but not that of every build. Its functional API has no such form: it keeps the
results of tasks in the background, in "sync" too, and a killed agent repeats some. The forms:

- graph: a plain list with a reducer. Every checkpoint holds the transcript so far.
- async: the same as coroutines, with AsyncSqliteSaver.
- delta: a DeltaChannel (beta): checkpoints hold what is new, and every hundredth the whole.
"""

from __future__ import annotations

import operator
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypedDict

import uvloop
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph

from bench.agents.script import Entry, Stopwatch, Tool, digest_of, entry_of
from bench.work import Figures

FORMS: Final = ("graph", "async", "delta")
_ROUNDS_BESIDE: Final = 10  # of the graph, beside the turns, until LangGraph takes it for an endless one
_EMPTY: Final[dict[str, Any]] = {"transcript": []}
_FULL: Final = 2


def _joined(transcript: list[Entry], news: Sequence[list[Entry]]) -> list[Entry]:
    return [*transcript, *(entry for new in news for entry in new)]


class Whole(TypedDict):
    transcript: Annotated[list[Entry], operator.add]
    digest: str


class Delta(TypedDict):
    transcript: Annotated[list[Entry], DeltaChannel(_joined)]
    digest: str


def run(folder: Path, steps: int, form: str, dies_at: int | None = None) -> Figures:
    """Starts the agent, or goes on with the one that it finds in the folder."""
    tool = Tool(dies_at)
    path = folder / "langgraph.db"
    if form == "async":
        return uvloop.run(_run_async(path, steps, tool))
    return _run(path, steps, tool, Delta if form == "delta" else Whole)


def _run(path: Path, steps: int, tool: Tool, state: type[Any]) -> Figures:
    def turn(so_far: Any) -> dict[str, Any]:
        number = len(so_far["transcript"])
        return {"transcript": [entry_of(number, tool.lookup_now(number))]}

    database = sqlite3.connect(path, check_same_thread=False)
    database.execute("PRAGMA synchronous = FULL")
    saver = SqliteSaver(database)
    graph = _graph(state, turn, steps).compile(checkpointer=saver)
    config = _config(steps)
    begun = saver.get_tuple(config) is not None
    stopwatch = Stopwatch(steps, tool)
    last = graph.invoke(None if begun else _EMPTY, config, durability="sync")
    figures = stopwatch.figures(last["digest"])
    ((synchronous,),), ((journal,),) = (database.execute(f"PRAGMA {name}") for name in ("synchronous", "journal_mode"))
    _require_durable(synchronous, journal)
    return figures


async def _run_async(path: Path, steps: int, tool: Tool) -> Figures:
    async def turn(so_far: Any) -> dict[str, Any]:
        number = len(so_far["transcript"])
        return {"transcript": [entry_of(number, await tool.lookup(number))]}

    async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
        await saver.conn.execute("PRAGMA synchronous = FULL")
        graph = _graph(Whole, turn, steps).compile(checkpointer=saver)
        config = _config(steps)
        begun = await saver.aget_tuple(config) is not None
        stopwatch = Stopwatch(steps, tool)
        last = await graph.ainvoke(None if begun else _EMPTY, config, durability="sync")
        figures = stopwatch.figures(last["digest"])
        ((synchronous,),) = await saver.conn.execute_fetchall("PRAGMA synchronous")
        ((journal,),) = await saver.conn.execute_fetchall("PRAGMA journal_mode")
    _require_durable(synchronous, journal)
    return figures


def _graph(state: type[Any], turn: Any, steps: int) -> Any:
    def finish(so_far: Any) -> dict[str, Any]:
        return {"digest": digest_of(so_far["transcript"])}

    def after(so_far: Any) -> str:
        return "turn" if len(so_far["transcript"]) < steps else "finish"

    graph: Any = StateGraph(state)
    graph.add_node("turn", turn)
    graph.add_node("finish", finish)
    graph.add_edge(START, "turn")
    graph.add_conditional_edges("turn", after, ["turn", "finish"])
    graph.add_edge("finish", END)
    return graph


def _config(steps: int) -> Any:
    return {"configurable": {"thread_id": "agent-1"}, "recursion_limit": steps + _ROUNDS_BESIDE}


def _require_durable(synchronous: int, journal: str) -> None:
    if (synchronous, journal) != (_FULL, "wal"):
        raise RuntimeError(f"LangGraph ran with synchronous {synchronous}, journal mode {journal}")
