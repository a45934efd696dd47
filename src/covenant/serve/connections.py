"""Everybody who is connected, on HTTP and IPC together: how many there may be, and how long each may keep us waiting.

A connection costs an open file before anybody knows whose it is. So there are never more of them than the system allows
beside the files that the daemon itself needs, and one that begins to say something and does not go on is ended.
"""

from __future__ import annotations

import asyncio
import resource
from math import inf
from typing import Final, Protocol

from covenant.exchange.bounds import Bounds
from covenant.model.error import TooManyConnections
from covenant.serve.hangups import HangUps

NEVER: Final = inf
_BACKLOG_MAX: Final = 1024  # connections that the system has made and the daemon has not looked at
_BACKLOG_PART: Final = 8  # of all files there may be
_TURNS: Final = 4  # of the loop, from accepting a connection until one that was turned away is closed
_FILES_RESERVED: Final = 64  # for the journal, its archive, a backup, alerts
_FILES_IF_UNBOUNDED: Final = 1 << 20
_LOOKS: Final = 10  # within the shortest time that anything may take


class Connection(Protocol):
    due: float  # on the loop's clock: when it will have kept us waiting too long; NEVER while it is our turn

    def too_slow(self) -> None: ...


class Connections:
    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._open: set[Connection] = set()
        self._limit = bounds.connections_total_max
        self.backlog = _BACKLOG_MAX
        self.hang_ups = HangUps()

    def __len__(self) -> int:
        return len(self._open)

    def make_room(self) -> None:
        """As much as the system gives. A backlog is accepted at once, before the first of it can be turned away, and
        more come while that is done."""
        files = _open_files_max()
        self.backlog = max(1, min(_BACKLOG_MAX, files // _BACKLOG_PART))
        room = files - _FILES_RESERVED - _TURNS * self.backlog
        self._limit = max(1, min(self._bounds.connections_total_max, room))

    def enter(self, connection: Connection) -> None:
        if len(self._open) >= self._limit:
            raise TooManyConnections("too many connections", limit=self._limit, retry_after_ms=1000)
        self._open.add(connection)

    def leave(self, connection: Connection) -> None:
        self._open.discard(connection)

    async def watch(self) -> None:
        """One look at all of them now and then costs less than a timer for each thing that each of them says."""
        every_s = min(self._bounds.head_ms_max, self._bounds.body_ms_max) / 1000 / _LOOKS
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(every_s)
            late = now()
            for connection in [connection for connection in self._open if connection.due < late]:
                connection.too_slow()


def _open_files_max() -> int:
    """What the system gives by default is raised to what it would give."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else _FILES_IF_UNBOUNDED
