"""What every binding of the A2A protocol carries: JSON values that protobuf has room for, and bytes in one spelling.

A value that one binding takes and another cannot show would make the task unreadable there, and every list that it
is in. So what is not portable is refused where it comes in by the protocol, and shown as text where it came by the
mailbox, which takes more.
"""

from __future__ import annotations

import binascii
from typing import Any, Final

_MESSAGES_MAX: Final = 100  # in one another, for a reader of protobuf
_MESSAGES_AROUND: Final = 6  # a value, in a part, in a message, in a status, in a task, in an answer
_OBJECT: Final = 3  # what an object is in protobuf: a struct, an entry, a value
_LIST: Final = 2  # a list, a value
_NUMBER_MAX: Final = 2**1024 - 2**970  # what still rounds to a number, where all of them are doubles
_EXACT_MAX: Final = 2**53  # the integers up to here are told apart where all numbers are doubles
_STANDARD: Final = str.maketrans("-_", "+/")


def is_portable(value: Any) -> bool:
    looked_at = [(value, _MESSAGES_MAX - _MESSAGES_AROUND)]
    while looked_at:
        item, room = looked_at.pop()
        if room < 0:
            return False
        if isinstance(item, dict):
            looked_at += [(inner, room - _OBJECT) for inner in item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            looked_at += [(inner, room - _LIST) for inner in item]
        elif isinstance(item, (int, float)) and not abs(item) < _NUMBER_MAX:  # nor is infinity, nor what is no number
            return False
    return True


def alike(value: Any) -> Any:
    """The same value, however a binding tells its whole numbers: as integers, or as the doubles that protobuf has."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _EXACT_MAX else value
    if isinstance(value, dict):
        return {name: alike(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [alike(inner) for inner in value]
    return value


def canonical_base64(text: str) -> str | None:
    """The same bytes in the usual alphabet, with padding: readers of ProtoJSON take both alphabets, with or without
    it. None for what is no base64."""
    given = text.translate(_STANDARD)
    bare = given.rstrip("=")
    padded = bare + "=" * (-len(bare) % 4)
    if given not in (bare, padded):
        return None
    try:
        data = binascii.a2b_base64(padded, strict_mode=True)
    except ValueError:
        return None
    return binascii.b2a_base64(data, newline=False).decode()
