"""What msgspec says of a request that does not read, as the protocol tells it: with the member that it is about."""

from __future__ import annotations

from typing import Final

from covenant.a2a.fault import INVALID_PARAMS, Fault

_MISSING: Final = "Object missing required field `"
_AT: Final = " - at `$"


def misread(problem: Exception) -> Fault:
    text = str(problem) or "this does not read"
    told, _, path = text.partition(_AT)
    missing = told.removeprefix(_MISSING).rstrip("`") if told.startswith(_MISSING) else ""
    field = ".".join(step for step in (path.strip("`").lstrip("."), missing) if step)
    return Fault(INVALID_PARAMS, text, field=field)
