"""What goes over the wire of the A2A protocol: the requests of its eleven operations, and their answers.

Names are those of the protocol's JSON form. Unknown members are ignored. A 64-bit number comes as a string or as a
number, and what it is worth is for `names.whole` to say; a required text that is empty is missing, as protobuf has it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct, field

from covenant.model.message import Message
from covenant.model.protocol import State, TaskShown
from covenant.model.push import Authentication

Int32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64: TypeAlias = int | float | str
Required: TypeAlias = Annotated[str, Meta(min_length=1)]
TaskState: TypeAlias = Annotated[str, Meta(extra={"names": tuple(State)})]  # by their numbers, from 1


class _Wire(Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True, gc=False):
    pass


class PushSettings(_Wire, frozen=True):
    """TaskPushNotificationConfig. `task_id` is left out where the task does not exist yet."""

    url: Required
    id: str | None = None
    task_id: str | None = None
    tenant: str | None = None
    token: str | None = None
    authentication: Authentication | None = None
    protocol_version: str | None = None  # in whose words it is told; else in those of who set it


class Configuration(_Wire, frozen=True):
    accepted_output_modes: list[str] = field(default_factory=list)
    task_push_notification_config: PushSettings | None = None
    history_length: Int32 | None = None
    return_immediately: bool = False
    if_generation_match: Int64 | None = None


class SendMessage(_Wire, frozen=True):
    message: Message
    tenant: str | None = None
    configuration: Configuration = Configuration()
    metadata: dict[str, Any] | None = None


class GetTask(_Wire, frozen=True):
    id: Required
    tenant: str | None = None
    history_length: Int32 | None = None
    current_generation: Int64 | None = None


class ListTasks(_Wire, frozen=True):
    tenant: str | None = None
    context_id: str | None = None
    status: TaskState | None = None
    page_size: Int32 | None = None
    page_token: str | None = None
    history_length: Int32 | None = None
    status_timestamp_after: str | None = None
    include_artifacts: bool = False


class CancelTask(_Wire, frozen=True):
    id: Required
    tenant: str | None = None
    metadata: dict[str, Any] | None = None


class SubscribeToTask(_Wire, frozen=True):
    id: Required
    tenant: str | None = None
    metadata: dict[str, Any] | None = None


class GetPush(_Wire, frozen=True):
    task_id: Required
    id: Required
    tenant: str | None = None


class ListPushes(_Wire, frozen=True):
    task_id: Required
    tenant: str | None = None
    page_size: Int32 | None = None
    page_token: str | None = None


class DeletePush(_Wire, frozen=True):
    task_id: Required
    id: Required
    tenant: str | None = None


class GetExtendedCard(_Wire, frozen=True):
    tenant: str | None = None


class SendReply(_Wire, frozen=True):
    """One of the two."""

    task: TaskShown | None = None
    message: Message | None = None


class TaskList(Struct, frozen=True, rename="camel", kw_only=True, gc=False):
    """Every member is written, also where it says nothing: the protocol asks for it."""

    tasks: list[TaskShown]
    next_page_token: str
    page_size: int
    total_size: int


class PushList(_Wire, frozen=True):
    configs: list[PushSettings]
    next_page_token: str = ""
