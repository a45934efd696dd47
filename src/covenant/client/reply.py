"""What is said to a daemon, and what it says: the reply that was asked for, or its refusal as the error that it is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import msgspec

from covenant.model.error import CovenantError, Internal, Malformed, Unreachable

_encoder: Final = msgspec.json.Encoder()
_any: Final = msgspec.json.Decoder(dict[str, Any])
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(value: Any) -> bytes:
    """What cannot be said in JSON is refused here, as the daemon would."""
    try:
        return _encoder.encode(value)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError) as wrong:
        raise Malformed(f"this does not go over the wire: {wrong}", field="request") from None


def _subclasses(kind: type[CovenantError]) -> Iterator[type[CovenantError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _subclasses(below)


@cache
def _by_code() -> dict[str, type[CovenantError]]:
    """Those that a daemon speaks of; one of some surface's own, which this program may have loaded too, is none."""
    kinds = _subclasses(CovenantError)
    return {kind.code: kind for kind in kinds if kind.__module__ == CovenantError.__module__}


def refusal_of(code: str, message: str, details: dict[str, Any]) -> CovenantError:
    kind = _by_code().get(code, Internal)
    return kind(message, **details)


_decoders: Final[dict[type[Any], msgspec.json.Decoder[Any]]] = {}


def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return decoder


def read_reply(data: bytes, kind: type[Any]) -> Any:
    """Raises the refusal, if it is one."""
    try:
        return _decoder(kind).decode(data)
    except UNREADABLE as other:
        try:
            found = _any.decode(data)
        except UNREADABLE:
            raise Unreachable(f"what answers there is no Covenant: {data[:80]!r}", outcome="unknown") from None
        if found.pop("kind", None) != "error":
            raise Unreachable(f"an answer that does not read: {other}", outcome="unknown") from None
        raise _refusal_in(found) from None


def read_refusal(data: bytes) -> CovenantError:
    """Return the refusal that a daemon sent before it closed the connection."""
    found: dict[str, Any] = _any.decode(data)
    found.pop("kind", None)
    return _refusal_in(found)


def _refusal_in(found: dict[str, Any]) -> CovenantError:
    found.pop("id", None)
    code, message = found.pop("code", "internal"), found.pop("message", "")
    return refusal_of(str(code), str(message), found)
