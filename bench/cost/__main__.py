"""`python -m bench.cost --against REV`: what a cycle costs now, beside what it cost at another commit.

Both versions are measured in turn, in fresh processes, and compared pair by pair: the median of the ratios is what
counts, since a shared machine is faster at one minute than at the next. The exit code is 1 if a ratio is over the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[2]
_CYCLE: Final = (sys.executable, "-m", "bench.cost.cycle")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cost", description="CPU per cycle beside another commit.")
    parser.add_argument("--against", metavar="REV", required=True, help="the commit to compare with")
    parser.add_argument("--pairs", type=int, metavar="N", default=15, help="how often both are measured (default 15)")
    parser.add_argument(
        "--cycles", type=int, metavar="N", default=1000, help="cycles of each of 8 clients (default 1000)"
    )
    parser.add_argument("--bar", type=float, metavar="X", default=1.08, help="the highest ratio (default 1.08)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        _git("worktree", "add", "--detach", str(other), options.against)
        try:
            pairs = [_pair(other, options.cycles, number) for number in range(options.pairs)]
        finally:
            _git("worktree", "remove", "--force", str(other))
    sys.exit(max([_judged(way, pairs, options.bar) for way in pairs[0][0]]))


def _pair(other: Path, cycles: int, number: int) -> tuple[dict[str, float], dict[str, float]]:
    """This version and the other one; which of them comes first changes from pair to pair."""
    if number % 2:
        theirs, ours = _measured(other, cycles), _measured(_ROOT, cycles)
    else:
        ours, theirs = _measured(_ROOT, cycles), _measured(other, cycles)
    return ours, theirs


def _measured(root: Path, cycles: int) -> dict[str, float]:
    """The program that measures is always this version's; only the package differs."""
    paths = os.pathsep.join((str(root / "src"), str(_ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run((*_CYCLE, str(cycles)), cwd=_ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _judged(way: str, pairs: list[tuple[dict[str, float], dict[str, float]]], bar: float) -> int:
    ratios = sorted(ours[way] / theirs[way] for ours, theirs in pairs)
    ratio = statistics.median(ratios)
    ours, theirs = (statistics.median(figures[way] for figures in side) for side in zip(*pairs, strict=True))
    print(
        f"{way}: {ratio:.3f} x the other commit (bar {bar}; {ratios[0]:.3f} to {ratios[-1]:.3f} in {len(ratios)} "
        f"pairs), {ours:.0f} and {theirs:.0f} us of CPU per cycle"
    )
    return int(ratio > bar)


def _git(*words: str) -> None:
    subprocess.run(("git", *words), cwd=_ROOT, check=True, capture_output=True)


if __name__ == "__main__":
    main()
