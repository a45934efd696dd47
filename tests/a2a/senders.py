"""Senders of a first message under a key, over every binding: each in a process of its own, or in the test's."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import msgspec
from google.protobuf import json_format
from msgspec import Struct

from covenant.a2a import Fault, Message, Part, Task
from covenant.a2a.fault import CONFLICT
from covenant.a2a.interface import JSONRPC, REST
from covenant.serve.a2a.proto import SERVICE, class_of
from tests.a2a.house import GRPC, client_at

BINDINGS: Final = (JSONRPC, REST, GRPC)
OTHER_CONTENT: Final = "it was refused: other content under the same key"
_METHOD: Final = SERVICE.methods_by_name["SendMessage"]


class Sending(Struct, frozen=True):
    """What is sent, by whom, and which way."""

    card: dict[str, Any]
    binding: str
    url: str
    token: str
    key: str
    text: str

    @property
    def message(self) -> Message:
        facts = {"whole": 7, "half": 0.5, "none": None, "many": [1, "two"]}
        return Message(
            message_id="m-1", role="ROLE_USER", parts=(Part(text=self.text), Part(data=facts)), metadata=facts
        )


async def send(sending: Sending) -> str:
    """The id of the task that it led to."""
    return await (_send_by_grpc(sending) if sending.binding == GRPC else _send_by_http(sending))


async def _send_by_http(sending: Sending) -> str:
    async with client_at(sending.card, sending.binding, sending.url, sending.token) as client:
        try:
            task = await client.send(sending.message, idempotency_key=sending.key, blocking=False)
        except Fault as refusal:
            if refusal.kind is not CONFLICT:
                raise
            return OTHER_CONTENT
        assert isinstance(task, Task)
        return task.id


async def _send_by_grpc(sending: Sending) -> str:
    said = {"message": msgspec.to_builtins(sending.message), "configuration": {"returnImmediately": True}}
    request, reply = json_format.ParseDict(said, class_of(_METHOD.input_type)()), class_of(_METHOD.output_type)
    told = {"authorization": f"Bearer {sending.token}", "a2a-version": "1.1", "idempotency-key": sending.key}
    async with grpc.aio.insecure_channel(urlsplit(sending.url).netloc) as channel:
        ask = channel.unary_unary(
            f"/{SERVICE.full_name}/{_METHOD.name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        try:
            answer = await ask(request, metadata=tuple(told.items()))
        except grpc.aio.AioRpcError as refusal:
            if refusal.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
            return OTHER_CONTENT
        return str(answer.task.id)


def send_when_told(line: Connection, sending: Sending) -> None:
    """What a process of its own does: all of them begin at once."""
    line.send("ready")
    line.recv()
    line.send(asyncio.run(send(sending)))
