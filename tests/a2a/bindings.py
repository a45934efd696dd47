"""A client that calls one operation in any of the three bindings, and returns the answers in one form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

import grpc
import httpx
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2
from msgspec import Struct

from covenant.a2a.interface import JSONRPC, REST
from covenant.serve.a2a.proto import SERVICE, class_of
from tests.a2a.served import Site, start_site

GRPC: Final = "GRPC"
BINDINGS: Final = (JSONRPC, REST, GRPC)
PLACES: Final = {
    "SendMessage": ("POST", "/message:send"),
    "SendStreamingMessage": ("POST", "/message:stream"),
    "GetTask": ("GET", "/tasks/{id}"),
    "ListTasks": ("GET", "/tasks"),
    "CancelTask": ("POST", "/tasks/{id}:cancel"),
    "SubscribeToTask": ("POST", "/tasks/{id}:subscribe"),
    "CreateTaskPushNotificationConfig": ("POST", "/tasks/{taskId}/pushNotificationConfigs"),
    "GetTaskPushNotificationConfig": ("GET", "/tasks/{taskId}/pushNotificationConfigs/{id}"),
    "ListTaskPushNotificationConfigs": ("GET", "/tasks/{taskId}/pushNotificationConfigs"),
    "DeleteTaskPushNotificationConfig": ("DELETE", "/tasks/{taskId}/pushNotificationConfigs/{id}"),
    "GetExtendedAgentCard": ("GET", "/extendedAgentCard"),
}
Pairs: TypeAlias = Sequence[tuple[str, str]]
PATIENCE_S: Final = 40  # longer than a poll is held
_STREAM: Final = "text/event-stream"


class Answer(Struct):
    """`code` is the binding's own: of JSON-RPC, of HTTP, or the name of a gRPC status."""

    result: Any = None
    code: Any = None
    message: str = ""
    reason: str | None = None
    metadata: dict[str, str] = {}
    fields: list[str] = []
    status: int = 200  # of HTTP
    events: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []


class Bindings:
    """A daemon in all three bindings; alice asks, the writer works."""

    def __init__(self, site: Site, channel: Any) -> None:
        self.site = site
        self._channel = channel

    async def call(
        self,
        binding: str,
        operation: str,
        params: dict[str, Any] | None = None,
        *more: tuple[str, str],
        version: str | None = "1.1",
        who: str | None = "alice",
    ) -> Answer:
        """`more` are headers, or entries of metadata, beside the version and the token."""
        told = [*self.site.auth(who).items(), *more]
        if version is not None:
            told.append(("A2A-Version", version))
        ask = {JSONRPC: self._by_jsonrpc, REST: self._by_rest, GRPC: self._by_grpc}[binding]
        return await ask(operation, params or {}, told)

    async def _by_jsonrpc(self, operation: str, params: dict[str, Any], told: Pairs) -> Answer:
        call = {"jsonrpc": "2.0", "id": 1, "method": operation, "params": params}
        headers = [("Content-Type", "application/json"), *told]
        return await self.http("POST", "/", headers, json.dumps(call).encode())

    async def _by_rest(self, operation: str, params: dict[str, Any], told: Pairs) -> Answer:
        method, path = PLACES[operation]
        left = dict(params)
        for name in ("taskId", "id"):
            if f"{{{name}}}" in path:
                path = path.replace(f"{{{name}}}", left.pop(name))
        if method == "POST":
            return await self.http(method, path, [("Content-Type", "application/a2a+json"), *told], _encoded(left))
        query = "&".join(f"{name}={json.dumps(v) if not isinstance(v, str) else v}" for name, v in left.items())
        return await self.http(method, f"{path}?{query}" if query else path, told, None)

    async def cancel_all(self, who: str = "alice") -> None:
        """Cancel the tasks that a test has left open, so that no other test finds them."""
        for state in ("SUBMITTED", "WORKING", "INPUT_REQUIRED"):
            answer = await self.call(JSONRPC, "ListTasks", {"status": f"TASK_STATE_{state}", "pageSize": 100}, who=who)
            for task in answer.result["tasks"]:
                await self.call(JSONRPC, "CancelTask", {"id": task["id"]}, who=who)

    async def http(self, method: str, path: str, headers: Pairs, content: bytes | None) -> Answer:
        """One request of either binding of HTTP; a stream is read to its end."""
        url = f"{self.site.url}{path}"
        async with (
            asyncio.timeout(PATIENCE_S),
            self.site.client.stream(method, url, headers=list(headers), content=content) as response,
        ):
            if response.headers["content-type"] == _STREAM:
                events = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: ")]
                return Answer(events=[told.get("result", told) for told in events])
            answer = json.loads(await response.aread())
        error = answer.get("error") if isinstance(answer, dict) else None
        if error is None:
            result = answer.get("result") if "jsonrpc" in answer else answer
            return Answer(result, status=response.status_code)
        details = error.get("data", error.get("details"))
        return Answer(code=error["code"], message=error["message"], status=response.status_code, **_told(details))

    async def _by_grpc(self, operation: str, params: dict[str, Any], told: Pairs) -> Answer:
        method = SERVICE.methods_by_name[operation]
        request = json_format.ParseDict(params, class_of(method.input_type)())
        return await self.rpc(operation, request.SerializeToString(), told)

    async def rpc(self, operation: str, data: bytes, told: Pairs) -> Answer:
        """One call of gRPC; a stream is read to its end."""
        method = SERVICE.methods_by_name[operation]
        reply = class_of(method.output_type)
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        ask = make(f"/{SERVICE.full_name}/{operation}", response_deserializer=reply.FromString)
        call = ask(data, metadata=tuple((name.lower(), value) for name, value in told))
        try:
            async with asyncio.timeout(PATIENCE_S):
                if method.server_streaming:
                    return Answer(events=[json_format.MessageToDict(event) async for event in call])
                return Answer(json_format.MessageToDict(await call))
        except grpc.aio.AioRpcError as refused:
            return _refused(refused)


def _refused(refused: grpc.aio.AioRpcError) -> Answer:
    (data,) = [value for name, value in refused.trailing_metadata() or () if name == "grpc-status-details-bin"]
    details = []
    for detail in status_pb2.Status.FromString(bytes(data)).details:
        kind = error_details_pb2.ErrorInfo if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR) else _BAD_REQUEST
        found = kind()
        assert detail.Unpack(found)
        details.append({"@type": detail.type_url, **json_format.MessageToDict(found)})
    return Answer(code=refused.code().name, message=refused.details() or "", **_told(details))


_BAD_REQUEST: Final = error_details_pb2.BadRequest


def _told(details: list[dict[str, Any]]) -> dict[str, Any]:
    info = details[0]
    assert info["@type"].endswith("google.rpc.ErrorInfo")
    assert info["domain"] == "a2a-protocol.org"
    fields = [violation.get("field", "") for detail in details[1:] for violation in detail["fieldViolations"]]
    return {"reason": info["reason"], "metadata": info.get("metadata", {}), "fields": fields, "details": details}


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


@asynccontextmanager
async def bindings(card: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Bindings]:
    async with httpx.AsyncClient(timeout=60) as client:
        site = await start_site(client, card, grpc="127.0.0.1:0", **settings)
        channel = grpc.aio.insecure_channel(site.daemon.grpc_address)
        try:
            yield Bindings(site, channel)
        finally:
            await channel.close()
            await site.daemon.stop()
