"""A Unix socket deep in a file tree: the system takes paths of some hundred bytes only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_BYTES_MAX: Final = 100


@contextmanager
def within_reach(path: str | Path) -> Iterator[str]:
    """The path as the system takes it: itself, or, when it is too long, by way of its open folder."""
    path = os.fspath(path)
    if len(os.fsencode(path)) <= _BYTES_MAX or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)
