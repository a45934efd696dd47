"""The rows of the service."""

from __future__ import annotations

from typing import Final

from bench.report import Section, beside
from bench.rounds import Rounds
from bench.serve.client import VERBS
from bench.serve.load import WAKE_ALLOWANCE_MS
from bench.serve.plan import CONNECTIONS, FULL, GRANTS_FEW, GRANTS_MANY, IPC_CONNECTIONS, POLLS
from bench.table import Bar, Row

HTTP_BAR: Final = Bar(0.30, True)
IPC_BAR: Final = Bar(1.5, True)
WAKE_BAR: Final = Bar(1, False)
POLLS_BAR: Final = Bar(400, False, " MiB")
WOKEN_BAR: Final = Bar(1, False)
DOOR_BAR: Final = Bar(0.90, True)
CHECK_BAR: Final = Bar(1.2, False)

_HTTP: Final = f"http {FULL}"


def service_sections(rounds: Rounds) -> list[Section]:
    return [
        ("The service: HTTP beside a bare ASGI callable", [*_http(rounds), *_cpu(rounds)]),
        (f"The service: a Unix socket beside HTTP, {FULL} requests in flight", _ipc(rounds)),
        ("The service: the door", [*_door(rounds), _checks(rounds)]),
        ("The service: requests that wait", [_wakes(rounds), *_polls(rounds)]),
        ("The service: time to a reply over HTTP", _replies(rounds)),
    ]


def _http(rounds: Rounds) -> list[Row]:
    rows = []
    for connections in CONNECTIONS:
        bar = HTTP_BAR if connections == FULL else None
        ours, other = (f"http {connections}", "rate"), (f"floor {connections}", "rate")
        rows.append(beside(rounds, f"requests, {_connections(connections)}", "/s", ours, other, bar, "floor"))
    return rows


def _connections(count: int) -> str:
    return f"{count} connection{'s' if count > 1 else ''}"


def _cpu(rounds: Rounds) -> list[Row]:
    """Time of a core, which other work on the machine disturbs least."""
    name, floor = f"floor {FULL}", "floor"
    measure = "CPU of the server per request"
    row = beside(rounds, measure, "us", (_HTTP, "server_us"), (name, "server_us"), None, floor)
    load = beside(rounds, "CPU of the load per request", "us", (_HTTP, "load_us"), (name, "load_us"), None, floor)
    return [row, load]


def _ipc(rounds: Rounds) -> list[Row]:
    depth = FULL // IPC_CONNECTIONS
    measure = f"requests, {IPC_CONNECTIONS} connections of {depth}"
    rows = [beside(rounds, measure, "/s", ("ipc", "rate"), (_HTTP, "rate"), IPC_BAR, "http")]
    for figure in ("p50", "p99"):
        ours, other = ("ipc", f"{figure}_ms"), (_HTTP, f"{figure}_ms")
        rows.append(beside(rounds, f"reply {figure}", "ms", ours, other, None, "http"))
    ours, other = ("ipc", "server_us"), (_HTTP, "server_us")
    rows.append(beside(rounds, "CPU of the server per request", "us", ours, other, None, "http"))
    return rows


def _door(rounds: Rounds) -> list[Row]:
    rate = f"requests, {_connections(FULL)}"
    cpu = "CPU of the server per request"
    return [
        beside(rounds, rate, "/s", ("door", "rate"), ("no door", "rate"), DOOR_BAR, "no door"),
        beside(rounds, cpu, "us", ("door", "server_us"), ("no door", "server_us"), None, "no door"),
    ]


def _checks(rounds: Rounds) -> Row:
    measure, ours, other = f"one check, {GRANTS_MANY:,} grants", ("checks", "many_ns"), ("checks", "few_ns")
    return beside(rounds, measure, "ns", ours, other, CHECK_BAR, f"{GRANTS_FEW}:")


def _wakes(rounds: Rounds) -> Row:
    allowed = f"2 fdatasyncs + {WAKE_ALLOWANCE_MS}"
    measure = "a send wakes a waiting next, p50"
    return beside(rounds, measure, "ms", ("wakes", "p50_ms"), ("wakes", "allowed_ms"), WAKE_BAR, allowed)


def _polls(rounds: Rounds) -> list[Row]:
    polls = rounds.median("polls", "polls") or POLLS  # fewer where the system allows fewer open files
    figures = (
        (f"memory, {polls:,.0f} open long-polls", "rss_mib", "MiB", POLLS_BAR),
        ("... of which they are", "growth_mib", "MiB", None),
        ("... each", "kib_per_poll", "KiB", None),
        (f"wake-up among {polls:,.0f}, p50", "wake_p50_ms", "ms", None),
        (f"wake-up among {polls:,.0f}, p99", "wake_p99_ms", "ms", None),
    )
    rows = [
        Row(measure=measure, covenant=rounds.median("polls", figure), unit=unit, bar=bar)
        for measure, figure, unit, bar in figures
    ]
    woken = beside(rounds, "polls answered", "", ("polls", "replies"), ("polls", "events"), WOKEN_BAR, "events")
    return [*rows, woken]


def _replies(rounds: Rounds) -> list[Row]:
    return [
        beside(
            rounds,
            f"{verb} {figure}, {_connections(connections)}",
            "ms",
            (f"http {connections}", f"{verb}_{figure}_ms"),
            (f"floor {connections}", f"{verb}_{figure}_ms"),
            None,
            "floor",
        )
        for connections in CONNECTIONS
        for verb in VERBS
        for figure in ("p50", "p99")
    ]
