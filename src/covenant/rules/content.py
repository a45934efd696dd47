"""Checks of content blocks that MCP demands beyond the types of their members.

The bounds are those of the MCP schema from 2025-06-18 on. MCP allows members that its schema does not name; they are
not checked.
"""

from __future__ import annotations

from typing import Any, Final

from covenant.model.content import Audio, Content, Image, Json, Resource, ResourceContents, ResourceLink
from covenant.rules.portable import canonical_base64

_AUDIENCE: Final = ("user", "assistant")
_THEMES: Final = ("light", "dark")


def check_block(block: Content) -> None:
    """Raise ValueError if MCP forbids the block; the message names the member and what it must be."""
    if block.annotations is not None and not isinstance(block, Json):
        _check_annotations(block.annotations)
    if isinstance(block, (Image, Audio)):
        _check_base64(block.data, "data")
    elif isinstance(block, Resource):
        _check_contents(block.resource)
    elif isinstance(block, ResourceLink) and block.icons is not None:
        for icon in block.icons:
            _check_icon(icon)


def _check_annotations(annotations: dict[str, Any]) -> None:
    audience = annotations.get("audience", [])
    if not isinstance(audience, list) or not all(role in _AUDIENCE for role in audience):
        raise ValueError("annotations.audience is a list of `user` and `assistant`")
    priority = annotations.get("priority", 0)
    if type(priority) not in (int, float) or not 0 <= priority <= 1:
        raise ValueError("annotations.priority is a number from 0 to 1")
    if not isinstance(annotations.get("lastModified", ""), str):
        raise ValueError("annotations.lastModified is text")


def _check_contents(contents: ResourceContents) -> None:
    if (contents.text is None) == (contents.blob is None):
        raise ValueError("a resource has either text or blob")
    if contents.blob is not None:
        _check_base64(contents.blob, "resource.blob")


def _check_icon(icon: dict[str, Any]) -> None:
    sizes = icon.get("sizes", [])
    if not isinstance(icon.get("src"), str):
        raise ValueError("an icon has a src")
    if not isinstance(icon.get("mimeType", ""), str):
        raise ValueError("icons.mimeType is text")
    if not isinstance(sizes, list) or not all(isinstance(size, str) for size in sizes):
        raise ValueError("icons.sizes is a list of texts")
    if icon.get("theme", "light") not in _THEMES:
        raise ValueError("icons.theme is `light` or `dark`")


def _check_base64(text: str, member: str) -> None:
    if canonical_base64(text) is None:
        raise ValueError(f"{member} is base64")
