"""uvicorn, as the daemon uses it: its settings, and a beginning and an end that are the daemon's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn

from covenant.serve.listener import stop_accepting

KEEP_ALIVE_S: Final = 75
_FINISH_S: Final = 5


def config_for(
    app: Any, backlog: int, protocol: Any = "httptools", tls_cert: Path | None = None, tls_key: Path | None = None
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=False,
        backlog=backlog,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=_FINISH_S,
        ssl_certfile=None if tls_cert is None else str(tls_cert),
        ssl_keyfile=None if tls_key is None else str(tls_key),
    )


class Server(uvicorn.Server):
    """The signals are the daemon's, not the server's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self.is_over = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    async def main_loop(self) -> None:
        await self.is_over.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            await stop_accepting(server)
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its time is over

    async def _wait_tasks_to_complete(self) -> None:
        for connection in list(self.server_state.connections):
            connection.shutdown()  # one that came while the others were asked to go was not asked
        await super()._wait_tasks_to_complete()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
