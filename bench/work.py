"""The work that every candidate does, and how a window of it becomes figures.

One cycle: a task of 160 characters is sent, received, answered with 100 characters, and the answer is taken. In the
journal the line of the send is some 600 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, TypeAlias

INTENT: Final = "Summarise the three incident reports of last night for the morning meeting. ".ljust(160, "x")
REPLY: Final = "Three incidents, one of them open: the write path of the second region. ".ljust(100, "y")

Figures: TypeAlias = dict[str, float]


class Window:
    """The stretch of time that counts: after a warm-up, until the end. Times are `time.perf_counter()`."""

    def __init__(self, warm_s: float, seconds: float) -> None:
        self.begin = time.perf_counter() + warm_s
        self.end = self.begin + seconds
        self.seconds = seconds


class Tally:
    """How often something was finished within the window, and how long each took."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.count = 0
        self.times: list[float] = []

    def note(self, start: float, stop: float) -> None:
        window = self.window
        if window.begin <= stop <= window.end:  # in the loop of every client: not a call more than it takes
            self.count += 1
            self.times.append(stop - start)

    def figures(self) -> Figures:
        if not self.times:
            raise RuntimeError("nothing was finished within the window")
        self.times.sort()
        return {
            "rate": self.count / self.window.seconds,
            "mean_ms": sum(self.times) / len(self.times) * 1000,
            "p50_ms": percentile(self.times, 50) * 1000,
            "p99_ms": percentile(self.times, 99) * 1000,
        }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest rank of values in ascending order."""
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]
