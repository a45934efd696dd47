"""A task as the A2A protocol shows it: the protocol's names, in its JSON form.

A generation is a 64-bit integer, which that form writes as a string.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from covenant.model.message import Artifact, Message

GENERATION_MAX: Final = 2**63 - 1
RESTARTED: Final = "covenant/restarted"  # in the metadata of a snapshot: what was missed is no longer known


class State(StrEnum):
    SUBMITTED = "TASK_STATE_SUBMITTED"
    WORKING = "TASK_STATE_WORKING"
    COMPLETED = "TASK_STATE_COMPLETED"
    FAILED = "TASK_STATE_FAILED"
    CANCELED = "TASK_STATE_CANCELED"
    INPUT_REQUIRED = "TASK_STATE_INPUT_REQUIRED"
    REJECTED = "TASK_STATE_REJECTED"
    AUTH_REQUIRED = "TASK_STATE_AUTH_REQUIRED"

    @property
    def is_terminal(self) -> bool:
        return self in (State.COMPLETED, State.FAILED, State.CANCELED, State.REJECTED)

    @property
    def is_interrupted(self) -> bool:
        return self in (State.INPUT_REQUIRED, State.AUTH_REQUIRED)


class Status(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    state: State
    timestamp: str
    message: Message | None = None


class TaskShown(Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True, gc=False):
    id: str
    context_id: str
    status: Status
    artifacts: tuple[Artifact, ...] = ()
    history: tuple[Message, ...] = ()
    metadata: dict[str, Any] | None = None
    generation: str


class StatusUpdate(Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True, gc=False):
    task_id: str
    context_id: str
    status: Status
    generation: str


class ArtifactUpdate(Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True, gc=False):
    task_id: str
    context_id: str
    artifact: Artifact
    append: bool = False
    last_chunk: bool = False
    generation: str


class StreamResponse(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """Exactly one of these. What a stream brings, and what a webhook gets."""

    task: TaskShown | None = None
    message: Message | None = None
    status_update: StatusUpdate | None = None
    artifact_update: ArtifactUpdate | None = None


class Update(Struct, frozen=True, gc=False):
    """One mutation of a task, with the generation that it led to."""

    generation: int
    response: StreamResponse
    ends: bool = False  # nothing comes after it
