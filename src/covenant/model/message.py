"""What agents say to each other in the A2A protocol: messages, artifacts, and the parts that both are made of.

Names are the protocol's, in its JSON form. A worker gets the message of its task as the client sent it.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

Role: TypeAlias = Literal["ROLE_USER", "ROLE_AGENT"]


class Part(Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """Exactly one of text, raw (base64), url and data."""

    text: str | None = None
    raw: str | None = None
    url: str | None = None
    data: Any | UnsetType = UNSET
    metadata: dict[str, Any] | None = None
    filename: str | None = None
    media_type: str | None = None


class Message(Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True, gc=False):
    message_id: str
    role: Role
    parts: tuple[Part, ...]
    context_id: str | None = None
    task_id: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()
    reference_task_ids: tuple[str, ...] = ()


class Artifact(Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True, gc=False):
    artifact_id: str
    parts: tuple[Part, ...]
    name: str | None = None
    description: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()


def agent_says(message_id: str, text: str) -> Message:
    return Message(message_id=message_id, role="ROLE_AGENT", parts=(Part(text=text),))
