"""`python -m bench`: measure, print the table, write it to bench/results/.

The exit code is 0 also when a bar is missed: a benchmark tells, it does not judge a build.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from bench import machine
from bench.a2a.report import protocol_sections
from bench.agents.report import agent_sections
from bench.plan import Plan
from bench.postgres.plan import PostgresRun
from bench.postgres.report import postgres_sections
from bench.report import Section, sections
from bench.serve.report import service_sections
from bench.table import render, summary

_PARTS: Final = ("core", "serve", "a2a", "agents", "postgres")
RESULTS: Final = Path(__file__).resolve().parent / "results"
_NOTE: Final = (
    "Figures are medians over the rounds; a ratio is the median of the ratios within each round, so it may differ a\n"
    "little from the quotient of the two figures beside it."
)


def main() -> None:
    options = _options()
    plan = _plan(options)
    work = RESULTS / ".work"
    work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=work))
    began = time.monotonic()
    run = PostgresRun(plan, folder)
    try:
        if options.with_core:
            run.all(with_peers=not options.no_peers, with_history=not options.no_history)
        if options.with_serve:
            run.service()
        if options.with_a2a:
            run.protocol()
        if options.with_agents:
            run.agents(with_peers=not options.no_peers)
        if options.with_postgres:
            with_peers, with_history = not options.no_peers, not options.no_history
            run.postgres(with_peers=with_peers, with_history=with_history, absurd_sql=options.absurd_sql)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not any(work.iterdir()):
            work.rmdir()
    _publish(run, options, time.monotonic() - began)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Covenant beside the bare disk and beside its peers: durable cycles, replies, memory, start-up, "
        "the service in front of it, the A2A protocol, durable agents, and PostgreSQL under it.",
        epilog="Results go to bench/results/latest.txt and latest.json, those of --only-serve to serve.*, of "
        "--only-a2a to a2a.*, of --only-agents to agents.*, of --only-postgres to postgres.*. A full run takes some 50 "
        "minutes and 8 GB.",
    )
    parser.add_argument("--quick", action="store_true", help="some 3 minutes: short windows, 50,000 for the million")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each comparison (default 5, quick 3)")
    parser.add_argument("--seconds", type=float, metavar="S", help="length of a window (default 1.5, quick 0.7)")
    parser.add_argument("--many", type=int, metavar="N", help="tasks in the large store, events in the opened log")
    parser.add_argument("--no-peers", action="store_true", help="leave out Huey, DBOS and the others")
    parser.add_argument("--no-history", action="store_true", help="leave out the large stores and the start-up")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--only-core", action="store_true", help="without the service, the A2A protocol and agents")
    only.add_argument("--only-serve", action="store_true", help="the service alone, some 2 minutes")
    only.add_argument("--only-a2a", action="store_true", help="the A2A protocol alone, some 2 minutes")
    only.add_argument("--only-agents", action="store_true", help="durable agents alone, some 2 minutes")
    only.add_argument("--only-postgres", action="store_true", help="the store on PostgreSQL alone")
    parser.add_argument(
        "--absurd-sql",
        type=Path,
        metavar="FILE",
        help="absurd.sql of a release of Absurd, which its package does not bring; without it Absurd is left out",
    )
    parser.add_argument("--memory", action="store_true", help="the store without a disk: only to try the bench itself")
    options = parser.parse_args()
    for name in ("rounds", "seconds", "many"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} is a number above 0")
    if options.absurd_sql is not None and not options.absurd_sql.is_file():
        parser.error("--absurd-sql is a file")
    chosen = [part for part in _PARTS if getattr(options, f"only_{part}")]
    for part in _PARTS:
        setattr(options, f"with_{part}", not chosen or part in chosen)
    options.name = "latest" if not chosen or chosen == ["core"] else chosen[0]
    return options


def _plan(options: argparse.Namespace) -> Plan:
    quick: bool = options.quick
    rounds = options.rounds or (3 if quick else 5)
    seconds = options.seconds or (0.7 if quick else 1.5)
    return Plan(
        scheme="memory" if options.memory else "file",
        rounds=rounds,
        seconds=seconds,
        peer_seconds=1.5 * seconds,
        warm_s=0.3,
        few=1000,
        many=options.many or (50_000 if quick else 1_000_000),
        start_rounds=min(rounds, 3),
    )


def _sections(run: PostgresRun, options: argparse.Namespace) -> list[Section]:
    found: list[Section] = []
    if options.with_core:
        with_peers, with_history = not options.no_peers, not options.no_history
        found += sections(run.rounds, run.plan, with_peers=with_peers, with_history=with_history)
    if options.with_serve:
        found += service_sections(run.rounds)
    if options.with_a2a:
        found += protocol_sections(run.rounds)
    if options.with_agents:
        found += agent_sections(run.rounds)
    if options.with_postgres:
        with_peers, with_history = not options.no_peers, not options.no_history
        found += postgres_sections(run.rounds, run.plan, with_peers=with_peers, with_history=with_history)
    return found


def _publish(run: PostgresRun, options: argparse.Namespace, seconds: float) -> None:
    found = _sections(run, options)
    rows = [row for _, of_section in found for row in of_section]
    facts = machine.facts()
    about = ", ".join(f"{name} {value}" for name, value in facts.items())
    sizes = ", ".join(str(size) for size in run.sizes)
    lines = f"Journal lines of a cycle: {sizes} bytes. " if options.with_core else ""
    how = f"{lines}{run.plan.rounds} rounds, {seconds:.0f} s in all."
    text = "\n\n".join([render(found), summary(rows), f"{_NOTE}\n{how}\n{about}"])
    print(text)
    document = {
        "machine": facts,
        "plan": msgspec.to_builtins(run.plan),
        "line_bytes": run.sizes,
        "seconds": round(seconds, 1),
        "rows": [row.as_json() for row in rows],
        "rounds": run.rounds.figures,
    }
    (RESULTS / f"{options.name}.txt").write_text(text + "\n")
    (RESULTS / f"{options.name}.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
