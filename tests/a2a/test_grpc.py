"""The A2A protocol over gRPC: the official client as it is, and ours with its generations. (Contract 14-17.)"""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from a2a.client import ClientCallContext, ClientConfig, ClientFactory
from a2a.client.client import Client as SdkClient
from a2a.types import a2a_pb2 as pb
from a2a.utils.errors import A2AError, TaskNotFoundError, VersionNotSupportedError
from google.protobuf import json_format, struct_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from msgspec import structs

from covenant import Text
from covenant.exchange.bounds import Bounds
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model.error import BadSetting, StoreLocked
from covenant.model.peer import Caller
from covenant.model.record import Asks
from covenant.model.task import Result
from covenant.serve.a2a.codec import Writer
from covenant.serve.a2a.proto import SERVICE, class_of
from covenant.serve.daemon import Daemon, Settings
from tests.a2a.conftest import WORKING, piece, says
from tests.a2a.workplace import Workplace
from tests.daemons import OPERATOR_TOKEN
from tests.until import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Ours:
    """Any gRPC client, generated from our descriptors."""

    def __init__(self, channel: Any, token: str | None) -> None:
        self._channel = channel
        self._token = token

    def call(
        self,
        name: str,
        metadata: dict[str, str] | None = None,
        beside: tuple[tuple[str, str], ...] = (),
        **fields: Any,
    ) -> Any:
        method = SERVICE.methods_by_name[name]
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        request, reply = class_of(method.input_type), class_of(method.output_type)
        ask = make(
            f"/{SERVICE.full_name}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )
        told = {"a2a-version": "1.0", **(metadata or {})}
        if self._token is not None:
            told["authorization"] = f"Bearer {self._token}"
        return ask(request(**fields), metadata=(*told.items(), *beside))

    async def send(self, text: str = "draft the brief", metadata: dict[str, str] | None = None, **more: Any) -> Any:
        configuration = {"return_immediately": True, **more.pop("configuration", {})}
        message = {"message_id": "m-1", "role": "ROLE_USER", "parts": [{"text": text}], **more}
        return (await self.call("SendMessage", metadata, message=message, configuration=configuration)).task


class Place(Workplace):
    """A daemon with gRPC; alice asks, the writer works."""

    def __init__(self, daemon: Daemon, alice: str, writer: Caller, channel: Any) -> None:
        super().__init__(daemon.exchange, writer)
        self.daemon = daemon
        self.token = alice
        self.channel = channel
        self.ours = Ours(channel, alice)

    async def card(self, name: str | None = None) -> Any:
        shown = await self.daemon.directory.show(name)
        return json_format.ParseDict(shown.card, pb.AgentCard())


async def start(stack: AsyncExitStack, **settings: Any) -> Daemon:
    given = {"store": "memory:", "http": None, "grpc": "127.0.0.1:0", **settings}
    daemon = Daemon(Settings(**given), Realm.throwaway(), OPERATOR_TOKEN)
    await daemon.start()
    stack.push_async_callback(daemon.stop)
    return daemon


async def settle(stack: AsyncExitStack, daemon: Daemon, names: tuple[str, ...] = ("writer@lab",)) -> Place:
    exchange = daemon.exchange
    operator = exchange.authenticate(OPERATOR_TOKEN)
    _, alice = await exchange.enroll(operator, "alice@lab", None, WORKING)
    workers = []
    for name in names:
        _, token = await exchange.enroll(operator, name, None, WORKING)
        workers.append(exchange.authenticate(token))
        await exchange.run(operator, c.PublishCard(None, workers[-1].agent, {"name": name.partition("@")[0]}))
    channel = grpc.aio.insecure_channel(daemon.grpc_address)
    stack.push_async_callback(channel.close)
    return Place(daemon, alice, workers[0], channel)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def place(stack: AsyncExitStack) -> Place:
    return await settle(stack, await start(stack))


async def sdk(place: Place, name: str | None = None, streaming: bool = False) -> tuple[SdkClient, ClientCallContext]:
    """The official client, made from the card."""
    config = ClientConfig(
        streaming=streaming,
        polling=not streaming,
        supported_protocol_bindings=["GRPC"],
        grpc_channel_factory=grpc.aio.insecure_channel,
    )
    client = ClientFactory(config).create(await place.card(name))
    return client, ClientCallContext(service_parameters={"Authorization": f"Bearer {place.token}"})


def asks(text: str = "draft the brief", **more: Any) -> Any:
    message = pb.Message(message_id="m-1", role=pb.ROLE_USER, parts=[pb.Part(text=text)], **more)
    return pb.SendMessageRequest(message=message)


def line(event: Any) -> tuple[int, str]:
    """One event of a stream, in short."""
    kind = event.WhichOneof("payload")
    if kind == "artifact_update":
        return event.artifact_update.generation, f"artifact {event.artifact_update.artifact.artifact_id}"
    shown = getattr(event, kind)
    return shown.generation, pb.TaskState.Name(shown.status.state).removeprefix("TASK_STATE_")


async def refused(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str], list[str]]:
    """The code, the reason, what ErrorInfo adds, and the fields that are wrong."""
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await (call.read() if hasattr(call, "read") else call)
    (data,) = [value for name, value in told.value.trailing_metadata() if name == "grpc-status-details-bin"]
    status = status_pb2.Status.FromString(data)
    assert status.code == told.value.code().value[0]
    assert status.message == told.value.details()
    info, wrong = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert info.domain == "a2a-protocol.org"
    for detail in status.details[1:]:
        assert detail.Unpack(wrong)
    return told.value.code(), info.reason, dict(info.metadata), [field.field for field in wrong.field_violations]


