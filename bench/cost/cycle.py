"""Measure the CPU of cycles (send, lease, result, drain) with the `covenant` package that is first on the import path.

Runs as a program of its own, so that two versions of the package can be measured in turn. It uses nothing but what has
a public name, since the other version may be an older one. Prints one JSON object, in µs of CPU per cycle.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import psutil

from bench.covenant_cycle import client
from bench.work import Tally, Window
from covenant import Mailbox

_CLIENTS: Final = 8
_WARM_UP: Final = 10  # cycles of each client that are not counted
_PROGRAM: Final = (sys.executable, "-m", "covenant")


async def _run(box: Mailbox, cycles: int) -> None:
    tally = Tally(Window(0, 3600))
    await asyncio.gather(*(client(box, number, tally, cycles) for number in range(_CLIENTS)))


async def in_process(cycles: int) -> float:
    """A journal in a folder, opened by the program itself."""
    with tempfile.TemporaryDirectory() as folder:
        async with Mailbox.open(f"file:{folder}/data") as box:
            await _run(box, _WARM_UP)
            began = time.process_time()
            await _run(box, cycles)
            return (time.process_time() - began) / (cycles * _CLIENTS) * 1e6


async def over_socket(cycles: int) -> float:
    """A daemon of its own on a Unix socket, and its clients: what both take together."""
    with tempfile.TemporaryDirectory(prefix="cov-") as folder:
        home = Path(folder) / "home"
        command = (*_PROGRAM, "--home", str(home), "serve", "--http", "127.0.0.1:0")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as daemon:
            assert daemon.stdout is not None
            daemon.stdout.readline()  # where it listens: it is up
            try:
                return await _measured(home, psutil.Process(daemon.pid), cycles)
            finally:
                daemon.terminate()


async def _measured(home: Path, daemon: psutil.Process, cycles: int) -> float:
    names = [f"{role}{number}" for role in "pw" for number in range(_CLIENTS)]
    tokens = {f"{name}@local": _enrolled(home, name) for name in names}
    token = (home / "operator.token").read_text().strip()
    async with Mailbox.open(f"unix:{home / 'sock'}", token=token, tokens=tokens) as box:
        await _run(box, _WARM_UP)
        before, began = daemon.cpu_times(), time.process_time()
        await _run(box, cycles)
        ours, after = time.process_time() - began, daemon.cpu_times()
        theirs = after.user + after.system - before.user - before.system
        return float((ours + theirs) / (cycles * _CLIENTS) * 1e6)


def _enrolled(home: Path, name: str) -> str:
    grants = ("--grant", "a2a.send.*", "--grant", "a2a.respond.*")
    command = (*_PROGRAM, "--home", str(home), "peers", "enroll", name, *grants, "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout)["token"])


if __name__ == "__main__":
    count = int(sys.argv[1])
    figures = {"in process": asyncio.run(in_process(count)), "over the socket": asyncio.run(over_socket(count))}
    print(json.dumps(figures))
