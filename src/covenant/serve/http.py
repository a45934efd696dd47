"""The HTTP surface: what a request is answered, and a bare ASGI callable that asks for it.

Thin on purpose: find the route, read the request, call the verb, encode the reply. A client that hangs up while it
waits has taken nothing. `protocol` asks for plain requests without the way through ASGI; what they are answered is
decided here alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from time import perf_counter
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Struct

from covenant.exchange.exchange import Exchange
from covenant.model.error import CovenantError, Internal, TooLarge, Unauthenticated, WrongMethod
from covenant.model.peer import Caller
from covenant.serve.head import Head, Headers, bearer, read_head
from covenant.serve.routes import find
from covenant.serve.status import HTTP_STATUS, RETRY_AFTER_S
from covenant.serve.verbs.about import version_of
from covenant.serve.verbs.table import handled

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Say: TypeAlias = Callable[[bytes], Awaitable[None]]
OnRequest: TypeAlias = Callable[[type | None, int, float], None]  # which, its status, how many seconds
Page: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

T = TypeVar("T")

JSON: Final = b"application/json"
_WITHOUT_BODY: Final = ("GET", "HEAD")  # methods whose body, if there is one, says nothing
GONE: Final = 499  # nobody was there any more to be answered
KEEP_AWAKE_S: Final = 15.0  # a stream that has nothing to tell for so long says at least that it is there
EVENT_STREAM: Final[Headers] = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_encoder: Final = msgspec.json.Encoder()

log = logging.getLogger("covenant.http")


class Response(Struct, frozen=True, gc=False):
    status: int
    data: bytes
    more: tuple[tuple[bytes, bytes], ...] = ()  # headers besides those that describe the data
    type: bytes = JSON

    @property
    def headers(self) -> Headers:
        if self.status == 304:  # there is no data, and so nothing to describe
            return [*self.more]
        return [(b"content-type", self.type), (b"content-length", b"%d" % len(self.data)), *self.more]


class Stream:
    """An answer that comes piece by piece, as long as there is something to tell and somebody to hear it."""

    status: Final = 200
    headers: Headers

    async def tell(self, say: Say) -> None:
        raise NotImplementedError


class HungUp(Exception):
    """The client went away in the middle of what it was saying: that counts for nothing."""


class Asked(Protocol):
    """One request, whichever way it came."""

    head: Head
    verb: type | None  # what it turns out to ask for

    @property
    def data(self) -> bytes | None:
        """Its body, where that has come already."""

    async def body(self, limit: int) -> bytes: ...

    def while_there(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Do it; or, as soon as the client hangs up, undo it: then `answer` hears of it, by HungUp or by the end of
        the task that it is in."""

    def has_left(self) -> bool:
        """Whether this task was ended because the client hung up. It goes on then, if it is asked."""


class Door(Protocol):
    """Another surface at the same address. It answers for itself, also when it refuses."""

    def answer(self, asked: Asked) -> Coroutine[Any, Any, Response | Stream] | None:
        """None where it was not asked."""