async def _wait(call: Any) -> Any:
    return await call


async def rest(stream: Any) -> list[Any]:
    """Of one that was read from before."""
    found = []
    while (event := await stream.read()) is not grpc.aio.EOF:
        found.append(event)
    return found


async def _waiting(place: Place) -> None:
    await until(lambda: place.exchange.waits.total > 0)


# --- the official client -----------------------------------------------------------------------------------


async def test_the_official_client_sends_gets_lists_and_cancels(place: Place) -> None:
    client, me = await sdk(place)
    async with client:
        (sent,) = [event async for event in client.send_message(asks(), context=me)]
        assert sent.task.status.state == pb.TASK_STATE_SUBMITTED
        task_id = sent.task.id
        assert (await client.get_task(pb.GetTaskRequest(id=task_id), context=me)).history[0].parts[0].text
        listing = await client.list_tasks(pb.ListTasksRequest(page_size=10), context=me)
        assert [task.id for task in listing.tasks] == [task_id]
        assert (listing.total_size, listing.page_size, listing.next_page_token) == (1, 10, "")
        canceled = await client.cancel_task(pb.CancelTaskRequest(id=task_id), context=me)
        assert canceled.status.state == pb.TASK_STATE_CANCELED
        with pytest.raises(TaskNotFoundError):
            await client.get_task(pb.GetTaskRequest(id="nonsense"), context=me)


async def test_the_official_client_streams(place: Place) -> None:
    client, me = await sdk(place, streaming=True)
    async with client:
        stream = client.send_message(asks(), context=me)
        first = await anext(stream)
        assert first.task.status.state == pb.TASK_STATE_SUBMITTED
        subscribed = client.subscribe(pb.SubscribeToTaskRequest(id=first.task.id), context=me)
        assert (await anext(subscribed)).task.id == first.task.id
        delivery = await place.lease()
        await place.work(c.AddArtifact(None, delivery.lease_id, piece("one")))
        await place.finish(delivery, Result.ok(delivery, [Text("done")]))
        for events in ([event async for event in stream], [event async for event in subscribed]):
            kinds = [event.WhichOneof("payload") for event in events]
            assert kinds == ["status_update", "artifact_update", "artifact_update", "status_update"]
            assert events[1].artifact_update.artifact.parts[0].text == "one"
            assert events[-1].status_update.status.state == pb.TASK_STATE_COMPLETED


