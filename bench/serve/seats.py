"""Where a server of the benchmark is and who may call it: what its process tells those of the load, by a file."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from covenant import AgentId

FILE: Final = "served.json"


class Seat(Struct, frozen=True):
    """An enrolled peer with its token. It sends to itself, receives, answers and drains."""

    agent: AgentId
    token: str


class Served(Struct, frozen=True, kw_only=True):
    pid: int
    port: int
    socket: str = ""
    seats: list[Seat]
    worker: Seat | None = None  # whose tasks they send, where that is none of them
    replies: dict[str, str]  # what a cycle is answered, by path: the floor says the same

    def write(self, folder: Path) -> None:
        (folder / FILE).write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path) -> Served:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=cls)


def raise_open_files() -> int:
    """As many as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
