"""Clients as threads, for the peers whose API blocks; and an end for those that hang."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from bench.work import Figures, Tally, Window

_PATIENCE_S: Final = 30


def run_threads(client: Callable[[Tally], None], clients: int, warm_s: float, seconds: float) -> Figures:
    """Each client notes its cycles in a tally of its own."""
    window = Window(warm_s, seconds)
    tallies = [Tally(window) for _ in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        for running in [pool.submit(client, tally) for tally in tallies]:
            running.result()
    total = Tally(window)
    for tally in tallies:
        total.count += tally.count
        total.times += tally.times
    return total.figures()


def end_after(seconds: float) -> None:
    """No peer can hold up the run: its process ends when a window of this length should be long over."""
    signal.alarm(math.ceil(seconds) + _PATIENCE_S)