async def test_the_official_client_keeps_its_webhooks_and_reads_the_extended_card(place: Place) -> None:
    client, me = await sdk(place)
    async with client:
        (sent,) = [event async for event in client.send_message(asks(), context=me)]
        config = pb.TaskPushNotificationConfig(
            task_id=sent.task.id,
            id="hook",
            url="https://example.org/hook",
            token="secret",
            authentication=pb.AuthenticationInfo(scheme="Bearer", credentials="secret"),
        )
        stored = await client.create_task_push_notification_config(config, context=me)
        assert (stored.id, stored.task_id, stored.url) == ("hook", sent.task.id, "https://example.org/hook")
        one = pb.GetTaskPushNotificationConfigRequest(task_id=sent.task.id, id="hook")
        found = await client.get_task_push_notification_config(one, context=me)
        assert (found.authentication.scheme, found.authentication.credentials, found.token) == ("Bearer", "", "")
        everything = pb.ListTaskPushNotificationConfigsRequest(task_id=sent.task.id)
        assert len((await client.list_task_push_notification_configs(everything, context=me)).configs) == 1
        gone = pb.DeleteTaskPushNotificationConfigRequest(task_id=sent.task.id, id="hook")
        await client.delete_task_push_notification_config(gone, context=me)
        await client.delete_task_push_notification_config(gone, context=me)
        assert not (await client.list_task_push_notification_configs(everything, context=me)).configs
        card = await client.get_extended_agent_card(pb.GetExtendedAgentCardRequest(), context=me)
        assert card.name == "writer"
        assert card.signatures


async def test_the_card_names_the_grpc_interface(stack: AsyncExitStack) -> None:
    """And whoever speaks to another agent than the one at the root says so as its tenant."""
    place = await settle(stack, await start(stack), ("writer@lab", "painter@lab"))
    (root,) = (await place.card()).supported_interfaces
    assert (root.url, root.protocol_binding, root.tenant) == (place.daemon.grpc_address, "GRPC", "")
    (other,) = (await place.card("painter@lab")).supported_interfaces
    assert (other.url, other.tenant) == (place.daemon.grpc_address, "painter@lab")
    client, me = await sdk(place, "painter@lab")
    async with client:
        (sent,) = [event async for event in client.send_message(asks(), context=me)]
        assert (await client.get_extended_agent_card(pb.GetExtendedAgentCardRequest(), context=me)).name == "painter"
    assert (await refused(place.ours.call("GetTask", id=sent.task.id)))[1] == "TASK_NOT_FOUND"
    found = await place.ours.call("GetTask", tenant="painter@lab", id=sent.task.id)
    assert found.id == sent.task.id
    assert (await refused(place.ours.call("GetTask", tenant="nobody", id=sent.task.id)))[1] == "TASK_NOT_FOUND"


# --- messages ----------------------------------------------------------------------------------------------


async def test_every_kind_of_part_comes_and_goes(place: Place) -> None:
    values = [struct_pb2.Value() for _ in range(3)]
    for value, plain in zip(values, ({"k": [1, 2.5, None]}, 7, None), strict=True):
        json_format.ParseDict(plain, value)
    parts: list[dict[str, Any]] = [
        {"text": ""},
        {"raw": b"\x00\xff", "filename": "a.bin", "media_type": "application/octet-stream"},
        {"url": "https://example.org/a"},
        *({"data": value} for value in values),
    ]
    message = pb.Message(message_id="m-1", role=pb.ROLE_USER, extensions=["urn:x"])
    for part in parts:
        message.parts.append(pb.Part(**part))
    message.metadata.update({"b": 1, "a": {"whole": 3, "part": 0.5}})
    client, me = await sdk(place)
    async with client:
        (sent,) = [event async for event in client.send_message(pb.SendMessageRequest(message=message), context=me)]
        shown = (await client.get_task(pb.GetTaskRequest(id=sent.task.id), context=me)).history[0]
    assert shown.parts == message.parts
    assert shown.metadata == message.metadata
    assert list(shown.extensions) == ["urn:x"]
    got = (await place.lease()).task.message
    assert got is not None
    assert [part.data for part in got.parts[3:]] == [{"k": [1, 2.5, None]}, 7, None]
    assert got.metadata == {"a": {"part": 0.5, "whole": 3}, "b": 1}


