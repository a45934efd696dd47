"""Tables, lists of fields and trees: plain text for a pipe, colours and fitted columns for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import click

_GAP: Final = 2
_LEAST: Final = 8
_ID: Final = 42  # an id, and the word before it


class Column(NamedTuple):
    """On a terminal, one that `fits` is shortened and one that `wraps` is broken, so that ids stay whole."""

    title: str
    fits: bool = False
    wraps: bool = False


class Cell(NamedTuple):
    text: str
    style: str


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]]) -> None:
    cells = [[cell if isinstance(cell, Cell) else Cell(cell, "") for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_fitted(columns, cells)
    else:
        _print_plain(columns, cells)


def _print_plain(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    texts = [[column.title.upper() for column in columns], *([cell.text for cell in row] for row in rows)]
    widths = [max(len(row[place]) for row in texts) for place in range(len(columns))]
    for row in texts:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _print_fitted(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """rich is slow to import, and only a terminal needs it."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    wanted = [
        max(len(column.title), *(cell_len(row[place].text) for row in rows)) for place, column in enumerate(columns)
    ]
    widths = _fitted(columns, wanted, console.width)
    console.width = max(console.width, sum(widths) + _GAP * len(widths))  # the terminal breaks what is too long
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column.title.upper(), no_wrap=not column.wraps, overflow="ellipsis", width=width)
    for row in rows:
        table.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    console.print(table)


def _fitted(columns: Sequence[Column], wanted: Sequence[int], room: int) -> list[int]:
    """What each column gets: the rigid ones all that they want, the others their share of the rest."""
    widths = list(wanted)
    flexible = (place for place, column in enumerate(columns) if column.fits or column.wraps)
    fitting = sorted(flexible, key=lambda place: wanted[place])
    left = room - _GAP * (len(columns) - 1) - sum(wanted) + sum(wanted[place] for place in fitting)
    for number, place in enumerate(fitting):
        least = _ID if columns[place].wraps else _LEAST
        widths[place] = min(wanted[place], max(least, left // (len(fitting) - number)))
        left -= widths[place]
    return widths


def print_fields(fields: Iterable[tuple[str, str | None]]) -> None:
    """One line for each that has something to say."""
    told = [(name, text) for name, text in fields if text]
    width = max((len(name) for name, _ in told), default=0)
    for name, text in told:
        lines = text.splitlines() or [""]
        click.echo(f"{click.style(name.ljust(width), dim=True)}  {lines[0]}")
        for line in lines[1:]:
            click.echo(f"{' ' * width}  {line}")
