"""The table: measure, covenant, other, ratio, bar, verdict; as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

MET: Final = "met"
MISSED: Final = "MISSED"
UNMEASURED: Final = "NOT MEASURED"
_HEAD: Final = ("measure", "covenant", "other", "ratio", "bar", "verdict")


class Bar(Struct, frozen=True):
    """A bound on the ratio (or, without one, on the figure itself)."""

    limit: float
    least: bool  # at least, or at most
    unit: str = "x"

    def __str__(self) -> str:
        return f"{'>=' if self.least else '<='} {_short(self.limit)}{self.unit}"

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.least else value <= self.limit


class Row(Struct, frozen=True, kw_only=True):
    """One line. `other` says what stands beside the figure, and how much it is."""

    measure: str
    covenant: float | None
    unit: str
    other_name: str = ""
    other: float | None = None
    ratio: float | None = None
    bar: Bar | None = None

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return "" if self.covenant is not None else UNMEASURED
        judged = self.ratio if self.bar.unit == "x" else self.covenant
        if judged is None:
            return UNMEASURED
        return MET if self.bar.holds(judged) else MISSED

    def cells(self) -> tuple[str, ...]:
        return (
            self.measure,
            _amount(self.covenant, self.unit),
            f"{self.other_name} {_amount(self.other, self.unit)}".strip() if self.other_name else "",
            "" if self.ratio is None else f"{_short(self.ratio)}x",
            "" if self.bar is None else str(self.bar),
            self.verdict,
        )

    def as_json(self) -> dict[str, object]:
        return {
            "measure": self.measure,
            "unit": self.unit,
            "covenant": self.covenant,
            "other": self.other_name or None,
            "other_value": self.other,
            "ratio": self.ratio,
            "bar": None if self.bar is None else str(self.bar),
            "verdict": self.verdict or None,
        }


def render(sections: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """Columns as wide as they need to be, with the name of each section above its rows."""
    grid = [_HEAD, *(row.cells() for _, rows in sections for row in rows)]
    widths = [max(len(line[column]) for line in grid) for column in range(len(_HEAD))]
    lines = [_line(_HEAD, widths), "-" * (sum(widths) + 2 * len(widths) - 2)]
    for title, rows in sections:
        lines += ["", title, *(_line(row.cells(), widths) for row in rows)]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """How many bars are met, and loudly which are not."""
    judged = [row for row in rows if row.bar is not None]
    failed = [row for row in judged if row.verdict != MET]
    lines = [f"{len(judged) - len(failed)} of {len(judged)} bars met."]
    lines += [f"!!! {row.verdict}: {row.measure}: {'  '.join(filter(None, row.cells()[1:5]))}" for row in failed]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Text to the left, numbers to the right."""
    first, *numbers = cells[:5]
    padded = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:5], strict=True))]
    return "  ".join([*padded, cells[5]]).rstrip()


def _amount(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{_short(value)} {unit}".strip()


def _short(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
