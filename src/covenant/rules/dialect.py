"""What the protocol shows in the words of 1.0: the same, without generations, which came after it."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET, structs

from covenant.model.protocol import StreamResponse, TaskShown

PLAIN: Final = "1.0"
VERSIONS: Final = (PLAIN, "1.1")


def plain_task(task: TaskShown) -> TaskShown:
    return structs.replace(task, generation=UNSET)


def plain_event(event: StreamResponse) -> StreamResponse:
    if event.task is not None:
        return StreamResponse(task=plain_task(event.task))
    if event.status_update is not None:
        return StreamResponse(status_update=structs.replace(event.status_update, generation=UNSET))
    if event.artifact_update is not None:
        return StreamResponse(artifact_update=structs.replace(event.artifact_update, generation=UNSET))
    return event
