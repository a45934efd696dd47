"""The A2A protocol: what its wire looks like, what its errors are called, and a client that loses nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from covenant.a2a.client import Client
    from covenant.a2a.fault import Fault
    from covenant.a2a.patience import Patience
    from covenant.a2a.refusal import TaskGenerationMismatch
    from covenant.a2a.seen import Artifact, Event, Task
    from covenant.model.message import Message, Part
    from covenant.model.protocol import State

__all__ = [
    "Artifact",
    "Client",
    "Event",
    "Fault",
    "Message",
    "Part",
    "Patience",
    "State",
    "Task",
    "TaskGenerationMismatch",
]

_MODULE_OF: Final = {
    "Artifact": "covenant.a2a.seen",
    "Client": "covenant.a2a.client",
    "Event": "covenant.a2a.seen",
    "Fault": "covenant.a2a.fault",
    "Message": "covenant.model.message",
    "Part": "covenant.model.message",
    "Patience": "covenant.a2a.patience",
    "State": "covenant.model.protocol",
    "Task": "covenant.a2a.seen",
    "TaskGenerationMismatch": "covenant.a2a.refusal",
}


if not TYPE_CHECKING:  # the server speaks the wire and needs no client

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(module), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
