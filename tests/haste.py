"""What a test would only wait for is made short, once for all of them.

No test takes the power away, so folders lie in memory where the machine has room for them: a sync costs nothing there.
A process of the tests starts and stops a thousand daemons: the page that describes the API is the same for all with the
same limits, and uvicorn looks ten times a second whether its connections have gone.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final

import uvicorn.server

from covenant.serve import openapi

MEMORY: Final = Path("/dev/shm")
ROOM_BYTES: Final = 2 << 30
OURS: Final = "cov-tests-"
LAST: Final = -1000  # behind the ends of processes and their sockets


class _Looking:
    """asyncio, as uvicorn sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s / 100)


def hurry() -> None:
    if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
        _keep_folders_in_memory()
    openapi.page = functools.cache(openapi.page)
    uvicorn.server.asyncio = _Looking()  # type: ignore[attr-defined, assignment]


def _keep_folders_in_memory() -> None:
    """Until this process has ended all that it started, which find them by their environment."""
    _forget_the_dead()
    folder = tempfile.mkdtemp(prefix=f"{OURS}{os.getpid()}-", dir=MEMORY)
    os.chmod(folder, 0o711)  # a database may run as somebody else
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=LAST)
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def _forget_the_dead() -> None:
    """What is in memory stays there when a process is killed, until the next one looks."""
    for folder in MEMORY.glob(f"{OURS}*-*"):
        owner = folder.name.removeprefix(OURS).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
