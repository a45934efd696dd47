"""From the figures of a run to the rows of the table: which figure stands beside which, and against which bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.floor import FORMS as FLOOR_FORMS
from bench.plan import CLIENTS, PASTS, PEER_CLIENTS, Plan
from bench.rounds import Rounds
from bench.table import Bar, Row

Section = tuple[str, Sequence[Row]]

SYNCS_PER_CYCLE: Final = 4
HUEY_BAR: Final = Bar(12, True)
DBOS_BAR: Final = Bar(40, True)
QUEUE_BAR: Final = Bar(5, True)
REPLY_BAR: Final = Bar(3, False)
FLOOR_BAR: Final = Bar(0.15, True)
SINGLE_BAR: Final = Bar(1.5, False)
PAST_BAR: Final = Bar(0.9, True)
GROWTH_BAR: Final = Bar(150, False, " MiB")
START_BAR: Final = Bar(0.2, False)

_DISKLESS: Final = "... of a store that writes nothing"  # memory: what no disk can better
_PER_S: Final = "/s"
_MS: Final = "ms"
_MIB: Final = "MiB"


def sections(rounds: Rounds, plan: Plan, *, with_peers: bool, with_history: bool) -> list[Section]:
    found: list[Section] = [
        ("Durable cycles beside the bare disk", [*_cycles(rounds), _single(rounds)]),
        ("One reply beside one bare fdatasync", _replies(rounds)),
        ("Events per fdatasync", _events(rounds)),
        ("The bare disk alone", _bare(rounds)),
    ]
    if with_peers:
        found.append((f"Durable cycles beside the peers, {PEER_CLIENTS} clients", _peers(rounds)))
    if with_history:
        found.append((f"{plan.many:,} tasks in the store beside {plan.few:,}", _pasts(rounds, plan)))
        found.append((f"Start-up with {plan.many:,} events in the log", _starts(rounds)))
    return found


def _cycles(rounds: Rounds) -> list[Row]:
    rows = []
    for clients in CLIENTS:
        floor = rounds.best([f"group {form} {clients}" for form in FLOOR_FORMS], "rate")
        form = floor.split()[1]
        bar = FLOOR_BAR if clients == CLIENTS[-1] else None
        measure = f"cycles, {clients} client{'s' if clients > 1 else ''}"
        rows.append(
            beside(rounds, measure, _PER_S, (f"covenant {clients}", "rate"), (floor, "rate"), bar, f"{form} floor")
        )
        if bar is not None:
            ours = (f"diskless {clients}", "rate")
            rows.append(beside(rounds, _DISKLESS, _PER_S, ours, (floor, "rate"), None, f"{form} floor"))
    return rows


def _single(rounds: Rounds) -> Row:
    bare = rounds.median("bare beside 1", "mean_ms")
    ratio = rounds.ratio("covenant 1", "cycle_ms", "bare beside 1", "mean_ms")
    return Row(
        measure="one cycle, 1 client",
        covenant=rounds.median("covenant 1", "cycle_ms"),
        unit=_MS,
        other_name="4 fdatasyncs",
        other=None if bare is None else SYNCS_PER_CYCLE * bare,
        ratio=None if ratio is None else ratio / SYNCS_PER_CYCLE,
        bar=SINGLE_BAR,
    )


def _replies(rounds: Rounds) -> list[Row]:
    rows = []
    for clients in CLIENTS:
        for figure in ("p50", "p99"):
            bar = REPLY_BAR if (clients, figure) == (PEER_CLIENTS, "p99") else None
            name = f"reply {figure}, {clients} client{'s' if clients > 1 else ''}"
            ours, bare = (f"covenant {clients}", f"{figure}_ms"), (f"bare beside {clients}", f"{figure}_ms")
            rows.append(beside(rounds, name, _MS, ours, bare, bar, "fdatasync"))
            if clients == PEER_CLIENTS:
                paced = ("paced", f"{figure}_ms")
                rows.append(beside(rounds, "... beside one with our bytes and gaps", _MS, ours, paced, None, "paced"))
    return rows


def _events(rounds: Rounds) -> list[Row]:
    rows = []
    for clients in CLIENTS:
        floor = rounds.best([f"group {form} {clients}" for form in FLOOR_FORMS], "rate")
        measure = f"events per fdatasync, {clients} client{'s' if clients > 1 else ''}"
        ours = (f"covenant {clients}", "events_per_sync")
        rows.append(beside(rounds, measure, "", ours, (floor, "per_sync"), None, f"{floor.split()[1]} floor"))
    return rows


def _bare(rounds: Rounds) -> list[Row]:
    """No figure of ours: they are here to be read."""
    name = f"bare beside {PEER_CLIENTS}"
    figures = (("rate", _PER_S), ("p50_ms", _MS), ("p99_ms", _MS))
    return [
        Row(measure=f"bare fdatasync {figure.removesuffix('_ms')}", covenant=rounds.median(name, figure), unit=unit)
        for figure, unit in figures
    ]


def _peers(rounds: Rounds) -> list[Row]:
    ours = (f"covenant {PEER_CLIENTS}", "rate")
    queue, direct = ("dbos queue", "rate"), ("dbos direct", "rate")
    rows = [
        beside(rounds, "cycles beside Huey (SQLite)", _PER_S, ours, ("huey", "rate"), HUEY_BAR, "huey"),
        # The same work is a task handed to a worker: its queue. A direct call hands nothing over.
        beside(rounds, "cycles beside DBOS (SQLite)", _PER_S, ours, queue, DBOS_BAR, "dbos queue"),
        beside(rounds, "... called directly, nobody in between", _PER_S, ours, direct, None, "dbos direct"),
    ]
    measure = "cycles beside a hand-written SQLite queue"
    rows.append(beside(rounds, measure, _PER_S, ours, ("queue", "rate"), QUEUE_BAR, "queue"))
    return rows


def _pasts(rounds: Rounds, plan: Plan) -> list[Row]:
    rows = []
    for past in PASTS:
        many, few = (f"cycles {past} many", "rate"), (f"cycles {past} few", "rate")
        measure = f"cycles, {PEER_CLIENTS} clients, {plan.many:,} {past}"
        rows.append(beside(rounds, measure, _PER_S, many, few, PAST_BAR, f"{plan.few:,}:"))
    for past in PASTS:
        many, few = (f"fill {past} many", "rss_mib"), (f"fill {past} few", "rss_mib")
        rows.append(beside(rounds, f"memory, {plan.many:,} {past}", _MIB, many, few, None, f"{plan.few:,}:"))
    queued, resolved = (_growth_mib(rounds, past) for past in PASTS)
    per_task = None if queued is None else queued * 1024 * 1024 / (plan.many - plan.few)
    rows.append(Row(measure="memory per queued task", covenant=per_task, unit="bytes"))
    rows.append(
        Row(measure=f"growth by {plan.many:,} resolved tasks", covenant=resolved, unit=_MIB, bar=GROWTH_BAR),
    )
    return rows


def _growth_mib(rounds: Rounds, past: str) -> float | None:
    many, few = (rounds.median(f"fill {past} {size}", "rss_mib") for size in ("many", "few"))
    return None if many is None or few is None else many - few


def _starts(rounds: Rounds) -> list[Row]:
    rows = []
    kinds = (
        ("snapshot", "start, snapshot at the end of the log"),
        ("as left", "start, snapshot where housekeeping left it"),
    )
    for past in reversed(PASTS):
        for start, measure in kinds:
            if start == "as left" and f"start {past} {start}" not in rounds.figures:
                continue
            bar = START_BAR if (past, start) == ("resolved", "snapshot") else None
            ours, other = (f"start {past} {start}", "seconds"), (f"start {past} replay", "seconds")
            rows.append(beside(rounds, f"{measure}, {past}", "s", ours, other, bar, "full replay"))
    return rows


def beside(
    rounds: Rounds,
    measure: str,
    unit: str,
    ours: tuple[str, str],
    other: tuple[str, str],
    bar: Bar | None,
    other_name: str,
) -> Row:
    return Row(
        measure=measure,
        covenant=rounds.median(*ours),
        unit=unit,
        other_name=other_name,
        other=rounds.median(*other),
        ratio=rounds.ratio(*ours, *other),
        bar=bar,
    )
