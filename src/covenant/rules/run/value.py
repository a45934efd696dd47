"""What a run keeps as JSON: a state, a memo, the content of an entry, the value of a signal."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from covenant.model.error import Malformed, TooLarge
from covenant.model.limits import Limits
from covenant.model.run import NOTHING
from covenant.rules.envelope import check_json

_WRAPPING_BYTES: Final = 64  # around a value that is remembered: what it is


def check_value(value: Raw, field: str, limits: Limits, *, is_wrapped: bool = False) -> Raw:
    """JSON as we keep it, of a size that we keep. What is remembered may have such a value in it."""
    if value is NOTHING:
        return value
    if type(value) is not Raw:
        raise Malformed(f"{field} is JSON", field=field)
    size, limit = len(memoryview(value)), limits.content_bytes_max + is_wrapped * _WRAPPING_BYTES
    if size > limit:
        raise TooLarge(f"{field} has {size} bytes", field=field, size=size, limit=limit)
    try:
        body = bytes(value)
        decoded = msgspec.json.decode(body)
        if body.count(b"[") + body.count(b"{") > limits.content_depth_max:  # else it cannot be too deep
            check_json(decoded, limits, int(is_wrapped))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise Malformed(f"{field}: {wrong}", field=field) from None
    return Raw(body)
