"""A server's refusal, read back into the one table of errors."""

from __future__ import annotations

from typing import Any, Final

from covenant.a2a import fault
from covenant.a2a.fault import Fault, Kind

_KINDS: Final = tuple(kind for kind in vars(fault).values() if isinstance(kind, Kind))
_BY_REASON: Final = {kind.reason: kind for kind in _KINDS}
_BY_STATUS: Final = {
    401: fault.UNAUTHENTICATED,
    403: fault.FORBIDDEN,
    404: fault.TASK_NOT_FOUND,
    409: fault.CONFLICT,
    413: fault.TOO_LARGE,
    429: fault.BUSY,
    502: fault.AWAY,
    503: fault.AWAY,
    504: fault.AWAY,
}
_OURS: Final = ("self", "kind", "message", "outcome", "idempotency_key", "retry_after_s")  # not for a server to say
_PASSING: Final = (fault.AWAY, fault.BUSY, fault.INTERNAL)
_IN_DOUBT: Final = (fault.AWAY, fault.INTERNAL)


class TaskGenerationMismatch(Fault):
    """The task has moved on since it was looked at: nothing was sent. 0 where the server does not say."""

    code = "a2a_generation_mismatch"

    def __init__(self, kind: Kind, message: str, **details: Any) -> None:
        super().__init__(kind, message, **details)
        self.expected = _number(details, "expectedGeneration", "ifGenerationMatch")
        self.current = _number(details, "currentGeneration", "generation")


def refused(message: str, details: Any, code: int | None = None, status: int = 0, **more: Any) -> Fault:
    """From what one of the bindings said: the details first, then its code, then the status of HTTP."""
    info = _error_info(details)
    kind = _kind(info.get("reason"), code, status)
    told = info.get("metadata")
    metadata = {str(name): value for name, value in told.items()} if isinstance(told, dict) else {}
    for ours in _OURS:
        metadata.pop(ours, None)
    made = TaskGenerationMismatch if kind is fault.GENERATION else Fault
    return made(kind, message or kind.name, **{**metadata, **more})


def is_passing(refusal: Fault) -> bool:
    """Whether the same may be answered later."""
    return refusal.kind in _PASSING


def is_in_doubt(refusal: Fault) -> bool:
    """Whether what was asked for may have been done all the same."""
    return refusal.kind in _IN_DOUBT


def _kind(reason: Any, code: int | None, status: int) -> Kind:
    known = _BY_REASON.get(reason) if isinstance(reason, str) else None
    if known is not None:
        return known
    if code is not None and code != fault.INTERNAL.jsonrpc:
        for kind in _KINDS:
            if kind.jsonrpc == code:
                return kind
    return _BY_STATUS.get(status) or (fault.INVALID_PARAMS if 400 <= status < 500 else fault.INTERNAL)


def _error_info(details: Any) -> dict[str, Any]:
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, dict) and str(detail.get("@type", "")).endswith("google.rpc.ErrorInfo"):
            return detail
    return {}


def _number(details: dict[str, Any], *names: str) -> int:
    for name in names:
        try:
            return int(details[name])
        except (KeyError, TypeError, ValueError):
            continue
    return 0
