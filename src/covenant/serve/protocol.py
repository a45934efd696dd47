"""One HTTP connection: uvicorn's, with bounds, and a short way for plain requests.

The head of a request has a size and a time, its body has a time, and there is a number of connections: somebody who has
not said yet who he is costs no more. Who goes beyond is told so, where there is still something to be told, and hung up
on.

A plain request, small and alone on its connection, is read whole and answered in one write. That is what workers send
all day, and the way through ASGI costs as much as what they ask for. Everything else goes that way: pages, large or
chunked bodies, what comes before the answer to what came earlier. Both ask the same `Http`, and what they write is the
same to the byte. A plain request under the head of the one before it is not even parsed: there is nothing new in it but
its body.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Final, TypeVar

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from covenant.model.error import CovenantError, HeadTooLarge, Malformed, TooManyConnections, TooSlow
from covenant.serve.connections import NEVER, Connections
from covenant.serve.hangups import HangUps
from covenant.serve.head import Head, Headers, Known, known, read_head
from covenant.serve.http import Http, HungUp, Response, Stream, refused, too_large

T = TypeVar("T")

_CLOSE: Final = b"connection: close\r\n"
_HEADS_KEPT_MAX: Final = 16  # of a connection, one after the other: who says another each time is not worth the work
_PIPELINED_MAX: Final = 4  # requests that are taken in while one is answered; then it is the client who waits
_PLAIN_URL: Final = re.compile(rb"(/[\w/.@:-]*)(?:\?([\w.@:=&%+*-]*))?")  # nothing in its path that means another thing


class _Stage(Enum):
    """What is to come next of a request."""

    BEGIN = auto()
    HEAD = auto()
    BODY = auto()


_BEGIN: Final = _Stage.BEGIN  # at hand: an enum takes its time to look a member up


class _NobodyWaits:
    def set(self) -> None:
        pass


class _Plain:
    """A plain request; to uvicorn, which looks at some of its members, the one that is under way."""

    verb: type | None = None
    response_started = False
    response_complete = False
    disconnected = False
    keep_alive = True
    message_event = _NobodyWaits()
    task: asyncio.Task[None]  # that answers it
    is_working = False  # it ends when the client hangs up

    def __init__(self, head: Head, data: bytes = b"") -> None:
        self.head = head
        self.data = data

    async def body(self, limit: int) -> bytes:
        if len(self.data) > limit:
            raise too_large("body", len(self.data), limit)
        return self.data

    def while_there(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """It is its own task that works, so it is that task that is stopped: a wait costs none."""
        if self.disconnected:
            work.close()
            raise HungUp
        self.is_working = True
        return work

    def has_left(self) -> bool:
        return self.disconnected and self.is_working and not self.task.uncancel()

    def hang_up(self) -> None:
        self.disconnected = True
        if self.is_working:
            self.task.cancel()


class _Flow(FlowControl):
    """Who is not read from is still noticed to hang up."""

    def __init__(self, transport: asyncio.Transport, hang_ups: HangUps) -> None:
        super().__init__(transport)
        self._hang_ups = hang_ups

    def pause_reading(self) -> None:
        super().pause_reading()
        self._hang_ups.watch(self._transport)

    def resume_reading(self) -> None:
        if self.read_paused:
            self._hang_ups.forget(self._transport)
        super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, http: Http, crowd: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.due = NEVER
        self._http = http
        self._plain: _Plain | None = None  # that is being answered
        self._scoped: RequestResponseCycle | None = None  # the same, by way of ASGI
        self._answering: asyncio.Task[None] | None = None  # by which, from the first one on
        self._idle: asyncio.Future[None] | None = None  # until there is another one
        self._known: Known | None = None  # the head of the one before it
        self._keeps = _HEADS_KEPT_MAX
        self._piece: bytes | None = None  # the one that is being read, where a request begins with it
        self._bounds = http.exchange.bounds
        self._crowd = crowd
        self._head_s = self._bounds.head_ms_max / 1000
        self._stage = _Stage.BEGIN
        self._head_bytes = 0  # that came after the piece in which the head began
        self._piece_bytes = 0

    # --- the transport's ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        super().connection_made(transport)
        self.flow = _Flow(transport, self._crowd.hang_ups)
        self.due = self.loop.time() + self._head_s
        try:
            self._crowd.enter(self)
        except TooManyConnections as full:
            self._part(full)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        self._crowd.hang_ups.forget(self.transport)
        if self._scoped is not None:
            self._scoped.disconnected = True  # uvicorn tells only the one that came in last
            self._scoped.message_event.set()
        if self._plain is not None:
            self._plain.hang_up()
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._stage is _BEGIN:
            known = self._known
            if known is not None and self.cycle.response_complete and not self.transport.is_closing():
                body = known.body_of(data)
                if body is not None:
                    self._begin_plain(_Plain(known.head, body))
                    return
            self._piece = data
        self._piece_bytes = len(data)
        if self._stage is _Stage.HEAD:
            self._head_bytes += self._piece_bytes
        super().data_received(data)
        self._piece = None
        if self._stage is _Stage.HEAD and self._head_bytes > self._bounds.head_bytes_max:
            self._part(self._too_large(self._head_bytes))

    # --- the parser's -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
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
        plain = self._as_plain()
        if plain is not None:
            self.cycle = plain  # type: ignore[assignment]  # it has the members that uvicorn looks at
        else:
            self._begin_for_asgi()

    def _as_plain(self) -> _Plain | None:
        if self.cycle is not None and not self.cycle.response_complete:
            return None
        parser = self.parser
        if self.expect_100_continue or not parser.should_keep_alive() or parser.get_http_version() != "1.1":
            return None
        url = _PLAIN_URL.fullmatch(self.url)
        if url is None or parser.should_upgrade():
            return None
        for name, value in self.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and int(value) > HIGH_WATER_LIMIT):
                return None
        method, path = parser.get_method().decode("ascii"), url[1].decode("ascii")
        if method == "HEAD" or path in self._http.pages:
            return None
        return _Plain(read_head(method, path, url[2] or b"", self.headers, self.server[0] if self.server else None))

    def _begin_for_asgi(self) -> None:
        self._known = None  # what comes after it is for the parser to say
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # which the scope has by now
        super().on_headers_complete()
        self.headers = []  # what comes behind a chunked body is no header
        if not self.pipeline:
            self._scoped = self.cycle
        elif len(self.pipeline) < _PIPELINED_MAX:
            self.flow.resume_reading()  # it may send some more

    def on_body(self, body: bytes) -> None:
        if self._stage is not _Stage.BODY:
            return
        plain = self._read_now()
        if plain is not None:
            plain.data += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._stage is not _Stage.BODY:
            return  # nothing was begun
        self._stage = _Stage.BEGIN
        plain = self._read_now()
        if plain is not None:
            if self._piece is not None and self._keeps and plain.head.fault is None:
                self._keeps -= 1
                self._known = known(plain.head, self._piece, len(plain.data), self._bounds.head_bytes_max)
            self._begin_plain(plain)
            return
        self.due = NEVER
        if self.cycle.response_complete:
            self._rest()
        super().on_message_complete()

    # --- the short way ------------------------------------------------------------------------------------

    def _begin_plain(self, plain: _Plain) -> None:
        self.due = NEVER
        self.cycle = plain  # type: ignore[assignment]  # it has the members that uvicorn looks at
        self._plain = plain
        answering = self._answering
        if answering is None:
            answering = self._answering = self.loop.create_task(self._answer_all())
            answering.add_done_callback(self.tasks.discard)
        plain.task = answering
        self.tasks.add(answering)
        if self._idle is not None:
            self._idle.set_result(None)

    def _read_now(self) -> _Plain | None:
        """The one that is being answered may not be the one that comes in."""
        cycle: object = self.cycle
        return cycle if isinstance(cycle, _Plain) else None

    async def _answer_all(self) -> None:
        """One at a time, so one task does as long as the connection lasts. The server waits for it only while it has
        something to do."""
        while self._plain is not None:
            plain = self._plain
            try:
                response = await self._http.answer(plain)
                if response is not None and not isinstance(response, Response):
                    await self._stream(plain, response)
                elif self.flow.write_paused:
                    plain.is_working = False  # what there was to do is done
                    await self.flow.drain()
            except asyncio.CancelledError:
                self.transport.close()
                raise
            self._reply(plain, response)
            if plain.disconnected:
                return
            self.tasks.discard(plain.task)
            del plain, response  # which may be large, while the next request may be long in coming
            self._idle = self.loop.create_future()
            await self._idle
            self._idle = None

    def _reply(self, plain: _Plain, response: Response | Stream | None) -> None:
        plain.response_complete = True
        self._plain = None
        if response is None or plain.disconnected or self.transport.is_closing():
            return
        if type(response) is Response:
            self.transport.write(written(response, is_last=not plain.keep_alive))
        if not plain.keep_alive:
            self.transport.close()
        self.on_response_complete()

    async def _stream(self, plain: _Plain, stream: Stream) -> None:
        async def say(text: bytes) -> None:
            if self.flow.write_paused:
                await self.flow.drain()
            self.transport.write(b"%x\r\n%b\r\n" % (len(text), text))

        plain.response_started = True
        self.transport.write(written_head(stream.status, [*stream.headers, (b"transfer-encoding", b"chunked")]))
        try:
            await plain.while_there(stream.tell(say))
            self.transport.write(b"0\r\n\r\n")
        except HungUp:
            pass
        except asyncio.CancelledError:
            if not plain.has_left():
                raise

    # --- what comes of it ---------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._scoped = self.pipeline[-1][0] if self.pipeline else None  # the next one begins
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self._stage is _BEGIN:
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

    def send_400_response(self, msg: str) -> None:
        """In our words, and not into the answer to what came before it."""
        self._part(Malformed("this is no HTTP request", field="head"))

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
    if response.status == 304:
        return written_head(response.status, response.headers, is_last)
    before, after = _around_the_length(response.status, response.more, response.type, is_last)
    return b"%b%d%b%b" % (before, len(response.data), after, response.data)


@lru_cache(maxsize=256)
def _around_the_length(
    status: int, more: tuple[tuple[bytes, bytes], ...], kind: bytes, is_last: bool
) -> tuple[bytes, bytes]:
    """A head differs from the last of its kind in one number."""
    head = written_head(status, Response(status, b"", more, kind).headers, is_last)
    before, name, after = head.partition(b"content-length: ")
    return before + name, after.removeprefix(b"0")


def written_head(status: int, headers: Headers, is_last: bool = False) -> bytes:
    """As uvicorn would write it."""
    more = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"".join((STATUS_LINE[status], more, _CLOSE if is_last else b"", b"\r\n"))
