"""Noticing that a client hangs up while it is not read from.

Who has said more than is taken in at once is not read from until it has had its answers: so its memory is bounded, and
so the loop does not hear either that it is gone. What it waits for would be leased to nobody. The system tells of the
end of a line beside what is still to be read from it, and is asked for that alone.
"""

from __future__ import annotations

import asyncio
import select
from contextlib import suppress


class HangUps:
    def __init__(self) -> None:
        self._ends: select.epoll | None = None  # readable where one of the watched was hung up
        self._fds: dict[asyncio.Transport, int] = {}
        self._transports: dict[int, asyncio.Transport] = {}

    def watch(self, transport: asyncio.Transport) -> None:
        """While it is not read from: when its other end is gone, it is closed, as one that is read from would be."""
        if transport in self._fds or transport.is_closing() or not hasattr(select, "epoll"):
            return  # a system without it tells of the end behind the rest
        fd = transport.get_extra_info("socket").fileno()
        self._at_hand().register(fd, select.EPOLLRDHUP)
        self._fds[transport], self._transports[fd] = fd, transport

    def forget(self, transport: asyncio.Transport) -> None:
        fd = self._fds.pop(transport, None)
        if fd is None or self._transports[fd] is not transport:
            return  # it is closed, and what has its number now is another
        del self._transports[fd]
        with suppress(OSError):  # closed, and so not watched any more
            self._at_hand().unregister(fd)

    def close(self) -> None:
        if self._ends is not None:
            asyncio.get_running_loop().remove_reader(self._ends.fileno())
            self._ends.close()
            self._ends = None
            self._fds.clear()
            self._transports.clear()

    def _at_hand(self) -> select.epoll:
        if self._ends is None:
            self._ends = select.epoll()
            asyncio.get_running_loop().add_reader(self._ends.fileno(), self._look)
        return self._ends

    def _look(self) -> None:
        for fd, _ in self._at_hand().poll(0):
            transport = self._transports[fd]
            self.forget(transport)
            transport.close()
