"""The rows of PostgreSQL."""

from __future__ import annotations

import os
from typing import Final

from bench.plan import Plan
from bench.postgres.plan import CLIENTS, COMPARED, DAEMONS, WAITERS
from bench.report import PAST_BAR, Section, beside
from bench.rounds import Rounds
from bench.table import Bar, Row

QUEUE_BARS: Final = {32: Bar(1.5, True), 128: Bar(2.5, True)}
PEERS_BAR: Final = Bar(10, True)
IDLE_BAR: Final = Bar(0, False, " /s")
WOKEN_BAR: Final = Bar(1, True)
_US: Final = "us"
_PEERS: Final = {"procrastinate": "Procrastinate", "dbos": "DBOS, by its queue", "absurd": "Absurd"}


def postgres_sections(rounds: Rounds, plan: Plan, *, with_peers: bool, with_history: bool) -> list[Section]:
    found: list[Section] = []
    for daemons in DAEMONS:
        title = (
            "one daemon beside a plain queue" if daemons == 1 else f"{daemons} daemons beside {daemons} plain queues"
        )
        found.append((f"PostgreSQL: durable cycles, {title}", _cycles(rounds, daemons)))
    found.append(("PostgreSQL: CPU of a cycle, beside what the machine has for one at the bar", _costs(rounds)))
    if with_peers:
        found.append(("PostgreSQL: durable cycles, one daemon beside the peers", _peers(rounds)))
    found.append(("PostgreSQL: time to a reply, one daemon beside a step of the plain queue", _replies(rounds)))
    if with_history:
        title = f"PostgreSQL: {plan.many:,} tasks in the tables beside {plan.few:,}"
        found.append((title, [_past(rounds, plan)]))
    found.append(("PostgreSQL: agents that wait", _waiting(rounds)))
    return found


def _clients(count: int) -> str:
    return f"{count} client{'s' if count > 1 else ''}"


def _ours(clients: int, daemons: int = 1) -> tuple[str, str]:
    return f"postgres covenant {clients} by {daemons}", "rate"


def _cycles(rounds: Rounds, daemons: int) -> list[Row]:
    rows = []
    for clients in CLIENTS:
        ours, queue = _ours(clients, daemons), (f"postgres queue {clients} by {daemons}", "rate")
        bar = QUEUE_BARS.get(clients) if daemons == 1 else None
        rows.append(beside(rounds, f"cycles, {_clients(clients)}", "/s", ours, queue, bar, "queue"))
        answering = (f"postgres answering queue {clients}", "rate")
        if daemons == 1 and answering[0] in rounds.figures:
            measure = "... beside one whose sender takes the answer too"
            rows.append(beside(rounds, measure, "/s", ours, answering, None, "queue"))
    return rows


def _costs(rounds: Rounds) -> list[Row]:
    """A cycle cannot cost less than clients and rules without a database, and its statements without an engine."""
    rows = []
    for clients, bar in QUEUE_BARS.items():
        queue = rounds.median(f"postgres queue {clients} by 1", "rate")
        there = None if queue is None else (os.cpu_count() or 1) * 1e6 / (bar.limit * queue)
        figures = (("clients and rules alone", "rules", "cpu_us"), ("the driver alone", "statements", "driver_us"))
        found = []
        for measure, name, figure in (*figures, ("the server alone", "statements", "server_us")):
            found.append(rounds.median(f"postgres {name} {clients}", figure))
            rows.append(Row(measure=f"{measure}, {_clients(clients)}", covenant=found[-1], unit=_US))
        spent = None if None in found else sum(part for part in found if part is not None)
        ratio = None if spent is None or there is None else spent / there
        measure, name = f"all of these, {_clients(clients)}", f"at {bar.limit:g}x the queue"
        rows.append(Row(measure=measure, covenant=spent, unit=_US, other_name=name, other=there, ratio=ratio))
    return rows


def _peers(rounds: Rounds) -> list[Row]:
    rows = []
    best = rounds.best([f"postgres {peer} {COMPARED}" for peer in _PEERS], "rate")
    measure = f"cycles beside the best of them, {_clients(COMPARED)}"
    rows.append(beside(rounds, measure, "/s", _ours(COMPARED), (best, "rate"), PEERS_BAR, best.split()[1]))
    for peer, title in _PEERS.items():
        for clients in CLIENTS:
            other = (f"postgres {peer} {clients}", "rate")
            if other[0] in rounds.figures:
                measure = f"cycles beside {title}, {_clients(clients)}"
                rows.append(beside(rounds, measure, "/s", _ours(clients), other, None, peer))
    direct = ("postgres dbos direct", "rate")
    measure = "... DBOS called directly, nobody in between"
    rows.append(beside(rounds, measure, "/s", _ours(COMPARED), direct, None, "dbos direct"))
    return rows


def _replies(rounds: Rounds) -> list[Row]:
    rows = []
    for clients in CLIENTS:
        for figure in ("p50", "p99"):
            ours = (f"postgres covenant {clients} by 1", f"{figure}_ms")
            queue = (f"postgres queue {clients} by 1", f"{figure}_ms")
            rows.append(beside(rounds, f"reply {figure}, {_clients(clients)}", "ms", ours, queue, None, "queue"))
    return rows


def _past(rounds: Rounds, plan: Plan) -> Row:
    many, few = ("postgres cycles many", "rate"), ("postgres cycles few", "rate")
    measure = f"cycles, {_clients(COMPARED)}, {plan.many:,} tasks"
    return beside(rounds, measure, "/s", many, few, PAST_BAR, f"{plan.few:,}:")


def _waiting(rounds: Rounds) -> list[Row]:
    """The safety poll is what one that waits causes; all others together must cause nothing more."""
    nobody, one, many = (rounds.median(f"postgres waiting {waiters}", "rate") for waiters in WAITERS)
    # Rounded, as the window may begin and end just before a poll in one case and just behind it in the other.
    more = None if many is None or one is None else max(0, round(many - one))
    woken = rounds.median("postgres woken", "woken")
    return [
        Row(measure="statements of an open store that nobody uses", covenant=nobody, unit="/s"),
        Row(measure="... with one agent that waits", covenant=one, unit="/s"),
        Row(measure=f"... with {WAITERS[-1]:,} agents that wait", covenant=many, unit="/s"),
        Row(measure=f"statements of {WAITERS[-1]:,} beyond the safety poll", covenant=more, unit="/s", bar=IDLE_BAR),
        Row(
            measure="of those that wait, woken by a task",
            covenant=woken,
            unit="",
            other_name="of",
            other=WAITERS[-1],
            ratio=None if woken is None else woken / WAITERS[-1],
            bar=WOKEN_BAR,
        ),
    ]
