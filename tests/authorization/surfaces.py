"""Plain clients of the five surfaces: they call a verb as the wire has it, and return the code of the answer."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Final

import aiohttp
import grpc
import msgspec
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2
from msgspec import Struct

from covenant.serve.a2a.proto import SERVICE, class_of
from covenant.serve.daemon import Daemon
from tests.authorization.verbs import Verb
from tests.authorization.world import Call

AGENT: Final = "bob@lab"  # the agent that A2A clients call
OK: Final = "ok"
_STATUS: Final = "grpc-status-details-bin"


class Told(Struct, frozen=True):
    """The code of a refusal, and the status or the number that stands for it on this surface."""

    code: str
    status: int | str


DONE: Final[dict[str, int | str]] = {"http": 200, "ipc": OK, "jsonrpc": 200, "rest": 200, "grpc": "OK"}
SHOWN: Final[dict[str, dict[str, int | str]]] = {  # by docs/http.md, docs/a2a.md and docs/grpc.md
    "unauthenticated": {"http": 401, "jsonrpc": -32603, "rest": 401, "grpc": "UNAUTHENTICATED"},
    "not_permitted": {"http": 403, "jsonrpc": -32603, "rest": 403, "grpc": "PERMISSION_DENIED"},
    "missing_capability": {"http": 403, "jsonrpc": -32603, "rest": 403, "grpc": "PERMISSION_DENIED"},
    "scope_mismatch": {"http": 403, "jsonrpc": -32603, "rest": 403, "grpc": "PERMISSION_DENIED"},
    "unknown_task": {"http": 404, "jsonrpc": -32001, "rest": 404, "grpc": "NOT_FOUND"},
    "unknown_lease": {"http": 404},
    "unknown_grant": {"http": 404},
}


def surfaces_of(verb: Verb) -> tuple[str, ...]:
    """Return the surfaces that have the verb."""
    has = {"http": verb.http, "ipc": verb.ipc, "jsonrpc": verb.a2a, "rest": verb.rest, "grpc": verb.a2a}
    return tuple(name for name, place in has.items() if place is not None)


class Clients:
    def __init__(self, daemon: Daemon, session: aiohttp.ClientSession, channel: Any) -> None:
        self._url = str(daemon.url)
        self._socket = str(daemon.settings.ipc)
        self._session = session
        self._channel = channel
        self._ways: dict[str, Callable[[Verb, Call, str], Awaitable[Told]]] = {
            "http": self._over_http,
            "ipc": self._over_ipc,
            "jsonrpc": self._over_jsonrpc,
            "rest": self._over_rest,
            "grpc": self._over_grpc,
        }

    async def call(self, surface: str, verb: Verb, call: Call, token: str) -> Told:
        async with asyncio.timeout(10):
            return await self._ways[surface](verb, call, token)

    async def status_without_token(self, place: str) -> int:
        method, _, path = place.partition(" ")
        async with self._session.request(method, self._url + path) as reply:
            return reply.status

    # --- the mailbox --------------------------------------------------------------------------------------

    async def _over_http(self, verb: Verb, call: Call, token: str) -> Told:
        assert verb.http is not None and verb.members is not None
        method, path, members = _placed(verb.http, verb.members(call))
        if method in ("GET", "DELETE"):
            asked: dict[str, Any] = {"params": {name: str(value) for name, value in members.items()}}
        else:
            asked = {"data": msgspec.json.encode(members if verb.body is None else members[verb.body])}
        async with self._session.request(method, self._url + path, headers=_bearer(token), **asked) as reply:
            if reply.status == 200:
                items = () if verb.streams else (await reply.json()).get("items", ())
                code = items[0]["error"]["code"] if items and "error" in items[0] else OK  # of many, each by itself
                return Told(code, reply.status if code == OK else SHOWN[code]["http"])
            return Told((await reply.json())["code"], reply.status)

    async def _over_ipc(self, verb: Verb, call: Call, token: str) -> Told:
        assert verb.ipc is not None and verb.members is not None
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            told: dict[str, Any] = {}
            for frame in ({"kind": "authenticate", "token": token}, {"kind": verb.ipc, **verb.members(call)}):
                body = msgspec.json.encode(frame)
                writer.write(struct.pack(">I", len(body)) + body)
                (size,) = struct.unpack(">I", await reader.readexactly(4))
                told = msgspec.json.decode(await reader.readexactly(size))
                if told["kind"] == "error":
                    return Told(told["code"], told["code"])
            items = told.get("items", ())
            code = items[0]["error"]["code"] if items and "error" in items[0] else OK
            return Told(code, code)
        finally:
            writer.close()
            await writer.wait_closed()

    # --- the A2A protocol ---------------------------------------------------------------------------------

    async def _over_jsonrpc(self, verb: Verb, call: Call, token: str) -> Told:
        assert verb.params is not None
        body = {"jsonrpc": "2.0", "id": 1, "method": verb.a2a, "params": verb.params(call)}
        headers = {**_bearer(token), "A2A-Version": "1.0"}
        async with self._session.post(f"{self._url}/agents/{AGENT}", json=body, headers=headers) as reply:
            told = await _first(reply)
            error = told.get("error")
            return Told(OK, reply.status) if error is None else Told(_code(error["data"]), error["code"])

    async def _over_rest(self, verb: Verb, call: Call, token: str) -> Told:
        assert verb.rest is not None and verb.params is not None
        method, path, members = _placed(verb.rest, verb.params(call))
        headers = {**_bearer(token), "A2A-Version": "1.0"}
        asked: dict[str, Any] = {"json": members} if method == "POST" else {"params": members}
        async with self._session.request(
            method, f"{self._url}/agents/{AGENT}{path}", headers=headers, **asked
        ) as reply:
            told = await _first(reply)
            error = told.get("error")
            return Told(OK, reply.status) if error is None else Told(_code(error["details"]), reply.status)

    async def _over_grpc(self, verb: Verb, call: Call, token: str) -> Told:
        assert verb.a2a is not None and verb.params is not None
        method = SERVICE.methods_by_name[verb.a2a]
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        ask = make(
            f"/{SERVICE.full_name}/{verb.a2a}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=class_of(method.output_type).FromString,
        )
        request = json_format.ParseDict({**verb.params(call), "tenant": AGENT}, class_of(method.input_type)())
        answering = ask(request, metadata=(("authorization", f"Bearer {token}"), ("a2a-version", "1.0")))
        try:
            await (answering.read() if method.server_streaming else answering)
        except grpc.aio.AioRpcError as refused:
            return Told(_code_in(refused), refused.code().name)
        answering.cancel()
        return Told(OK, "OK")


def _placed(place: str, members: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """The method, the path with what belongs into it, and the members that are left."""
    method, _, path = place.partition(" ")
    left = {}
    for name, value in members.items():
        if f"{{{name}}}" in path:
            path = path.replace(f"{{{name}}}", value)
        else:
            left[name] = value
    return method, path, left


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def _first(reply: aiohttp.ClientResponse) -> dict[str, Any]:
    """The answer, or the first event of a stream."""
    if reply.content_type != "text/event-stream":
        told: dict[str, Any] = msgspec.json.decode(await reply.read())
        return told
    while not (line := await reply.content.readline()).startswith(b"data:"):
        assert line, "the stream ended without an event"
    event: dict[str, Any] = msgspec.json.decode(line.removeprefix(b"data:"))
    return event


def _code(details: list[dict[str, Any]]) -> str:
    return str(details[0]["metadata"]["code"])


def _code_in(refused: grpc.aio.AioRpcError) -> str:
    packed = dict(refused.trailing_metadata() or ())[_STATUS]
    info = error_details_pb2.ErrorInfo()
    assert isinstance(packed, bytes)
    status_pb2.Status.FromString(packed).details[0].Unpack(info)
    return str(info.metadata["code"])
