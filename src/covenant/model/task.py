"""The two envelopes of the wire: a task from one agent to another, and its result.

Field names and enum values are the protocol's. A program may leave out what the mailbox fills in: the task's id and
its sender. Unknown members are ignored when an envelope is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import force_setattr

from covenant.model.agent import AgentId
from covenant.model.content import Blocks, Content, read_blocks
from covenant.model.message import Message

if TYPE_CHECKING:
    from covenant.model.view import Delivery

DuplicateSafety: TypeAlias = Literal["unsafe", "idempotent"]
ResultStatus: TypeAlias = Literal["ok", "error", "partial"]


class Idempotency(Struct, frozen=True, gc=False):
    """What the sender declares about doing the task twice. Absent means `unsafe`."""

    duplicate_safety: DuplicateSafety
    key: str


class Task(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A request from one agent to another."""

    id: str = ""
    sender: AgentId | None = None
    recipient: AgentId
    intent_text: str
    task_kind: str | None = None
    parent: str | None = None
    deadline_ms: int | None = None
    idempotency: Idempotency | None = None
    content: Blocks = ()
    not_before_ms: int | None = None
    message: Message | None = None  # what an A2A client sent
    context_id: str | None = None  # the conversation that it belongs to

    def __post_init__(self) -> None:
        if type(self.content) is not tuple:  # a list is taken, a tuple is kept: an envelope does not change
            force_setattr(self, "content", read_blocks(self.content))

    @property
    def is_idempotent(self) -> bool:
        return self.idempotency is not None and self.idempotency.duplicate_safety == "idempotent"


def _no_content() -> tuple[Content, ...]:
    """A factory and not a plain default: an empty list, too, goes over the wire."""
    return ()


class Result(Struct, frozen=True, omit_defaults=True, gc=False):
    """The response to a task. `lease_id` says for which lease; `sequence` numbers a partial for a safe repeat."""

    task_id: str
    status: ResultStatus
    content: Blocks = field(default_factory=_no_content)
    error_message: str | None = None
    lease_id: str | None = None
    sequence: int | None = None
    message: Message | None = None  # what the agent says with it

    def __post_init__(self) -> None:
        if type(self.content) is not tuple:  # a list is taken, a tuple is kept: an envelope does not change
            force_setattr(self, "content", read_blocks(self.content))

    @classmethod
    def ok(cls, delivery: Delivery, content: Sequence[Content] = ()) -> Result:
        return cls(delivery.task.id, "ok", tuple(content), None, delivery.lease_id)

    @classmethod
    def error(cls, delivery: Delivery, message: str, content: Sequence[Content] = ()) -> Result:
        return cls(delivery.task.id, "error", tuple(content), message, delivery.lease_id)

    @classmethod
    def partial(cls, delivery: Delivery, content: Sequence[Content], sequence: int | None = None) -> Result:
        return cls(delivery.task.id, "partial", tuple(content), None, delivery.lease_id, sequence)
