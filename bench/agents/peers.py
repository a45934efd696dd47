"""`python -m bench.agents.peers`: the peers for agents alone. First the check that each goes on where it was killed."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.agents.script import STEPS
from bench.cell import CellFailed, measure
from bench.rounds import Rounds

# By the name of the figures: the cell, and its form.
PEERS: Final = {
    "agent dbos": ("agents dbos", "step"),
    "agent langgraph": ("agents langgraph", "graph"),
    "agent dbos async": ("agents dbos", "async"),
    "agent langgraph async": ("agents langgraph", "async"),
    "agent dbos stream": ("agents dbos", "stream"),
    "agent langgraph delta": ("agents langgraph", "delta"),
}
_CHECKED_STEPS: Final = 30
_DEATHS: Final = (7, 8, 21)
_WORK: Final = Path(__file__).resolve().parents[1] / "results" / ".work"


def check(cell: str, form: str, folder: Path) -> None:
    """An agent that is killed within a call of its tool has kept all turns before: they are not called again."""
    for death in _DEATHS:
        try:
            measure(cell, folder, steps=_CHECKED_STEPS, form=form, dies_at=death)
        except CellFailed:
            continue
        raise RuntimeError(f"{cell}, {form}: it was not called at step {death}")
    figures = measure(cell, folder, steps=_CHECKED_STEPS, form=form)
    if figures["calls"] != _CHECKED_STEPS - _DEATHS[-1]:
        raise RuntimeError(f"{cell}, {form}: {figures['calls']} calls after it was killed at step {_DEATHS[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.agents.peers", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for name, (cell, form) in PEERS.items():
        with _folder() as folder:
            check(cell, form, folder)
        print(f"{name}: goes on where it was killed", file=sys.stderr)
    rounds = Rounds()
    for _ in range(options.rounds):
        for name, (cell, form) in PEERS.items():
            with _folder() as folder:
                rounds.add(name, measure(cell, folder, steps=options.steps, form=form))
    for name, turns in rounds.figures.items():
        of_rounds = ", ".join(f"{figures['rate']:.0f}" for figures in turns)
        print(f"{name}: {rounds.median(name, 'rate'):.0f} steps/s ({of_rounds})")


@contextmanager
def _folder() -> Iterator[Path]:
    """Beside the results, on the disk that the benchmark measures."""
    _WORK.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=_WORK))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not any(_WORK.iterdir()):
            _WORK.rmdir()


if __name__ == "__main__":
    main()
