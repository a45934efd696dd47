"""One HTTP connection: uvicorn's, with bounds on what somebody may cost who has not said yet who he is.

The head of a request has a size and a time, its body has a time, and there is a number of connections. Who goes beyond
is told so, where there is still something to be told, and hung up on.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from covenant.model.error import CovenantError, HeadTooLarge, TooManyConnections, TooSlow
from covenant.serve.connections import NEVER, Connections
from covenant.serve.http import Http, Response, refused

_CLOSE: Final = (b"connection", b"close")


class _Stage(Enum):
    """What is to come next of a request."""

    BEGIN = auto()
    HEAD = auto()
    BODY = auto()


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, http: Http, crowd: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.due = NEVER
        self._bounds = http.exchange.bounds
        self._crowd = crowd
        self._head_s = self._bounds.head_ms_max / 1000
        self._stage = _Stage.BEGIN
        self._head_bytes = 0  # that came after the piece in which the head began
        self._piece_bytes = 0

    # --- the transport's ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.due = self.loop.time() + self._head_s
        try:
            self._crowd.enter(self)
        except TooManyConnections as full:
            self._part(full)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._piece_bytes = len(data)
        if self._stage is _Stage.HEAD:
            self._head_bytes += self._piece_bytes
        super().data_received(data)
        if self._stage is _Stage.HEAD and self._head_bytes > self._bounds.head_bytes_max:
            self._part(self._too_large(self._head_bytes))

    # --- the parser's -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stage = _Stage.HEAD
        self._head_bytes = 0
        self.due = self.loop.time() + self._head_s

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        if self._head_bytes + self._piece_bytes > self._bounds.head_bytes_max:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._bounds.head_bytes_max:
                self._part(self._too_large(size))
                return
        self._stage = _Stage.BODY
        self.due = self.loop.time() + self._bounds.body_ms_max / 1000
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._stage is _Stage.BODY:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._stage is not _Stage.BODY:
            return  # nothing was begun
        self._stage = _Stage.BEGIN
        if self.cycle.response_complete:
            self._rest()
        else:
            self.due = NEVER
        super().on_message_complete()

    # --- what comes of it ---------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        if self._stage is _Stage.BEGIN:
            self._rest()

    def _rest(self) -> None:
        """Until the next request, if one comes."""
        self.due = self.loop.time() + self.timeout_keep_alive

    def too_slow(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()  # it does not even take what it was told
        elif self.flow.read_paused:
            self.due = self.loop.time() + self._head_s  # it is we who do not listen
        elif self._stage is _Stage.BEGIN:
            self._hang_up()
        else:
            self._part(TooSlow("the request did not come to its end in time"))

    def _part(self, why: CovenantError) -> None:
        """Say why, unless something else is being said or this request has had its answer; and close."""
        if self.transport.is_closing():
            return
        is_ours = self.cycle is None or self.cycle.response_complete
        if self._stage is _Stage.BODY:
            is_ours = not self.cycle.response_started and not self.pipeline
        if is_ours:
            self.transport.write(written(refused(why), is_last=True))
        self._hang_up()

    def _hang_up(self) -> None:
        self.due = self.loop.time() + self._head_s
        self.transport.close()

    def _too_large(self, size: int) -> HeadTooLarge:
        limit = self._bounds.head_bytes_max
        return HeadTooLarge(f"the head of a request has at most {limit} bytes", field="head", size=size, limit=limit)


def written(response: Response, is_last: bool) -> bytes:
    """As uvicorn would write it."""
    head = [STATUS_LINE[response.status]]
    for name, value in (*response.headers, _CLOSE) if is_last else response.headers:
        head += (name, b": ", value, b"\r\n")
    return b"".join((*head, b"\r\n", response.data))
