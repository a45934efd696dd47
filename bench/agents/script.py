"""The agent that every candidate runs: so many turns, one after the other, and at the end the digest of all.

A turn calls the tool `lookup` and puts one entry with its result into the transcript. The turn is durable before the
next one begins: an agent that is killed and started again repeats no call whose entry was kept. The script has no
branch and the tool no cost, so what is measured is the keeping.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import msgspec

from bench.work import Figures

STEPS: Final = 300
_NOTE: Final = "The plan asks for these before the next."
_ENCODER: Final = msgspec.json.Encoder(order="sorted")

Found: TypeAlias = dict[str, Any]
Entry: TypeAlias = dict[str, Any]


def found(number: int) -> Found:
    """What the tool finds: some 200 bytes of JSON."""
    rows = [{"id": 7 * number + row, "name": f"region-{number:05}-{row}", "load": number % 97} for row in range(4)]
    return {"query": f"figures of region {number}", "rows": rows}


def entry_of(number: int, result: Found) -> Entry:
    """What the transcript keeps of a turn: some 300 bytes of JSON."""
    return {"turn": number, "tool": "lookup", "note": _NOTE, "result": result}


def digest_of(transcript: Iterable[Entry]) -> str:
    digest = hashlib.sha256()
    for entry in transcript:
        digest.update(_ENCODER.encode(entry))
    return digest.hexdigest()


class Tool:
    """The tool of one process: it counts its calls, and can take the process with it at one of them."""

    def __init__(self, dies_at: int | None) -> None:
        self.calls = 0
        self._dies_at = dies_at

    def lookup_now(self, number: int) -> Found:
        if number == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1
        return found(number)

    async def lookup(self, number: int) -> Found:
        return self.lookup_now(number)


class Stopwatch:
    """From the start of the agent to its digest."""

    def __init__(self, steps: int, tool: Tool) -> None:
        self._steps = steps
        self._tool = tool
        self._start = time.perf_counter()

    def figures(self, digest: str) -> Figures:
        """`calls` are those of this process: fewer than the steps, if it went on where another was killed."""
        seconds = time.perf_counter() - self._start
        if digest != digest_of(entry_of(number, found(number)) for number in range(self._steps)):
            raise RuntimeError("the agent ended with another transcript")
        return {"rate": self._tool.calls / seconds, "seconds": seconds, "calls": self._tool.calls}