async def test_a_message_that_is_not_whole_is_refused_with_the_field(place: Place) -> None:
    empty = place.ours.call("SendMessage", message={"role": "ROLE_USER", "parts": [{"text": "hello"}]})
    code, reason, _, fields = await refused(empty)
    assert (code, reason, fields) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMS", ["message.messageId"])
    assert (await refused(place.ours.call("GetTask")))[3] == ["id"]
    assert (await refused(place.ours.call("ListTasks", page_size=101)))[3] == ["pageSize"]
    assert (await refused(place.ours.call("ListTasks", status=99)))[3] == ["status"]
    assert (await refused(place.ours.call("GetTask", id="x", history_length=-1)))[3] == ["historyLength"]
    for moment in ({"seconds": 10**15}, {"seconds": -(10**12)}, {"nanos": -5}, {"nanos": 10**9}):
        wrong = place.ours.call("ListTasks", status_timestamp_after=moment)
        assert (await refused(wrong))[1] == "INVALID_PARAMS"
    raw = place.channel.unary_unary(f"/{SERVICE.full_name}/SendMessage")
    metadata = (("authorization", f"Bearer {place.token}"), ("a2a-version", "1.0"))
    assert (await refused(raw(b"\xff\xff", metadata=metadata)))[1] == "PARSE_ERROR"


async def test_what_an_error_tells_is_bounded(place: Place) -> None:
    """Clients take no more than 8 KiB of trailers."""
    code, _, metadata, _ = await refused(place.ours.call("GetTask", id="x" * 100_000))
    assert code is grpc.StatusCode.NOT_FOUND
    assert len(metadata["taskId"]) <= 513


async def test_a_message_above_the_bound_is_refused(stack: AsyncExitStack) -> None:
    place = await settle(stack, await start(stack, bounds=Bounds(body_bytes_max=10_000)))
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await place.ours.send("x" * 20_000)
    assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await place.ours.send("x" * 5_000)).id


# --- generations -------------------------------------------------------------------------------------------


async def test_the_sdk_keeps_its_own_descriptors(place: Place) -> None:
    assert "generation" not in pb.Task.DESCRIPTOR.fields_by_name
    task = await place.ours.send()
    assert task.generation == 1
    old = pb.Task.FromString(task.SerializeToString())  # a client that does not know the field passes over it
    assert old.status.state == pb.TASK_STATE_SUBMITTED


