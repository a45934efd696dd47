"""The PostgreSQL of a run: a real server on the disk, as it comes, with room for the connections of all clients.

fsync and synchronous_commit are on, which is their default, and is checked. Every measurement has a database of its
own, so that no table of one is in the way of another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import asyncpg
from tests.postgres import started_server

_SETTINGS: Final = "max_connections = 300\n"
_DURABLE: Final = ("fsync", "synchronous_commit", "full_page_writes")
_STATEMENT_MARKS: Final = (b"LOG:  statement: ", b"LOG:  execute ")


class Server:
    """Up within the `with` block."""

    def __enter__(self) -> Server:
        self._server = started_server(_SETTINGS)
        self._numbers = count(1)
        for setting in _DURABLE:
            if self.ask(f"SHOW {setting}") != "on":
                raise RuntimeError(f"{setting} is not on")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.cleanup()

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new one; it is gone afterwards, whoever is still connected."""
        name = f"bench{next(self._numbers)}"
        self.ask(f"CREATE DATABASE {name}")
        try:
            yield str(self._server.get_uri(database=name))
        finally:
            self.ask(f"DROP DATABASE {name} WITH (FORCE)")

    def ask(self, statement: str, url: str | None = None) -> Any:
        return asyncio.run(_asked(url or str(self._server.get_uri()), statement))

    def log_statements(self, url: str) -> None:
        """For the connections that are made to this database from now on."""
        name = self.ask("SELECT current_database()", url)
        self.ask(f"ALTER DATABASE {name} SET log_statement = 'all'")

    def statements(self) -> int:
        """How many the server has logged so far, those that begin and end transactions too."""
        log: Path = self._server.log
        return sum(any(mark in line for mark in _STATEMENT_MARKS) for line in log.read_bytes().splitlines())


async def _asked(url: str, statement: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()
