"""What the versions of the protocol differ in, as far as it is seen here.

Generations came after 1.0, and there are clients of 1.0 that check every answer against its schema. So an answer shows
them to whoever speaks of them: by the version, by the extension, or by asking for something behind a generation.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from covenant.a2a import wire
from covenant.a2a.interface import GENERATION
from covenant.model.protocol import StreamResponse, TaskShown
from covenant.rules.dialect import PLAIN, plain_event, plain_task
from covenant.serve.a2a.operations import CURSOR
from covenant.serve.a2a.parameters import Parameters


def knows_generations(said: Parameters, request: Any) -> bool:
    if said.version != PLAIN or GENERATION in said.extensions or said.after is not None:
        return True
    if isinstance(request, wire.GetTask):
        return request.current_generation is not None
    if isinstance(request, wire.SendMessage) and request.configuration.if_generation_match is not None:
        return True
    resumes = isinstance(request, (wire.SendMessage, wire.SubscribeToTask)) and request.metadata is not None
    return resumes and CURSOR in request.metadata


def heard(said: Parameters, request: Any) -> Any:
    """The same request, with what it says by the way: that a webhook is told in the words of who set it."""
    if isinstance(request, wire.PushSettings):
        if request.protocol_version is None and not knows_generations(said, request):
            return structs.replace(request, protocol_version=PLAIN)
    elif isinstance(request, wire.SendMessage):
        settings = request.configuration
        hook = settings.task_push_notification_config
        if hook is not None and hook.protocol_version is None and not knows_generations(said, request):
            hook = structs.replace(hook, protocol_version=PLAIN)
            settings = structs.replace(settings, task_push_notification_config=hook)
            return structs.replace(request, configuration=settings)
    return request


def plain(result: Any) -> Any:
    """The same answer in the words of 1.0."""
    if isinstance(result, wire.SendReply):
        return result if result.task is None else wire.SendReply(task=plain_task(result.task))
    if isinstance(result, TaskShown):
        return plain_task(result)
    if isinstance(result, wire.TaskList):
        return structs.replace(result, tasks=[plain_task(task) for task in result.tasks])
    return plain_event(result) if isinstance(result, StreamResponse) else result
