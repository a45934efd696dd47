"""The rows of durable agents."""

from __future__ import annotations

from typing import Final

from bench.agents.plan import ENTRIES_FEW, ENTRIES_MANY, PAUSES
from bench.report import Section, beside
from bench.rounds import Rounds
from bench.table import Bar, Row

AHEAD_BAR: Final = Bar(1, True)
LINEAR_BAR: Final = Bar(12, False)
PAUSE_BAR: Final = Bar(2, False)
_SLACK_MS: Final = 2
_SYNCS: Final = 2


def agent_sections(rounds: Rounds) -> list[Section]:
    return [
        ("Durable agents: a scripted agent, steps one after the other, beside the peers", _steps(rounds)),
        ("Durable agents: going on", [_wake(rounds), *_resumes(rounds)]),
    ]


def _steps(rounds: Rounds) -> list[Row]:
    ours = ("agent covenant task", "rate")
    rows = [
        beside(rounds, f"steps beside {name}", "/s", ours, (f"agent {cell}", "rate"), bar, cell)
        for name, cell, bar in (
            ("DBOS (SQLite)", "dbos", AHEAD_BAR),
            ("DBOS, as coroutines", "dbos async", AHEAD_BAR),
            ("DBOS, with its stream", "dbos stream", AHEAD_BAR),
            ("LangGraph (SQLite)", "langgraph", AHEAD_BAR),
            ("LangGraph, as coroutines", "langgraph async", AHEAD_BAR),
            ("LangGraph, delta channel (beta)", "langgraph delta", AHEAD_BAR),
        )
    ]
    measure = "steps that are effects, each begun and ended by a commit"
    rows.append(Row(measure=measure, covenant=rounds.median("agent covenant effect", "rate"), unit="/s"))
    return rows


def _wake(rounds: Rounds) -> Row:
    bare = rounds.median("bare beside agents", "p50_ms")
    allowed = None if bare is None else _SYNCS * bare + _SLACK_MS
    return Row(
        measure="from a result to the agent's next line, p50",
        covenant=rounds.median("agent wakes", "p50_ms"),
        unit="ms",
        other_name="2 syncs + 2 ms",
        other=allowed,
        bar=None if allowed is None else Bar(round(allowed, 2), False, " ms"),
    )


def _resumes(rounds: Rounds) -> list[Row]:
    many, few = ("agent resumed many", "seconds"), ("agent resumed few", "seconds")
    snapshot, raw = ("agent paused", "snapshot_bytes"), ("agent paused", "raw_bytes")
    return [
        beside(rounds, f"resume of {ENTRIES_MANY:,} entries", "s", many, few, LINEAR_BAR, f"{ENTRIES_FEW:,}:"),
        beside(rounds, f"snapshot after {PAUSES:,} pauses", "bytes", snapshot, raw, PAUSE_BAR, "raw entries"),
    ]
