"""Values between an agent's types and JSON.

What msgspec takes goes as it is: plain values, dataclasses, Structs, enums. A model that brings `model_dump` and
`model_validate` of its own (pydantic) is asked for them; it is no dependency of ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from covenant.model.content import Content, Json, Text
from covenant.model.message import Message
from covenant.model.task import Result, Task
from covenant.rules.dialog import text_of


def plain(value: Any) -> Any:
    """JSON as Python has it."""
    return msgspec.to_builtins(value, enc_hook=_dump)


def typed(value: Any, kind: Any) -> Any:
    """The value as the type that somebody declared; without one, as it is."""
    if kind is None or kind is Any:
        return value
    return msgspec.convert(value, kind, strict=False, dec_hook=_load)


def raw(value: Any) -> Raw:
    encoded = msgspec.json.encode(value, enc_hook=_dump)
    if b"null" in encoded:
        _check_finite(plain(value))
    return Raw(encoded)


def _check_finite(value: Any) -> None:
    """JSON has no number for these, and null would be another value."""
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{value} has no JSON form")
    if isinstance(value, (dict, list)):
        for member in value.values() if isinstance(value, dict) else value:
            _check_finite(member)


def unraw(value: Raw) -> Any:
    return msgspec.json.decode(value)


def _dump(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise NotImplementedError(f"{type(value).__name__} has no JSON form")
    return dump(mode="json")


def _load(kind: type, value: Any) -> Any:
    validate = getattr(kind, "model_validate", None)
    if validate is None:
        raise NotImplementedError(f"{kind.__name__} cannot be made of JSON")
    return validate(value)


def fresh(value: Any) -> Any:
    """The same JSON, for somebody who may change it."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else plain(value)


def clipped(text: str, bytes_max: int) -> str:
    """What went wrong, as far as it can be kept."""
    return text.encode(errors="replace")[:bytes_max].decode(errors="ignore")


def blocks_of(value: Any) -> tuple[Content, ...]:
    """A result as content: text is text, nothing is nothing, all else is JSON."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (Text(value),)
    if isinstance(value, Content):
        return (value,)
    return (Json(plain(value)),)


def value_of(result: Result) -> Any:
    """Its content; or, where a message is the whole answer, what that says."""
    if result.message is not None and not result.content:
        return _said_in(result.message)
    return value_in(result.content)


def value_in(content: Sequence[Content]) -> Any:
    """One block is its value; several are a list."""
    values = [_block_value(block) for block in content]
    return None if not values else values[0] if len(values) == 1 else values


def _block_value(block: Content) -> Any:
    if isinstance(block, Json):
        return fresh(block.value)
    return block.text if isinstance(block, Text) else msgspec.json.decode(msgspec.json.encode(block))


def input_of(task: Task) -> Any:
    """What an agent is called with: JSON that was sent, data of a message, or else the text."""
    for block in task.content:
        if isinstance(block, Json):
            return block.value
    return task.intent_text if task.message is None else _said_in(task.message)


def _said_in(message: Message) -> Any:
    """Its data, or else its text."""
    for part in message.parts:
        if part.data is not UNSET:
            return part.data
    return text_of(message)


def content_of(message: Message) -> Any:
    """A message as the content of an entry."""
    if all(part.text is not None for part in message.parts):
        return {"text": text_of(message)}
    return {"text": text_of(message), "parts": plain(message.parts)}
