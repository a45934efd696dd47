"""The eleven operations by their names: what each is asked with, and which of `Operations` answers it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from covenant.a2a import wire
from covenant.a2a.names import has_proto_names, usual
from covenant.model.peer import Caller
from covenant.rules.whereabouts import Reached
from covenant.serve.a2a.directory import Directory
from covenant.serve.a2a.misread import misread
from covenant.serve.a2a.operations import Agent, Event, Operations
from covenant.serve.a2a.parameters import Parameters


class Talk(Struct, frozen=True, gc=False):
    """Who speaks with whom, and what they have agreed on."""

    caller: Caller
    agent: Agent
    name: str | None  # of the agent; None is the one at the root
    parameters: Parameters
    extensions: tuple[str, ...]
    is_plain: bool  # the answer is in the words of 1.0
    reached: Reached


class Desk(Struct, frozen=True):
    operations: Operations
    directory: Directory


class Call(Struct, frozen=True, eq=False):
    """One operation. It has an answer, or a stream of events."""

    request: type[Any]
    decoder: msgspec.json.Decoder[Any]
    answer: Callable[[Desk, Talk, Any], Coroutine[Any, Any, Any]] | None = None
    stream: Callable[[Desk, Talk, Any], AsyncGenerator[Event, None]] | None = None


def _answers(request: type[Any], answer: Callable[[Desk, Talk, Any], Coroutine[Any, Any, Any]]) -> Call:
    return Call(request, msgspec.json.Decoder(request), answer=answer)


def _streams(request: type[Any], stream: Callable[[Desk, Talk, Any], AsyncGenerator[Event, None]]) -> Call:
    return Call(request, msgspec.json.Decoder(request), stream=stream)


async def _extended_card(desk: Desk, talk: Talk, request: wire.GetExtendedCard) -> dict[str, Any]:
    return (await desk.directory.show(talk.name, extended=True, reached=talk.reached)).card


CALLS: Final[dict[str, Call]] = {
    "SendMessage": _answers(
        wire.SendMessage,
        lambda desk, talk, r: desk.operations.send_message(talk.caller, talk.agent, r, talk.parameters.key),
    ),
    "SendStreamingMessage": _streams(
        wire.SendMessage,
        lambda desk, talk, r: desk.operations.send_streaming(
            talk.caller, talk.agent, r, talk.parameters.key, talk.parameters.after
        ),
    ),
    "GetTask": _answers(wire.GetTask, lambda desk, talk, r: desk.operations.get_task(talk.caller, talk.agent, r)),
    "ListTasks": _answers(wire.ListTasks, lambda desk, talk, r: desk.operations.list_tasks(talk.caller, talk.agent, r)),
    "CancelTask": _answers(
        wire.CancelTask, lambda desk, talk, r: desk.operations.cancel_task(talk.caller, talk.agent, r)
    ),
    "SubscribeToTask": _streams(
        wire.SubscribeToTask,
        lambda desk, talk, r: desk.operations.subscribe(talk.caller, talk.agent, r, talk.parameters.after),
    ),
    "CreateTaskPushNotificationConfig": _answers(
        wire.PushSettings, lambda desk, talk, r: desk.operations.set_push(talk.caller, talk.agent, r)
    ),
    "GetTaskPushNotificationConfig": _answers(
        wire.GetPush, lambda desk, talk, r: desk.operations.get_push(talk.caller, talk.agent, r)
    ),
    "ListTaskPushNotificationConfigs": _answers(
        wire.ListPushes, lambda desk, talk, r: desk.operations.list_pushes(talk.caller, talk.agent, r)
    ),
    "DeleteTaskPushNotificationConfig": _answers(
        wire.DeletePush, lambda desk, talk, r: desk.operations.delete_push(talk.caller, talk.agent, r)
    ),
    "GetExtendedAgentCard": _answers(wire.GetExtendedCard, _extended_card),
}


def request_from(call: Call, data: bytes | Raw) -> Any:
    """Straight into the request where it is written as usual; the long way where it is not."""
    try:
        if not has_proto_names(data):
            return call.decoder.decode(data)
    except msgspec.ValidationError:
        pass
    return request_of(call, msgspec.json.decode(data))


def request_of(call: Call, members: Any, strict: bool = True) -> Any:
    try:
        return msgspec.convert(usual(call.request, members), call.request, strict=strict)
    except (msgspec.ValidationError, RecursionError) as problem:
        raise misread(problem) from None
