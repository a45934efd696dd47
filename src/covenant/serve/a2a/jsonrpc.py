"""The JSON-RPC binding: one call, one answer, or a stream of answers under the same id.

A call is read straight into its request, and its answer written straight from the reply. Batches and notifications are
refused: the protocol has neither.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from covenant.a2a.fault import INVALID_REQUEST, NO_METHOD, PARSE, Fault, details_of, kind_of, message_of
from covenant.a2a.names import has_proto_names
from covenant.model.error import CovenantError
from covenant.serve.a2a.calls import CALLS, Call, request_from
from covenant.serve.a2a.misread import misread

Id: TypeAlias = str | int | float | None

TYPES: Final = frozenset(("application/json",))
TOLD_BY_STATUS: Final = frozenset((401, 413, 429, 503))  # what a proxy or a client without JSON-RPC should see too
_encoder: Final = msgspec.json.Encoder()
_NOTHING: Final = Raw(b"{}")


class _Request(Struct, gc=False):
    jsonrpc: Literal["2.0"]
    method: str
    id: Id | UnsetType = UNSET
    params: Raw = _NOTHING


class _Named(Struct, gc=False):
    """What is left of a request that is none: who asked."""

    id: Any = None


class _Answer(Struct, gc=False):
    jsonrpc: str
    id: Id
    result: Any


class _Error(Struct, gc=False):
    code: int
    message: str
    data: list[dict[str, Any]]


class _Failure(Struct, gc=False):
    jsonrpc: str
    id: Id
    error: _Error


def _call_of(method: str, call: Call) -> Any:
    """A call of this method, with the request in its place."""
    members = [("jsonrpc", Literal["2.0"]), ("id", Id), ("params", call.request)]
    return msgspec.defstruct(f"_{method}", members, tag_field="method", tag=method, gc=False)


_usual: Final = msgspec.json.Decoder(reduce(or_, [_call_of(method, call) for method, call in CALLS.items()]))
_requests: Final = msgspec.json.Decoder(_Request)
_named: Final = msgspec.json.Decoder(_Named)


def read_usual(body: bytes) -> tuple[Id, Call, Any] | None:
    """A call that is written as usual, with its request; None for any other, which may be a call all the same."""
    if not has_proto_names(body):
        try:
            call = _usual.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return call.id, CALLS[call.__struct_config__.tag], call.params
    return None


def read(body: bytes) -> tuple[Id, Call, Raw]:
    try:
        request = _requests.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise _no_request(body, problem) from None
    if request.id is UNSET:
        raise Fault(INVALID_REQUEST, "a call has an id")
    call = CALLS.get(request.method)
    if call is None:
        raise Fault(NO_METHOD, f"there is no method {request.method[:100]}")
    return request.id, call, request.params


def request_of(call: Call, params: Raw) -> Any:
    """What is no JSON after all is found only when it is looked into."""
    try:
        return request_from(call, params)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise misread(problem) from None


def _no_request(body: bytes, problem: Exception) -> Fault:
    """The first thing that is wrong may be a type before it is the syntax; JSON is what reads to its end."""
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as no_json:
        return Fault(PARSE, f"this is not JSON: {no_json}")
    return Fault(INVALID_REQUEST, f"this is no JSON-RPC 2.0 call: {problem}")


def id_of(body: bytes) -> Id:
    """As far as it can be told."""
    try:
        found = _named.decode(body).id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, (str, int, float)) and not isinstance(found, bool) else None


def answered(call_id: Id, result: Any) -> bytes:
    return _encoder.encode(_Answer("2.0", call_id, result))


def event(call_id: Id, response: Any) -> _Answer:
    return _Answer("2.0", call_id, response)


def refused(call_id: Id, refusal: CovenantError) -> tuple[int, bytes]:
    kind = kind_of(refusal)
    status = kind.http if kind.http in TOLD_BY_STATUS else 200
    failure = _Failure("2.0", call_id, _Error(kind.jsonrpc, message_of(refusal), details_of(refusal)))
    return status, _encoder.encode(failure)