class Http:
    """`pages` are the routes that are not verbs: health, metrics, events, the API description."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.pages: dict[str, Page] = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/version": self._version,
        }
        self.door: Door | None = None
        self.on_request: OnRequest | None = None  # told of each verb when it ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        page = self.pages.get(scope["path"])
        asked = _Scoped(scope, receive)
        if page is None:
            response = await self.answer(asked)
        else:
            scope["headers"] = asked.head.headers
            response = await self._show(page, scope, receive, send, asked.head.fault)
        if isinstance(response, Stream):
            await _stream(send, asked, response)
        elif response is not None:
            await respond(send, response)

    async def answer(self, asked: Asked) -> Response | Stream | None:
        """What a request comes to; None when nobody is there any more to hear it."""
        started = perf_counter()
        response: Response | Stream | None
        try:
            answering = None if self.door is None else self.door.answer(asked)
            response = Response(200, await self._answer(asked)) if answering is None else await answering
        except HungUp:
            response = None
        except asyncio.CancelledError:
            if not asked.has_left():
                raise
            response = None
        except Exception as failed:
            response = _failed(asked.head.method, asked.head.path, failed)
        if self.on_request is not None:
            status = GONE if response is None else response.status
            self.on_request(asked.verb, status, perf_counter() - started)
        return response

    async def _show(
        self, page: Page, scope: Scope, receive: Receive, send: Send, fault: CovenantError | None
    ) -> Response | None:
        """A page answers for itself, unless it refuses."""
        started = perf_counter()
        try:
            if fault is not None:
                raise fault
            if scope["method"] != "GET":
                raise WrongMethod(f"{scope['path']} takes GET", allow=["GET"])
            await page(scope, receive, send)
        except Exception as failed:
            response = _failed(scope["method"], scope["path"], failed)
            if self.on_request is not None:
                self.on_request(None, response.status, perf_counter() - started)
            return response
        return None

    async def _answer(self, asked: Asked) -> bytes:
        head = asked.head
        if head.fault is not None:
            raise head.fault
        caller = self.caller_of(head) or await self.authenticate(head.headers)
        self.exchange.meter(caller)
        route, parameter = find(head.method, head.path)
        asked.verb = route.place.request
        body = b""
        if route.place.body is not None or head.method not in _WITHOUT_BODY:
            body = await asked.body(self.exchange.bounds.body_bytes_max)
        request = route.request(parameter, head.query, body)
        working = handled(self.exchange, caller, request)
        if route.waits and request.wait_ms:  # type: ignore[attr-defined]  # only those that wait have it
            return _encoder.encode(await asked.while_there(working))
        return _encoder.encode(await working)

    def caller_of(self, head: Head) -> Caller | None:
        """Whose token it brings, where that is known at once; `authenticate` looks further, and refuses."""
        token = head.token
        if token is UNSET:
            token = head.read_token()
        return None if token is None else self.exchange.store.caller_of(token)

    async def authenticate(self, headers: Headers) -> Caller:
        try:
            return await self.exchange.recognise(bearer(headers))
        except Unauthenticated:
            await self.exchange.note_stranger("http")
            raise

    # --- pages --------------------------------------------------------------------------------------------

    async def _healthz(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The process lives."""
        await respond(send, Response(200, b'{"kind":"healthy"}'))

    async def _readyz(self, scope: Scope, receive: Receive, send: Send) -> None:
        """It takes work: the store is up, and it is not about to end."""
        is_up = getattr(self.exchange.store, "is_up", True)
        if is_up and not self.exchange.is_draining:
            await respond(send, Response(200, b'{"kind":"ready"}'))
        else:
            ails = getattr(self.exchange.store, "ails", "store_unavailable")
            why = "draining" if self.exchange.is_draining else ails
            await respond(send, Response(503, _encoder.encode({"kind": "not_ready", "reason": why})))

    async def _version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, Response(200, _encoder.encode(version_of(self.exchange))))


class _Scoped:
    """A request that came by way of ASGI."""

    data: bytes | None = None

    def __init__(self, scope: Scope, receive: Receive) -> None:
        local = scope["server"][0] if scope["server"] else None
        version = scope.get("http_version", "1.1")
        self.head = read_head(scope["method"], scope["path"], scope["query_string"], scope["headers"], local, version)
        self.verb: type | None = None
        self._receive = receive

    async def body(self, limit: int) -> bytes:
        for name, value in self.head.headers:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise too_large("body", int(value), limit)
        message = await self._receive()
        body: bytes = message.get("body", b"")
        if message.get("more_body"):
            parts = [body]
            size = len(body)
            while message.get("more_body"):
                message = await self._receive()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise too_large("body", size, limit)
            body = b"".join(parts)
        if message["type"] == "http.disconnect":
            raise HungUp
        if len(body) > limit:
            raise too_large("body", len(body), limit)
        return body

    async def while_there(self, work: Coroutine[Any, Any, T]) -> T:
        working = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(hung_up(self._receive))
        try:
            await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise HungUp
        finally:
            gone.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait([working])

    def has_left(self) -> bool:
        return False


async def hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _failed(method: str, path: str, failed: Exception) -> Response:
    if isinstance(failed, CovenantError):
        return refused(failed)
    log.error("a request failed: %s %s", method, path, exc_info=failed)
    return refused(Internal("something went wrong inside; it is in the daemon's log"))


def too_large(what: str, size: int, limit: int) -> TooLarge:
    return TooLarge(f"a {what} of {size} bytes, at most {limit} are allowed", field=what, size=size, limit=limit)


def refused(refusal: CovenantError) -> Response:
    status = HTTP_STATUS[refusal.code]
    return Response(status, _encoder.encode(refusal.to_wire()), headers_of(refusal, status))


def headers_of(refusal: CovenantError, status: int) -> tuple[tuple[bytes, bytes], ...]:
    """What a client is told that it can do about it."""
    more: Headers = []
    if status == 401:
        more.append((b"www-authenticate", b"Bearer"))
    if isinstance(refusal, WrongMethod):
        more.append((b"allow", ", ".join(refusal.details["allow"]).encode()))
    if refusal.code in RETRY_AFTER_S:
        wait_ms = refusal.details.get("retry_after_ms", 0)
        more.append((b"retry-after", b"%d" % max(RETRY_AFTER_S[refusal.code], -(-wait_ms // 1000))))
    return tuple(more)


async def respond(send: Send, response: Response) -> None:
    await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
    await send({"type": "http.response.body", "body": response.data})


async def _stream(send: Send, asked: Asked, stream: Stream) -> None:
    async def say(text: bytes) -> None:
        await send({"type": "http.response.body", "body": text, "more_body": True})

    await send({"type": "http.response.start", "status": stream.status, "headers": stream.headers})
    with suppress(HungUp):
        await asked.while_there(stream.tell(say))
        await send({"type": "http.response.body", "body": b""})