async def test_every_event_has_its_generation(place: Place) -> None:
    message = {"message_id": "m-1", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
    stream = place.ours.call("SendStreamingMessage", message=message)
    told = [line(await stream.read())]
    delivery = await place.lease()
    await place.work(c.UpdateTask(None, delivery.lease_id, says("half way")))
    await place.work(c.AddArtifact(None, delivery.lease_id, piece("one")))
    await place.finish(delivery, Result.ok(delivery, [Text("done")]))
    told += [line(event) for event in await rest(stream)]
    assert told == [
        (1, "SUBMITTED"),
        (2, "WORKING"),
        (3, "WORKING"),
        (4, "artifact draft"),
        (5, "artifact result"),
        (6, "COMPLETED"),
    ]


async def test_a_write_that_expects_another_generation_is_aborted(place: Place) -> None:
    task = await place.ours.send()
    late = place.ours.send("late", task_id=task.id, configuration={"if_generation_match": 7})
    code, reason, metadata, _ = await refused(late)
    assert (code, reason) == (grpc.StatusCode.ABORTED, "TASK_GENERATION_MISMATCH")
    assert metadata == {"taskId": task.id, "expectedGeneration": "7", "currentGeneration": "1"}
    moved = await place.ours.send("in time", task_id=task.id, configuration={"if_generation_match": 1})
    assert moved.generation == 2


async def test_a_poll_is_held_until_the_generation_is_higher(place: Place) -> None:
    """Contract 15."""
    task = await place.ours.send()
    assert (await place.ours.call("GetTask", id=task.id, current_generation=0)).generation == 1
    held = asyncio.ensure_future(_wait(place.ours.call("GetTask", id=task.id, current_generation=1)))
    await _waiting(place)
    assert not held.done()
    await place.lease()
    assert (await held).generation == 2


async def test_a_stream_is_taken_up_again_behind_its_cursor(place: Place) -> None:
    task = await place.ours.send()
    delivery = await place.lease()
    cut = place.ours.call("SubscribeToTask", id=task.id)
    assert line(await cut.read()) == (2, "WORKING")
    cut.cancel()
    await place.work(c.AddArtifact(None, delivery.lease_id, piece("one")))
    await place.finish(delivery, Result.ok(delivery, [Text("done")]))
    again = place.ours.call("SubscribeToTask", {"last-event-id": "2"}, id=task.id)
    assert [line(event) async for event in again] == [(3, "artifact draft"), (4, "artifact result"), (5, "COMPLETED")]
    assert (await refused(place.ours.call("SubscribeToTask", id=task.id)))[1] == "UNSUPPORTED_OPERATION"
    wrong = place.ours.call("SubscribeToTask", {"last-event-id": "two"}, id=task.id)
    assert (await refused(wrong))[3] == ["Last-Event-ID"]


def test_an_event_is_the_same_bytes_from_whichever_daemon() -> None:
    """A map has no order of its own, and in each process another."""
    names = [chr(number) for number in range(ord("a"), ord("z") + 1)]
    artifact = structs.replace(piece("one"), metadata=dict.fromkeys(reversed(names), True))
    written = Writer(SERVICE.file.message_types_by_name["Artifact"]).write(artifact)
    places = [written.index(b"\n\x01" + name.encode()) for name in names]
    assert places == sorted(places)


async def test_a_first_message_under_the_same_key_is_the_same_task(place: Place) -> None:
    first = await place.ours.send(metadata={"idempotency-key": "k-1"})
    assert (await place.ours.send(metadata={"idempotency-key": "k-1"})).id == first.id
    other = place.ours.send("other", metadata={"idempotency-key": "k-1"})
    assert (await refused(other))[:2] == (grpc.StatusCode.ALREADY_EXISTS, "CONFLICT")


# --- service parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "0.3", "2.0", "1"])
async def test_another_version_is_not_spoken(place: Place, version: str) -> None:
    code, reason, _, _ = await refused(place.ours.send(metadata={"a2a-version": version}))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_NOT_SUPPORTED")


async def test_the_official_client_understands_the_error(place: Place) -> None:
    client, me = await sdk(place)
    async with client:
        assert me.service_parameters is not None
        me.service_parameters["Authorization"] = "Bearer nonsense"
        with pytest.raises(A2AError):
            await client.get_task(pb.GetTaskRequest(id="x"), context=me)
    assert issubclass(VersionNotSupportedError, A2AError)


async def test_without_a_valid_token_nobody_is_heard(place: Place) -> None:
    for token in (None, "nonsense"):
        code, reason, _, _ = await refused(Ours(place.channel, token).send())
        assert (code, reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@asynccontextmanager
async def by_hand(
    daemon: Daemon, path: bytes, tls: ssl.SSLContext | None = None, **metadata: bytes
) -> AsyncIterator[asyncio.StreamReader]:
    """A call as no client makes it."""
    said = {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": path,
        ":authority": b"x",
        "te": b"trailers",
        "content-type": b"application/grpc",
        **metadata,
    }
    block = b"".join(bytes([0, len(name)]) + name.encode() + bytes([len(text)]) + text for name, text in said.items())
    host, _, port = str(daemon.grpc_address).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, block))
    writer.write(frame(0, 1, 1, bytes(5)))
    yield reader
    writer.close()


