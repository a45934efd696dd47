"""The HTTP+JSON binding: a request is its path, its query and its body; errors are google.rpc.Status."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from covenant.a2a.fault import INVALID_PARAMS, PARSE, Fault, details_of, kind_of, message_of
from covenant.model.error import CovenantError
from covenant.serve.a2a import calls
from covenant.serve.a2a.calls import Call
from covenant.serve.a2a.misread import misread
from covenant.serve.a2a.paths import Spot

A2A_JSON: Final = "application/a2a+json"
_PLAIN: Final = "application/json"
TYPES: Final = frozenset((_PLAIN, A2A_JSON))
_QUERY_MAX: Final = 64
_encoder: Final = msgspec.json.Encoder()
_object: Final = msgspec.json.Decoder(dict[str, Any])


def query_of(query: bytes) -> dict[str, str]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=_QUERY_MAX, errors="strict")
    except (UnicodeDecodeError, ValueError):
        raise Fault(INVALID_PARAMS, "the query does not read", field="query") from None
    members = dict(pairs)
    if len(members) != len(pairs):
        raise Fault(INVALID_PARAMS, "a parameter is given twice", field="query")
    return members


def request_of(call: Call, method: str, spot: Spot, query: dict[str, str], body: bytes) -> Any:
    """What is in the path stands above what is in the body, and a request without a body is in its query."""
    path = dict(spot.members)
    try:
        if method != "POST":
            return calls.request_of(call, _below(path, query), strict=False)
        if not spot.members:
            return calls.request_from(call, body)
        members = _object.decode(body) if body else {}
        return calls.request_of(call, _below(path, members))
    except msgspec.ValidationError as problem:
        raise misread(problem) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise Fault(PARSE, f"this is not JSON: {problem}") from None


def _below(path: dict[str, str], given: dict[str, Any]) -> dict[str, Any]:
    """The path first, too: of a member that is there in both of its spellings the first counts."""
    return {**path, **given, **path}


def answered(result: Any) -> bytes:
    return b"{}" if result is None else _encoder.encode(result)


def refused(refusal: CovenantError) -> tuple[int, bytes]:
    kind = kind_of(refusal)
    error = {
        "code": kind.http,
        "status": kind.grpc,
        "message": message_of(refusal),
        "details": details_of(refusal),
    }
    return kind.http, _encoder.encode({"error": error})


def type_of(content_type: str, accept: str) -> bytes:
    """A client is answered in the media type that it uses itself; who uses none, in the protocol's."""
    is_plain = content_type == _PLAIN or (not content_type and _PLAIN in accept and A2A_JSON not in accept)
    return _PLAIN.encode() if is_plain else A2A_JSON.encode()


def error_type_of(content_type: str, accept: str) -> bytes:
    """An error is JSON that is not the protocol's own, unless the client wants nothing else."""
    return (A2A_JSON if A2A_JSON in (content_type, accept) else _PLAIN).encode()
