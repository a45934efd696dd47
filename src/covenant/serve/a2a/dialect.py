"""What the versions of the protocol differ in, as far as it is seen here.

Generations came after 1.0, and there are clients of 1.0 that check every answer against its schema. So an answer shows
them to whoever speaks of them: by the version, by the extension, or by asking for something behind a generation.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, structs

from covenant.a2a import wire
from covenant.model.protocol import StreamResponse, TaskShown
from covenant.serve.a2a.directory import GENERATION
from covenant.serve.a2a.operations import CURSOR
from covenant.serve.a2a.parameters import Parameters

_PLAIN: Final = "1.0"


def knows_generations(said: Parameters, request: Any) -> bool:
    if said.version != _PLAIN or GENERATION in said.extensions or said.after is not None:
        return True
    if isinstance(request, wire.SendMessage):
        return request.configuration.if_generation_match is not None
    if isinstance(request, wire.GetTask):
        return request.current_generation is not None
    return isinstance(request, wire.SubscribeToTask) and request.metadata is not None and CURSOR in request.metadata


def plain(result: Any) -> Any:
    """The same answer in the words of 1.0."""
    if isinstance(result, TaskShown):
        return structs.replace(result, generation=UNSET)
    if isinstance(result, wire.SendReply):
        return result if result.task is None else wire.SendReply(task=plain(result.task))
    if isinstance(result, wire.TaskList):
        return structs.replace(result, tasks=[plain(task) for task in result.tasks])
    if isinstance(result, StreamResponse):
        return _plain_event(result)
    return result


def _plain_event(event: StreamResponse) -> StreamResponse:
    if event.task is not None:
        return StreamResponse(task=plain(event.task))
    if event.status_update is not None:
        return StreamResponse(status_update=structs.replace(event.status_update, generation=UNSET))
    if event.artifact_update is not None:
        return StreamResponse(artifact_update=structs.replace(event.artifact_update, generation=UNSET))
    return event
