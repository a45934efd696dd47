"""What a run keeps as JSON: a state, a memo, the content of an entry, the value of a signal."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from covenant.model.error import Malformed, TooLarge
from covenant.model.limits import Limits
from covenant.model.run import NOTHING
from covenant.rules.envelope import check_json


def check_value(value: Raw, field: str, limits: Limits) -> Raw:
    """JSON as we keep it, of a size that we keep."""
    if value is NOTHING:
        return value
    if type(value) is not Raw:
        raise Malformed(f"{field} is JSON", field=field)
    size = len(memoryview(value))
    if size > limits.content_bytes_max:
        raise TooLarge(f"{field} has {size} bytes", field=field, size=size, limit=limits.content_bytes_max)
    try:
        body = bytes(value)
        decoded = msgspec.json.decode(body)
        if body.count(b"[") + body.count(b"{") > limits.content_depth_max:  # else it cannot be too deep
            check_json(decoded, limits)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise Malformed(f"{field}: {wrong}", field=field) from None
    return Raw(body)
