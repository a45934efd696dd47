"""A listening socket: how it begins, and how it ends without dropping whom it has let in."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

_TURNS: Final = 2  # of the loop, from accepting a connection until its protocol is told of it


def listen(host: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=backlog)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does not, for a socket made like this
    return listening


async def stop_accepting(server: asyncio.Server) -> None:
    """Before the server is closed: asyncio drops a connection without closing it that it has accepted but not made."""
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening)
    for _ in range(_TURNS):
        await asyncio.sleep(0)
