"""Versions of the A2A protocol: negotiation, and the form of a reply in 1.0, which has no generations."""

from __future__ import annotations

import re
from typing import Final

from msgspec import UNSET, structs

from covenant.model.protocol import StreamResponse, TaskShown

PLAIN: Final = "1.0"
VERSIONS: Final = (PLAIN, "1.1")
_DEFAULT: Final = "0.3"  # of a request that names no version, by the specification
_VERSION: Final = re.compile(r"([0-9]{1,3}\.[0-9]{1,3})(?:\.[0-9]{1,9})?")


def negotiated(named: str | None) -> str | None:
    """Return the version in which a request is read and answered, or None if it is not one of `VERSIONS`.

    Only Major.Minor counts: the specification has patch numbers ignored in negotiation.
    """
    found = _VERSION.fullmatch(named or _DEFAULT)
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
