"""Clients as threads, for the peers whose API blocks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bench.work import Figures, Tally, Window


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
