"""Who was let in when the daemon stopped listening is told so, and not forgotten with an open socket."""

from __future__ import annotations

import asyncio
import socket

from covenant import Limits
from covenant.serve.connections import Connection, Connections
from covenant.serve.daemon import Daemon
from covenant.serve.ipc import Ipc
from tests.daemons import start_daemon


class Entrance:
    """Counts who enters."""

    def __init__(self, crowd: Connections) -> None:
        self.entered = 0
        self._enter = crowd.enter
        crowd.enter = self.enter  # type: ignore[method-assign]  # the daemon's own, on its way

    def enter(self, connection: Connection) -> None:
        self.entered += 1
        self._enter(connection)


async def started() -> tuple[Daemon, Entrance]:
    daemon = await start_daemon("memory:", Limits())
    return daemon, Entrance(daemon.connections)


async def test_a_connection_that_was_accepted_as_http_stopped_is_closed() -> None:
    daemon, entrance = await started()
    with socket.create_connection(("127.0.0.1", int(str(daemon.url).rpartition(":")[2]))) as client:
        server = daemon._server
        assert server is not None
        await asyncio.sleep(0)
        server.is_over.set()  # the loop accepts in this turn, and the server stops in the next one, before it goes on
        await daemon.stop()
        assert entrance.entered == 1
        assert await asyncio.to_thread(client.recv, 1) == b""


async def test_a_connection_that_was_accepted_as_ipc_stopped_is_closed() -> None:
    daemon, entrance = await started()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(daemon.settings.ipc))
        ipc = daemon._ipc
        assert isinstance(ipc, Ipc)
        await asyncio.sleep(0)
        await asyncio.create_task(ipc.stop())
        assert entrance.entered == 1
        assert await asyncio.to_thread(client.recv, 1) == b""
    await daemon.stop()
