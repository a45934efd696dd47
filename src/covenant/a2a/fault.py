"""The errors of the A2A protocol: one table for its three bindings.

What the exchange refuses has a code of its own; this says how the protocol calls it. What a caller may not do looks to
it like what is not there.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from covenant.model.error import CovenantError, GenerationMismatch, InvalidInput

DOMAIN: Final = "a2a-protocol.org"
_ERROR_INFO: Final = "type.googleapis.com/google.rpc.ErrorInfo"
_TEXT_BYTES_MAX: Final = 512  # of what an error tells: it repeats what a caller sent, and trailers of gRPC are short
_BAD_REQUEST: Final = "type.googleapis.com/google.rpc.BadRequest"


class Kind(Struct, frozen=True):
    """How one error looks in each binding."""

    name: str
    jsonrpc: int
    grpc: str
    http: int
    reason: str


TASK_NOT_FOUND: Final = Kind("TaskNotFoundError", -32001, "NOT_FOUND", 404, "TASK_NOT_FOUND")
NOT_CANCELABLE: Final = Kind("TaskNotCancelableError", -32002, "FAILED_PRECONDITION", 400, "TASK_NOT_CANCELABLE")
NO_PUSH: Final = Kind(
    "PushNotificationNotSupportedError", -32003, "FAILED_PRECONDITION", 400, "PUSH_NOTIFICATION_NOT_SUPPORTED"
)
UNSUPPORTED: Final = Kind("UnsupportedOperationError", -32004, "FAILED_PRECONDITION", 400, "UNSUPPORTED_OPERATION")
CONTENT_TYPE: Final = Kind(
    "ContentTypeNotSupportedError", -32005, "INVALID_ARGUMENT", 400, "CONTENT_TYPE_NOT_SUPPORTED"
)
MEDIA_TYPE: Final = Kind(  # of the request itself, not of a part: for that, HTTP has a status (RFC 9110, 15.5.16)
    CONTENT_TYPE.name, CONTENT_TYPE.jsonrpc, CONTENT_TYPE.grpc, 415, CONTENT_TYPE.reason
)
BAD_AGENT: Final = Kind("InvalidAgentResponseError", -32006, "INTERNAL", 500, "INVALID_AGENT_RESPONSE")
NO_EXTENDED_CARD: Final = Kind(
    "ExtendedAgentCardNotConfiguredError", -32007, "FAILED_PRECONDITION", 400, "EXTENDED_AGENT_CARD_NOT_CONFIGURED"
)
EXTENSION_REQUIRED: Final = Kind(
    "ExtensionSupportRequiredError", -32008, "FAILED_PRECONDITION", 400, "EXTENSION_SUPPORT_REQUIRED"
)
VERSION: Final = Kind("VersionNotSupportedError", -32009, "FAILED_PRECONDITION", 400, "VERSION_NOT_SUPPORTED")
GENERATION: Final = Kind("TaskGenerationMismatchError", -32010, "ABORTED", 409, "TASK_GENERATION_MISMATCH")
PARSE: Final = Kind("JSONParseError", -32700, "INVALID_ARGUMENT", 400, "PARSE_ERROR")
INVALID_REQUEST: Final = Kind("InvalidRequestError", -32600, "INVALID_ARGUMENT", 400, "INVALID_REQUEST")
NO_METHOD: Final = Kind("MethodNotFoundError", -32601, "UNIMPLEMENTED", 404, "METHOD_NOT_FOUND")
WRONG_METHOD: Final = Kind("MethodNotAllowedError", -32601, "UNIMPLEMENTED", 405, "METHOD_NOT_ALLOWED")
INVALID_PARAMS: Final = Kind("InvalidParamsError", -32602, "INVALID_ARGUMENT", 400, "INVALID_PARAMS")
INTERNAL: Final = Kind("InternalError", -32603, "INTERNAL", 500, "INTERNAL_ERROR")
UNAUTHENTICATED: Final = Kind("UnauthenticatedError", -32603, "UNAUTHENTICATED", 401, "UNAUTHENTICATED")
FORBIDDEN: Final = Kind("PermissionDeniedError", -32603, "PERMISSION_DENIED", 403, "PERMISSION_DENIED")
BUSY: Final = Kind("TooManyRequestsError", -32603, "RESOURCE_EXHAUSTED", 429, "TOO_MANY_REQUESTS")
AWAY: Final = Kind("UnavailableError", -32603, "UNAVAILABLE", 503, "UNAVAILABLE")
CONFLICT: Final = Kind("ConflictError", -32602, "ALREADY_EXISTS", 409, "CONFLICT")
TOO_LARGE: Final = Kind("RequestTooLargeError", -32602, "INVALID_ARGUMENT", 413, "REQUEST_TOO_LARGE")

_BY_CODE: Final[dict[str, Kind]] = {
    "unknown_route": NO_METHOD,
    "wrong_method": WRONG_METHOD,
    "unknown_task": TASK_NOT_FOUND,
    "unknown_push": TASK_NOT_FOUND,
    "unknown_lease": TASK_NOT_FOUND,
    "unknown_peer": TASK_NOT_FOUND,
    "task_terminal": UNSUPPORTED,
    "generation_mismatch": GENERATION,
    "context_mismatch": INVALID_PARAMS,
    "task_conflict": CONFLICT,
    "idempotency_conflict": CONFLICT,
    "too_large": TOO_LARGE,
    "unauthenticated": UNAUTHENTICATED,
    "not_permitted": FORBIDDEN,
    "missing_capability": FORBIDDEN,
    "scope_mismatch": FORBIDDEN,
    "recipient_refused": FORBIDDEN,
    "sender_mismatch": FORBIDDEN,
    "rate_limited": BUSY,
    "queue_full": BUSY,
    "too_many_waiters": BUSY,
    "draining": AWAY,
    "store_unavailable": AWAY,
    "store_closed": AWAY,
    "clock_astray": AWAY,
    "store_full": AWAY,
}
_MISMATCH: Final = {"taskId": "task_id", "expectedGeneration": "expected", "currentGeneration": "current"}


class Fault(CovenantError):
    """An error in the protocol's own terms."""

    code = "a2a_fault"

    def __init__(self, kind: Kind, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.kind = kind


def kind_of(error: CovenantError) -> Kind:
    if isinstance(error, Fault):
        return error.kind
    known = _BY_CODE.get(error.code)
    if known is not None:
        return known
    return INVALID_PARAMS if isinstance(error, InvalidInput) else INTERNAL


def message_of(error: CovenantError) -> str:
    return _clipped(error.message)


def details_of(error: CovenantError) -> list[dict[str, Any]]:
    """ErrorInfo, and for input that is wrong, where."""
    kind = kind_of(error)
    metadata = _metadata_of(error)
    found: list[dict[str, Any]] = [
        {"@type": _ERROR_INFO, "reason": kind.reason, "domain": DOMAIN, "metadata": metadata}
    ]
    if kind in (INVALID_PARAMS, TOO_LARGE):
        violation = {"field": _clipped(str(error.details.get("field", ""))), "description": message_of(error)}
        found.append({"@type": _BAD_REQUEST, "fieldViolations": [violation]})
    return found


def _metadata_of(error: CovenantError) -> dict[str, str]:
    """Return what ErrorInfo says beside the reason, under names in the style of the specification's examples."""
    if isinstance(error, GenerationMismatch):  # as the example of it has it, and nothing else
        return {name: str(error.details[detail]) for name, detail in _MISMATCH.items()}
    told = {_camel(name): _clipped(_text(value)) for name, value in error.details.items() if value is not None}
    return told if isinstance(error, Fault) else {**told, "code": error.code}


def _camel(name: str) -> str:
    first, *more = name.split("_")
    return first + "".join(word.capitalize() for word in more)


def _text(value: Any) -> str:
    """Return it as JSON has it where Python would write it in its own way."""
    return msgspec.json.encode(value).decode() if isinstance(value, bool | list | tuple | dict) else str(value)


def _clipped(text: str) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= _TEXT_BYTES_MAX else data[:_TEXT_BYTES_MAX].decode(errors="ignore") + "…"
