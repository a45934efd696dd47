"""Tables, lists of fields and trees: plain text for a pipe, colours and fitted columns for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import click


class Column(NamedTuple):
    """`fits`: it may be shortened so that the others, ids above all, stay whole."""

    title: str
    fits: bool = False


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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, column in enumerate(columns):
        widest = max((len(row[place].text) for row in rows), default=0)
        table.add_column(
            column.title.upper(),
            no_wrap=True,
            overflow="ellipsis",
            min_width=4 if column.fits else max(widest, len(column.title)),
        )
    for row in rows:
        table.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    Console(highlight=False, soft_wrap=False).print(table)


def print_fields(fields: Iterable[tuple[str, str | None]]) -> None:
    """One line for each that has something to say."""
    told = [(name, text) for name, text in fields if text]
    width = max((len(name) for name, _ in told), default=0)
    for name, text in told:
        lines = text.splitlines() or [""]
        click.echo(f"{click.style(name.ljust(width), dim=True)}  {lines[0]}")
        for line in lines[1:]:
            click.echo(f"{' ' * width}  {line}")
