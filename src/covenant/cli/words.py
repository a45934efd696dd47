"""How things are said to a person: times, sizes, content. What others wrote is shown, never obeyed by a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from covenant.model.content import Audio, Content, Image, Json, Resource, ResourceLink, Text
from covenant.model.span import SECOND_MS, span

_SHORT: Final = 80


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def ago(at_ms: int | None, now: int | None = None) -> str:
    """`3 min ago`, or `in 3 min` for what is still to come."""
    if at_ms is None:
        return ""
    passed = (now_ms() if now is None else now) - at_ms
    if abs(passed) < SECOND_MS:
        return "now"
    return f"{span(passed)} ago" if passed > 0 else f"in {span(-passed)}"


def clock(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000))


def failure(failed: OSError) -> str:
    """Which file, what is wrong with it, and whose it is if that is the reason."""
    told = failed.strerror or str(failed)
    if isinstance(failed, PermissionError) and isinstance(failed.filename, str):
        told += _owner(failed.filename)
    return told if failed.filename is None else f"{failed.filename}: {told}"


def _owner(path: str) -> str:
    """Of the file, or of the nearest folder above it that can be looked at."""
    for place in (Path(path), *Path(path).parents):
        try:
            return f" ({'it' if place == Path(path) else place} belongs to {place.owner()})"
        except (OSError, KeyError):
            continue
    return ""


def safe(text: str) -> str:
    """Without what a terminal would act upon: escapes are written out."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def json_text(value: Any) -> str:
    """Return the value as one line of JSON, with characters that do not print as \\uXXXX."""
    return json_escaped(msgspec.json.encode(value).decode())


def json_escaped(text: str) -> str:
    """Return the same JSON with characters that do not print as \\uXXXX.

    A line break becomes a space: within a string JSON has it escaped already, so it can only stand between values.
    """
    if text.isprintable():
        return text
    shown = (char if char.isprintable() else " " if char in "\n\r\t" else json.dumps(char)[1:-1] for char in text)
    return "".join(shown)


def brief(text: str, width: int = _SHORT) -> str:
    """The beginning, on one line."""
    line = safe(" ".join(text[: 2 * width].split()))
    return line if len(line) <= width and len(text) <= 2 * width else f"{line[: width - 1]}…"


def size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count} {unit}"
        count //= 1024
    return f"{count} GiB"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def said(content: Sequence[Content]) -> Iterator[str]:
    """The blocks of a task or a result, each as a person can read it."""
    for block in content:
        match block:
            case Text():
                yield safe(block.text)
            case Json():
                yield safe(json.dumps(block.value, indent=2, ensure_ascii=False))
            case Image() | Audio():
                yield f"[{safe(block.mime_type)}, {size(len(block.data) * 3 // 4)}]"
            case Resource():
                yield safe(block.resource.text or f"[{block.resource.uri}]")
            case ResourceLink():
                yield f"[{safe(block.name)}: {safe(block.uri)}]"
