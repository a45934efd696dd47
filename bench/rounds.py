"""The figures of all rounds, and the medians over them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.work import Figures


class Rounds:
    """By the name of the cell, in the order of the rounds."""

    def __init__(self) -> None:
        self.figures: dict[str, list[Figures]] = {}

    def add(self, name: str, figures: Figures) -> None:
        self.figures.setdefault(name, []).append(figures)

    def median(self, name: str, figure: str) -> float | None:
        values = self._values(name, figure)
        return median(values) if values else None

    def ratio(self, name: str, figure: str, other: str, other_figure: str) -> float | None:
        """The median of the ratios within each round: the two were measured next to each other, so a disk that grows
        slower meanwhile does not count."""
        pairs = list(zip(self._values(name, figure), self._values(other, other_figure), strict=False))
        return median(a / b for a, b in pairs) if pairs else None

    def best(self, names: Sequence[str], figure: str) -> str:
        """The name with the highest median."""
        return max(names, key=lambda name: self.median(name, figure) or 0.0)

    def _values(self, name: str, figure: str) -> list[float]:
        return [figures[figure] for figures in self.figures.get(name, []) if figure in figures]
