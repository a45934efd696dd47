"""Stdout and stderr, which may be pipes that nobody reads to their end, files on a full disk, or closed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import click


class Unwritten(Exception):
    """Stdout does not take the answer. What was asked for is done all the same, so this is no failure of it."""

    def __init__(self, failed: OSError) -> None:
        super().__init__(str(failed))
        self.failed = failed


@contextmanager
def written() -> Iterator[None]:
    """Around whatever writes to stdout."""
    try:
        yield
    except OSError as failed:
        raise Unwritten(failed) from failed


def have_streams() -> None:
    """Whoever started this may have closed some: what is opened first would be taken for them."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def last_word(text: str | bytes, err: bool = False) -> None:
    """Who cannot hear it still learns from the exit code what became of it."""
    try:
        click.echo(text, err=err)
    except OSError:
        silence(sys.stderr if err else sys.stdout)


def silence(stream: TextIO) -> None:
    """Nothing more goes there, not what is left in its buffer at the very end either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
