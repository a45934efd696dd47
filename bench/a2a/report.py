"""The rows of the A2A protocol."""

from __future__ import annotations

from typing import Final

from bench.a2a.plan import CHUNKS_FEW, CHUNKS_MANY, COMPARED, CONNECTIONS, STREAMS
from bench.report import Section, beside
from bench.rounds import Rounds
from bench.table import Bar, Row

MEMORY_BAR: Final = Bar(10, True)
SQLITE_BAR: Final = Bar(80, True)
STREAM_BAR: Final = Bar(20, False, " ms")
CHUNKS_BAR: Final = Bar(2.2, False)


def protocol_sections(rounds: Rounds) -> list[Section]:
    return [
        ("The A2A protocol: SendMessage, completed at once, beside the official server", _messages(rounds)),
        ("The A2A protocol: streams and chunks", [*_streams(rounds), _chunks(rounds)]),
    ]


def _messages(rounds: Rounds) -> list[Row]:
    rows = [
        Row(
            measure=f"requests, {connections} connection{'s' if connections > 1 else ''}{who}",
            covenant=rounds.median(f"{name} {connections}", "rate"),
            unit="/s",
        )
        for name, who in (("a2a", ""), ("remote", ", remote worker"))
        for connections in CONNECTIONS
    ]
    ours, measure = (f"a2a {COMPARED}", "rate"), f"requests, {COMPARED} connections, beside its"
    rows.append(beside(rounds, f"{measure} memory", "/s", ours, ("sdk memory", "rate"), MEMORY_BAR, "memory"))
    rows.append(beside(rounds, f"{measure} SQLite", "/s", ours, ("sdk sqlite", "rate"), SQLITE_BAR, "sqlite"))
    for figure in ("p50_ms", "p99_ms"):
        ours, other = (f"a2a {COMPARED}", figure), ("sdk memory", figure)
        rows.append(beside(rounds, f"reply {figure[:3]}, {COMPARED} connections", "ms", ours, other, None, "memory"))
    return rows


def _streams(rounds: Rounds) -> list[Row]:
    count = rounds.median("streams", "streams") or STREAMS
    figures = (
        (f"an event among {count:,.0f} streams, p50", "p50_ms", "ms", None),
        (f"an event among {count:,.0f} streams, p99", "p99_ms", "ms", STREAM_BAR),
        (f"memory, {count:,.0f} streams", "rss_mib", "MiB", None),
    )
    return [
        Row(measure=measure, covenant=rounds.median("streams", figure), unit=unit, bar=bar)
        for measure, figure, unit, bar in figures
    ]


def _chunks(rounds: Rounds) -> Row:
    ours, other = ("chunks", "many_ms"), ("chunks", "few_ms")
    return beside(rounds, f"{CHUNKS_MANY:,} chunks to one task", "ms", ours, other, CHUNKS_BAR, f"{CHUNKS_FEW:,}:")
