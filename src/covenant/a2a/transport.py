"""The two bindings of the A2A protocol that go over plain HTTP, as a client speaks them.

An operation is called by its name with its request; what comes back is its answer as bytes, or a stream of those. What
the other side refuses is raised as what it is in the one table; a line that fails is `Unreachable`, which says whether
the request may have arrived.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol
from urllib.parse import quote

import aiohttp
import msgspec
from msgspec import Raw, Struct

from covenant.a2a.fault import BAD_AGENT, Fault
from covenant.a2a.interface import JSONRPC, Interface
from covenant.a2a.refusal import refused
from covenant.a2a.sse import Parser, Sent
from covenant.model.error import Malformed, Unreachable

ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024
_STREAM: Final = "text/event-stream"
_RETRY_S_MAX: Final = 60.0


class Transport(Protocol):
    async def call(self, operation: str, request: Struct, headers: Mapping[str, str]) -> bytes: ...

    def stream(self, operation: str, request: Struct, headers: Mapping[str, str]) -> AsyncGenerator[Sent, None]: ...


def transport_for(interface: Interface, wire: Wire) -> Transport:
    return JsonRpc(interface, wire) if interface.binding == JSONRPC else Rest(interface, wire)


class Wire:
    """One session with its connections, and who speaks."""

    def __init__(self, token: str | None, connect_s: float, answer_s: float) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._token = token
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=answer_s)
        self._is_closed = False

    @asynccontextmanager
    async def request(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], query: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._is_closed:
            raise Unreachable("the client was closed", outcome="not_sent")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar()
            )
        said = dict(headers)
        if self._token is not None:
            said["Authorization"] = f"Bearer {self._token}"
        if body is not None:
            said["Content-Type"] = "application/json"
        try:
            async with self._session.request(
                method, url, data=body, headers=said, params=query, allow_redirects=method == "GET"
            ) as response:
                yield response
        except aiohttp.ClientConnectorError as failed:
            raise Unreachable(f"nobody answers at {url}: {failed}", outcome="not_sent") from failed
        except aiohttp.InvalidURL as wrong:
            raise Malformed(f"no address: {wrong}", field="url") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as failed:
            raise Unreachable(
                f"{url} does not answer: {failed or type(failed).__name__}", outcome="unknown"
            ) from failed
        except ValueError as wrong:  # a header that cannot be
            raise Malformed(f"this does not go over the wire: {wrong}", field="request") from None

    async def read(self, url: str) -> bytes:
        async with self.request("GET", url, None, {"Accept": "application/json"}, {}) as response:
            data = await _whole(response)
            if response.status != 200:
                raise refused(f"{url} answers {response.status}", None, status=response.status)
            return data

    async def close(self) -> None:
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _Problem(Struct):
    """An error of JSON-RPC, or the status of the REST binding."""

    message: str = ""
    code: int | None = None
    data: Any = None
    details: Any = None


class _Answer(Struct):
    result: Raw = Raw(b"null")
    error: _Problem | None = None


_answer: Final = msgspec.json.Decoder(_Answer)


class JsonRpc:
    def __init__(self, interface: Interface, wire: Wire) -> None:
        self._url = interface.url
        self._wire = wire
        self._numbers = itertools.count(1)

    async def call(self, operation: str, request: Struct, headers: Mapping[str, str]) -> bytes:
        body = self._body(operation, request)
        async with self._wire.request("POST", self._url, body, headers, {}) as response:
            return self._result(await _whole(response), response)

    async def stream(self, operation: str, request: Struct, headers: Mapping[str, str]) -> AsyncGenerator[Sent, None]:
        body = self._body(operation, request)
        async with self._wire.request("POST", self._url, body, {**headers, "Accept": _STREAM}, {}) as response:
            if response.content_type != _STREAM:
                self._result(await _whole(response), response)
                raise Fault(BAD_AGENT, f"{operation} was not answered with a stream")
            async for sent in _events(response):
                yield Sent(self._result(sent.data, response), sent.id)

    def _body(self, operation: str, request: Struct) -> bytes:
        said = {"jsonrpc": "2.0", "id": next(self._numbers), "method": operation, "params": request}
        return _encoded(said)

    def _result(self, data: bytes, response: aiohttp.ClientResponse) -> bytes:
        try:
            answer = _answer.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise _unread(data, response) from None
        if answer.error is not None:
            error = answer.error
            raise refused(error.message, error.data, error.code, response.status, **_retry_after(response))
        if response.status != 200:
            raise _unread(data, response)
        return bytes(answer.result)


class _Place(Struct, frozen=True):
    method: str
    path: str


_PLACES: Final = {
    "SendMessage": _Place("POST", "/message:send"),
    "SendStreamingMessage": _Place("POST", "/message:stream"),
    "GetTask": _Place("GET", "/tasks/{id}"),
    "ListTasks": _Place("GET", "/tasks"),
    "CancelTask": _Place("POST", "/tasks/{id}:cancel"),
    "SubscribeToTask": _Place("POST", "/tasks/{id}:subscribe"),
    "CreateTaskPushNotificationConfig": _Place("POST", "/tasks/{taskId}/pushNotificationConfigs"),
    "GetTaskPushNotificationConfig": _Place("GET", "/tasks/{taskId}/pushNotificationConfigs/{id}"),
    "ListTaskPushNotificationConfigs": _Place("GET", "/tasks/{taskId}/pushNotificationConfigs"),
    "DeleteTaskPushNotificationConfig": _Place("DELETE", "/tasks/{taskId}/pushNotificationConfigs/{id}"),
    "GetExtendedAgentCard": _Place("GET", "/extendedAgentCard"),
}


class Rest:
    def __init__(self, interface: Interface, wire: Wire) -> None:
        self._url = interface.url.rstrip("/")
        self._wire = wire

    async def call(self, operation: str, request: Struct, headers: Mapping[str, str]) -> bytes:
        async with self._wire.request(*self._parts(operation, request, headers)) as response:
            return self._result(await _whole(response), response)

    async def stream(self, operation: str, request: Struct, headers: Mapping[str, str]) -> AsyncGenerator[Sent, None]:
        parts = self._parts(operation, request, {**headers, "Accept": _STREAM})
        async with self._wire.request(*parts) as response:
            if response.content_type != _STREAM:
                self._result(await _whole(response), response)
                raise Fault(BAD_AGENT, f"{operation} was not answered with a stream")
            async for sent in _events(response):
                yield Sent(self._result(sent.data, response), sent.id)

    def _parts(
        self, operation: str, request: Struct, headers: Mapping[str, str]
    ) -> tuple[str, str, bytes | None, Mapping[str, str], dict[str, str]]:
        """What stands in the path is not said again; the rest is the body, or the query of what has none."""
        place = _PLACES[operation]
        members: dict[str, Any] = msgspec.to_builtins(request)
        tenant = members.pop("tenant", None)
        path = f"/{quote(tenant, safe='')}{place.path}" if tenant else place.path
        for name in ("taskId", "id"):
            if f"{{{name}}}" in path:
                path = path.replace(f"{{{name}}}", quote(str(members.pop(name)), safe=""))
        if place.method == "POST":
            return place.method, self._url + path, _encoded(members), headers, {}
        query = {name: _in_query(value) for name, value in members.items()}
        return place.method, self._url + path, None, headers, query

    def _result(self, data: bytes, response: aiohttp.ClientResponse) -> bytes:
        if response.status < 300 and b'"error"' not in data[:64]:
            return data
        try:
            error = _answer.decode(data).error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            error = None
        if error is not None:
            status = error.code if response.status < 300 and error.code else response.status
            raise refused(error.message, error.details, None, status, **_retry_after(response))
        if response.status >= 300:
            raise _unread(data, response)
        return data


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """A server that is anybody's may go on without an end."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > ANSWER_BYTES_MAX:
            raise Fault(BAD_AGENT, f"an answer of more than {ANSWER_BYTES_MAX} bytes", limit=ANSWER_BYTES_MAX)
        pieces.append(piece)
    return b"".join(pieces)


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[Sent, None]:
    parser = Parser()
    async for chunk in response.content.iter_any():
        for sent in parser.feed(chunk):
            yield sent


def _encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError) as wrong:
        raise Malformed(f"this does not go over the wire: {wrong}", field="request") from None


def _in_query(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unread(data: bytes, response: aiohttp.ClientResponse) -> Fault:
    """Not the agent, but something before it; or not an agent at all."""
    if response.status >= 400:
        return refused(f"HTTP {response.status}", None, None, response.status, **_retry_after(response))
    return Fault(BAD_AGENT, f"an answer that does not read: {data[:80]!r}")


def _retry_after(response: aiohttp.ClientResponse) -> dict[str, Any]:
    told = response.headers.get("Retry-After", "")
    return {"retry_after_s": min(_RETRY_S_MAX, float(told))} if told.isascii() and told.isdigit() else {}
