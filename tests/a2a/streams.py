"""Streams of one daemon over its three bindings, each event as JSON with the id under which it came."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from google.protobuf import json_format

from covenant.serve.a2a.proto import SERVICE, class_of
from tests.a2a.served import NEWER, Site

BINDINGS: Final = ("JSONRPC", "HTTP+JSON", "GRPC")
_PATHS: Final = {
    "SendMessage": "/message:send",
    "SendStreamingMessage": "/message:stream",
    "SubscribeToTask": "/tasks/{id}:subscribe",
}


class Refused(Exception):
    """The binding's own error, by the reason that it states."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Heard:
    """The events of one stream so far; `last_id` is the id of the last, as the binding states it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.last_id = ""
        self.is_over = False

    @property
    def generations(self) -> list[int]:
        return [int(next(iter(event.values())).get("generation", 0)) for event in self.events]

    @property
    def states(self) -> list[str]:
        """Each status that was told, without its prefix."""
        told = [next(iter(event.values())) for event in self.events]
        return [one["status"]["state"].removeprefix("TASK_STATE_") for one in told if "status" in one]


async def listen(site: Site, binding: str, method: str, params: dict[str, Any], **headers: str) -> AsyncIterator[Heard]:
    """Yield the events so far, each time that there is one more, and once more when the stream has ended."""
    told = {**NEWER, **site.auth("alice"), **headers}
    heard = Heard()
    opened = _over_grpc if binding == "GRPC" else _over_http
    async for event in opened(site, binding, method, params, told, heard):
        heard.events.append(event)
        yield heard
    heard.is_over = True
    yield heard


async def whole(site: Site, binding: str, method: str, params: dict[str, Any], **headers: str) -> Heard:
    """A stream from its beginning to its end."""
    last = Heard()
    async for heard in listen(site, binding, method, params, **headers):
        last = heard
    assert last.is_over
    return last


async def _over_http(
    site: Site, binding: str, method: str, params: dict[str, Any], headers: dict[str, str], heard: Heard
) -> AsyncIterator[dict[str, Any]]:
    call: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    path = ""
    if binding == "HTTP+JSON":
        path, call = _PATHS[method].format(**params), {name: value for name, value in params.items() if name != "id"}
    async with site.client.stream("POST", f"{site.url}{path}", json=call, headers=headers) as response:
        if not response.headers["content-type"].startswith("text/event-stream"):
            error = json.loads(await response.aread())["error"]
            raise Refused((error.get("details") or error.get("data"))[0]["reason"])
        last = ""
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                last = line[4:]
            elif line.startswith("data: "):
                heard.last_id = last
                data = json.loads(line[6:])
                yield data["result"] if binding == "JSONRPC" else data


async def _over_grpc(
    site: Site, binding: str, method: str, params: dict[str, Any], headers: dict[str, str], heard: Heard
) -> AsyncIterator[dict[str, Any]]:
    described = SERVICE.methods_by_name[method]
    request, reply = class_of(described.input_type), class_of(described.output_type)
    metadata = tuple((name.lower(), value) for name, value in headers.items())
    async with grpc.aio.insecure_channel(site.daemon.grpc_address) as channel:
        ask = channel.unary_stream(
            f"/{SERVICE.full_name}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )
        call = ask(json_format.ParseDict(params, request()), metadata=metadata)
        try:
            async for event in call:
                yield json_format.MessageToDict(event)
        except grpc.aio.AioRpcError as refusal:
            raise Refused(_reason_of(refusal)) from None
        heard.last_id = dict(await call.trailing_metadata()).get("last-event-id", "")


def _reason_of(refusal: grpc.aio.AioRpcError) -> str:
    from google.rpc import error_details_pb2, status_pb2

    status = status_pb2.Status.FromString(dict(refusal.trailing_metadata())["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return str(info.reason)
    raise AssertionError(f"no ErrorInfo in {status}")
