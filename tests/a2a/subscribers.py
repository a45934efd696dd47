"""Clients of a stream on every binding, which keep each event as it came: those that a client author would write after
the page on generation, and ours."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import aiohttp
import grpc
import msgspec

from covenant.a2a.interface import JSONRPC, REST
from covenant.model.protocol import State
from covenant.serve.a2a.operations import CURSOR
from covenant.serve.a2a.proto import SERVICE, class_of
from tests.a2a.house import GRPC, House
from tests.beings import PATIENCE_S


class Heard(NamedTuple):
    """One event, and what a client has to know of it."""

    generation: int
    data: bytes
    is_last: bool


class Cut(Exception):
    """The stream broke off."""


Subscribe: TypeAlias = Callable[[House, str, str, int], AsyncIterator[Heard]]


async def jsonrpc(house: House, url: str, task_id: str, after: int) -> AsyncIterator[Heard]:
    call = {"jsonrpc": "2.0", "id": 1, "method": "SubscribeToTask", "params": {"id": task_id}}
    async for heard in _sse(house, url, call, {"Last-Event-ID": str(after)}):
        yield heard


async def rest(house: House, url: str, task_id: str, after: int) -> AsyncIterator[Heard]:
    """One that cannot set a header."""
    async for heard in _sse(house, f"{url}/tasks/{task_id}:subscribe", {"metadata": {CURSOR: after}}, {}):
        yield heard


async def _sse(house: House, url: str, body: dict[str, Any], cursor: dict[str, str]) -> AsyncIterator[Heard]:
    """What has an empty line behind it counts; the rest was not said."""
    headers = {"Authorization": f"Bearer {house.tokens['alice']}", "A2A-Version": "1.1", **cursor}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, json=body, headers=headers) as response,
        ):
            assert response.status == 200, await response.read()
            said = b""
            async for chunk in response.content.iter_any():
                *whole, said = (said + chunk).split(b"\n\n")
                for event in whole:
                    if event != b":":
                        yield _read(event)
    except (aiohttp.ClientError, OSError) as failed:
        raise Cut from failed


def _read(event: bytes) -> Heard:
    told, data = event.split(b"\n")
    content = json.loads(data.removeprefix(b"data: "))
    status = content.get("result", content).get("statusUpdate", {}).get("status")
    is_last = status is not None and State(status["state"]).is_terminal
    return Heard(int(told.removeprefix(b"id: ")), event, is_last)


async def over_grpc(house: House, url: str, task_id: str, after: int) -> AsyncIterator[Heard]:
    method = SERVICE.methods_by_name["SubscribeToTask"]
    request, reply = class_of(method.input_type), class_of(method.output_type)
    told = {"authorization": f"Bearer {house.tokens['alice']}", "a2a-version": "1.1", "last-event-id": str(after)}
    options = [("grpc.use_local_subchannel_pool", 1)]  # a line of its own, which has not failed yet
    async with grpc.aio.insecure_channel(urlsplit(url).netloc, options) as channel:
        subscribe = channel.unary_stream(
            f"/{SERVICE.full_name}/{method.name}", request_serializer=request.SerializeToString
        )
        try:
            async for data in subscribe(request(id=task_id), metadata=tuple(told.items())):
                element = reply.FromString(data)
                yield Heard(getattr(element, element.WhichOneof("payload")).generation, data, _ends(element))
        except grpc.aio.AioRpcError as failed:
            if failed.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            raise Cut from failed


def _ends(element: Any) -> bool:
    if not element.HasField("status_update"):
        return False
    status = element.status_update.status
    names = status.DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number
    return State(names[status.state].name).is_terminal


def ours(binding: str) -> Subscribe:
    """By itself it takes up again what was cut."""

    async def follow(house: House, url: str, task_id: str, after: int) -> AsyncIterator[Heard]:
        async with house.client(binding, url) as client:
            async for event in client.follow(task_id, after):
                assert not event.missed
                yield Heard(event.generation, msgspec.json.encode(event), event.is_last)

    return follow


SUBSCRIBERS: Final[dict[str, tuple[str, Subscribe]]] = {
    "JSON-RPC": (JSONRPC, jsonrpc),
    "HTTP+JSON": (REST, rest),
    "gRPC": (GRPC, over_grpc),
    "our client over JSON-RPC": (JSONRPC, ours(JSONRPC)),
    "our client over HTTP+JSON": (REST, ours(REST)),
}
