"""Keeps an interpreter on this machine: a connection or a name beyond loopback is refused, and noted in a file.

Python imports this by itself where its folder is in PYTHONPATH. It is no part of any client: they are as they come.
"""

from __future__ import annotations

import os
import sys
from ipaddress import ip_address
from typing import Any

NOTES = os.environ["LEFT_LOOPBACK"]


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # a Unix socket has a path
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost") or _is_loopback(name):
        return
    with open(NOTES, "a") as notes:
        notes.write(f"{event} {name}\n")
    raise PermissionError(f"{event} {name}: this process stays on loopback")


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


sys.addaudithook(refuse)
