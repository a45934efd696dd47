"""What a task or a result carries: the content blocks of MCP, and `json`.

A block is tagged by `type`. Unknown members are ignored; an unknown type is malformed.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct, field


class Text(Struct, frozen=True, tag="text", tag_field="type", omit_defaults=True, gc=False):
    text: str
    annotations: dict[str, Any] | None = None


class Json(Struct, frozen=True, tag="json", tag_field="type", gc=False):
    value: Any


class Image(Struct, frozen=True, tag="image", tag_field="type", omit_defaults=True, gc=False):
    data: str
    mime_type: str = field(name="mimeType")
    annotations: dict[str, Any] | None = None


class Audio(Struct, frozen=True, tag="audio", tag_field="type", omit_defaults=True, gc=False):
    data: str
    mime_type: str = field(name="mimeType")
    annotations: dict[str, Any] | None = None


class ResourceContents(Struct, frozen=True, omit_defaults=True, gc=False):
    """The embedded resource: `text` or `blob` (base64)."""

    uri: str
    mime_type: str | None = field(default=None, name="mimeType")
    text: str | None = None
    blob: str | None = None


class Resource(Struct, frozen=True, tag="resource", tag_field="type", omit_defaults=True, gc=False):
    resource: ResourceContents
    annotations: dict[str, Any] | None = None


class ResourceLink(Struct, frozen=True, tag="resource_link", tag_field="type", omit_defaults=True, gc=False):
    uri: str
    name: str
    title: str | None = None
    description: str | None = None
    mime_type: str | None = field(default=None, name="mimeType")
    size: int | None = None
    annotations: dict[str, Any] | None = None


Content: TypeAlias = Text | Json | Image | Audio | Resource | ResourceLink
