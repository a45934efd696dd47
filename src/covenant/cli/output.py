"""Stdout, which may be a pipe that nobody reads to its end, a file on a full disk, or closed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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


def silence() -> None:
    """Nothing more goes to stdout, not what is left in its buffer at the very end either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
