"""Which versions of the A2A protocol are spoken, and what it shows in the words of 1.0: the same, without generations,
which came after it."""

from __future__ import annotations

import re
from typing import Final

from msgspec import UNSET, structs

from covenant.model.protocol import StreamResponse, TaskShown

PLAIN: Final = "1.0"
VERSIONS: Final = (PLAIN, "1.1")
_UNSAID: Final = "0.3"  # what a request without a version speaks, as the protocol rules
_VERSION: Final = re.compile(r"([0-9]{1,3}\.[0-9]{1,3})(?:\.[0-9]{1,9})?")


def spoken(said: str | None) -> str | None:
    """Return the version in which a request is read and answered, or None if it is not spoken here.

    Only Major.Minor counts: the specification wants patch numbers ignored where versions are negotiated.
    """
    found = _VERSION.fullmatch(said or _UNSAID)
    return found[1] if found is not None and found[1] in VERSIONS else None


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