async def test_metadata_that_is_no_text_is_not_repeated_in_the_log(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody can send it, as often and as long as they like; clients of gRPC do not."""
    path = f"/{SERVICE.full_name}/ListTasks".encode()
    async with asyncio.timeout(10), by_hand(place.daemon, path, authorization=b"Bearer half a secret\xff") as reader:
        answer = b""
        while b"a valid token is needed" not in answer:
            answer += await reader.read(1 << 16)
    assert "half a secret" not in caplog.text


@pytest.mark.usefixtures("short_waits")
async def test_a_path_that_is_no_text_is_not_repeated_in_the_log(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(20):
        async with by_hand(place.daemon, b"/half a secret\xff") as reader:
            while await reader.read(1 << 16):
                pass
        await until(lambda: "it begins anew" in caplog.text)
        await place.channel.channel_ready()
    gc.collect()  # asyncio tells of what nobody has asked a task for when the task goes
    assert "half a secret" not in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.usefixtures("short_waits")
async def test_a_call_whose_path_is_no_text_ends_no_more_than_what_is_under_way(place: Place) -> None:
    """gRPC ends its server for it, whoever has sent it. There is another at once, twice as well."""
    task = await place.ours.send()
    for _ in range(2):
        stream = place.ours.call("SubscribeToTask", id=task.id)
        assert (await stream.read()).task.id == task.id
        async with asyncio.timeout(20):
            async with by_hand(place.daemon, b"/\xff\xfe") as reader:
                while await reader.read(1 << 16):
                    pass
            with pytest.raises(grpc.aio.AioRpcError) as cut:
                await stream.read()
            assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
            await place.channel.channel_ready()
            shown = await place.ours.call("GetTask", id=task.id)
        assert shown.id == task.id
    assert place.daemon.exchange.waits.total == 0


async def test_extensions_in_force_are_named_and_required_ones_demanded(place: Place) -> None:
    operator = place.exchange.authenticate(OPERATOR_TOKEN)
    extensions = [{"uri": "urn:must", "required": True}, {"uri": "urn:may"}]
    card = {"name": "writer", "capabilities": {"extensions": extensions}}
    await place.exchange.run(operator, c.PublishCard(None, place.writer.agent, card))
    code, reason, metadata, _ = await refused(place.ours.send())
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "EXTENSION_SUPPORT_REQUIRED")
    assert metadata["extension"] == "urn:must"
    call = place.ours.call("ListTasks", {"a2a-extensions": "urn:must, urn:other"})
    await call
    assert dict(await call.initial_metadata())["a2a-extensions"] == "urn:must"


async def test_extensions_that_are_named_one_by_one_are_all_heard(place: Place) -> None:
    operator = place.exchange.authenticate(OPERATOR_TOKEN)
    extensions = [{"uri": "urn:must", "required": True}, {"uri": "urn:may"}]
    card = {"name": "writer", "capabilities": {"extensions": extensions}}
    await place.exchange.run(operator, c.PublishCard(None, place.writer.agent, card))
    wanted = [("a2a-extensions", uri) for uri in ("urn:must", "urn:may", "urn:other")]
    call = place.ours.call("ListTasks", beside=tuple(wanted))
    await call
    assert dict(await call.initial_metadata())["a2a-extensions"] == "urn:must, urn:may"


# --- life --------------------------------------------------------------------------------------------------


async def test_a_call_that_is_given_up_ends_its_wait(place: Place) -> None:
    task = await place.ours.send()
    held = place.ours.call("GetTask", id=task.id, current_generation=1)
    stream = place.ours.call("SubscribeToTask", id=task.id)
    await stream.read()
    await until(lambda: place.exchange.waits.total == 2)
    held.cancel()
    stream.cancel()
    await until(lambda: place.exchange.waits.total == 0)


async def test_calls_that_come_all_at_once_are_all_answered(place: Place) -> None:
    """Left to itself, gRPC cancels at random from a thousand on that nobody has looked at yet."""
    task = await place.ours.send()
    calls = [place.ours.call("GetTask", id=task.id, history_length=0) for _ in range(2500)]
    assert {shown.id for shown in await asyncio.gather(*calls)} == {task.id}


async def test_a_stream_ends_with_the_trust_in_its_caller(place: Place) -> None:
    task = await place.ours.send()
    stream = place.ours.call("SubscribeToTask", id=task.id)
    await stream.read()
    await _waiting(place)
    operator = place.exchange.authenticate(OPERATOR_TOKEN)
    await place.exchange.trust.revoke_peer(operator, "alice@lab", "she left")
    assert (await refused(stream))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_a_daemon_that_ends_says_so_to_its_streams(stack: AsyncExitStack) -> None:
    daemon = await start(stack)
    place = await settle(stack, daemon)
    health = health_pb2_grpc.HealthStub(place.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE.full_name))
    assert (await watch.read()).status == SERVING
    task = await place.ours.send()
    stream = place.ours.call("SubscribeToTask", id=task.id)
    held = asyncio.ensure_future(_wait(place.ours.call("GetTask", id=task.id, current_generation=1)))
    await stream.read()
    await until(lambda: place.exchange.waits.total == 2)
    ending = asyncio.ensure_future(daemon.stop())
    assert (await refused(stream))[:2] == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
    assert dict(await stream.trailing_metadata())["last-event-id"] == "1"
    assert (await held).generation == 1
    assert (await watch.read()).status == NOT_SERVING
    async with asyncio.timeout(3):  # nobody who only watches is waited for
        await ending


async def test_health_and_reflection_need_no_token(place: Place) -> None:
    health = health_pb2_grpc.HealthStub(place.channel)
    for service in ("", SERVICE.full_name):
        assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(place.channel)
    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE.full_name),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
    ]
    listing, file, other = [answer async for answer in stub.ServerReflectionInfo(iter(questions))]
    names = {service.name for service in listing.list_services_response.service}
    assert names == {SERVICE.full_name, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert any(b"if_generation_match" in data for data in file.file_descriptor_response.file_descriptor_proto)
    assert other.file_descriptor_response.file_descriptor_proto


async def test_a_start_that_fails_leaves_no_port_behind(stack: AsyncExitStack, tmp_path: Path) -> None:
    daemon = await start(stack, store=f"file:{tmp_path}/data")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(StoreLocked):
        await start(stack, store=f"file:{tmp_path}/data", grpc=address)
    assert daemon.grpc_address != (await start(stack, grpc=address)).grpc_address == address


async def test_an_address_that_is_taken_is_told_at_the_start(place: Place, stack: AsyncExitStack) -> None:
    with pytest.raises(BadSetting, match="in use"):
        await start(stack, grpc=place.daemon.grpc_address)
    for wrong in ("8421", "127.0.0.1:x"):
        with pytest.raises(BadSetting, match="HOST:PORT"):
            await start(stack, grpc=wrong)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_beyond_this_machine_without_tls_is_refused(address: str) -> None:
    with pytest.raises(BadSetting, match="--insecure") as told:
        Daemon(Settings(store="memory:", grpc=address), Realm.throwaway(), OPERATOR_TOKEN)
    assert told.value.details["name"] == "--grpc"
    Daemon(Settings(store="memory:", grpc=address, insecure=True), Realm.throwaway(), OPERATOR_TOKEN)


async def test_with_a_certificate_it_speaks_tls(stack: AsyncExitStack, certified: tuple[Path, Path]) -> None:
    cert, key = certified
    daemon = await start(stack, tls_cert=cert, tls_key=key)
    trusting = grpc.ssl_channel_credentials(cert.read_bytes())
    async with grpc.aio.secure_channel(daemon.grpc_address, trusting) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
    async with grpc.aio.insecure_channel(daemon.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


async def test_it_begins_anew_with_the_certificate_that_it_began_with(
    stack: AsyncExitStack, certified: tuple[Path, Path]
) -> None:
    """Whatever has become of the files: a daemon may have lost the right to read them, and a renewal is half done."""
    cert, key = certified
    daemon = await start(stack, tls_cert=cert, tls_key=key)
    trusting = grpc.ssl_channel_credentials(cert.read_bytes())
    tls = ssl.create_default_context(cafile=str(cert))
    tls.set_alpn_protocols(["h2"])
    cert.unlink()
    key.unlink()
    async with asyncio.timeout(20), grpc.aio.secure_channel(daemon.grpc_address, trusting) as channel:
        async with by_hand(daemon, b"/\xff\xfe", tls) as reader:
            while await reader.read(1 << 16):
                pass
        asked = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked, wait_for_ready=True)
        assert answer.status == SERVING


def test_without_its_packages_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "covenant.serve.a2a.rpc")
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(BadSetting, match=r"covenant-exchange\[grpc\]"):
        Daemon(Settings(store="memory:", grpc="127.0.0.1:0"), Realm.throwaway(), OPERATOR_TOKEN)


async def test_a_question_ends_a_blocking_send(place: Place) -> None:
    message = {"message_id": "m-1", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
    sending = asyncio.ensure_future(_wait(place.ours.call("SendMessage", message=message)))
    delivery = await place.lease()
    await place.work(c.UpdateTask(None, delivery.lease_id, says("which colour?"), Asks.INPUT))
    assert (await sending).task.status.state == pb.TASK_STATE_INPUT_REQUIRED
