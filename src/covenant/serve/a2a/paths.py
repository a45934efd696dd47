"""Where the A2A protocol is found on the daemon's address.

Each agent has its own place, `/agents/{name}`; the default agent's is the root. Below each there is one endpoint for
JSON-RPC, which is the place itself, the paths of the HTTP+JSON binding, also with a tenant before them, and the card.
What the mailbox has at the same address comes first.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from msgspec import Struct

from covenant.model.error import UnknownRoute, WrongMethod
from covenant.serve.places import PLACES

AGENTS: Final = "agents"
CARD: Final = "card"
JSONRPC: Final = "jsonrpc"
_WELL_KNOWN: Final = (".well-known", "agent-card.json")
_PUSHES: Final = "pushNotificationConfigs"
_MAILBOX: Final = frozenset(place.path.split("/")[1] for place in PLACES)
_ROOTS: Final = frozenset(("", AGENTS, "message:send", "message:stream", "tasks", "extendedAgentCard", ".well-known"))

Methods: TypeAlias = dict[str, str]  # what each HTTP method asks for

_FIXED: Final[dict[tuple[str, ...], Methods]] = {
    ("message:send",): {"POST": "SendMessage"},
    ("message:stream",): {"POST": "SendStreamingMessage"},
    ("tasks",): {"GET": "ListTasks"},
    ("extendedAgentCard",): {"GET": "GetExtendedAgentCard"},
    _WELL_KNOWN: {"GET": CARD, "HEAD": CARD},
}
_ONE_TASK: Final[Methods] = {"GET": "GetTask"}
_ON_TASK: Final[dict[str, Methods]] = {
    "cancel": {"POST": "CancelTask"},
    "subscribe": {"GET": "SubscribeToTask", "POST": "SubscribeToTask"},
}
_ALL_PUSHES: Final[Methods] = {
    "GET": "ListTaskPushNotificationConfigs",
    "POST": "CreateTaskPushNotificationConfig",
}
_ONE_PUSH: Final[Methods] = {
    "GET": "GetTaskPushNotificationConfig",
    "DELETE": "DeleteTaskPushNotificationConfig",
}


class Spot(Struct, frozen=True, gc=False):
    """What a request is for: an operation, the card, or whatever the JSON-RPC call in its body says."""

    agent: str | None  # whose place it is; None is the root
    what: str
    members: tuple[tuple[str, str], ...] = ()  # of the request, by their names in the protocol's JSON form
    tenant: str | None = None


_ROOT: Final = Spot(None, JSONRPC)


def is_ours(path: str) -> bool:
    """Whether anything of the protocol could be there."""
    first = path[1:].partition("/")[0]
    if first in _ROOTS:
        return True
    return first not in _MAILBOX and _with_tenant(path[1:].split("/")) is not None


def spot(method: str, path: str) -> Spot:
    if path == "/" and method == "POST":
        return _ROOT
    parts = path[1:].split("/")
    agent = None
    if parts[0] == AGENTS and len(parts) > 1:
        agent, parts = parts[1], parts[2:]
    if parts in ([], [""]):
        if not agent and method != "POST":
            raise UnknownRoute("the agents are at /agents/{name}")
        return Spot(agent, _chosen({"POST": JSONRPC}, method, path))
    found = _found(parts)
    if found is not None:
        return Spot(agent, _chosen(found[0], method, path), found[1])
    found = _with_tenant(parts)
    if found is not None:
        return Spot(agent, _chosen(found[0], method, path), found[1], parts[0])
    raise UnknownRoute(f"there is nothing at {path[:200]}")


def _chosen(methods: Methods, method: str, path: str) -> str:
    what = methods.get(method)
    if what is None:
        raise WrongMethod(f"{path[:200]} takes {', '.join(sorted(methods))}", allow=sorted(methods))
    return what


def _with_tenant(parts: list[str]) -> tuple[Methods, tuple[tuple[str, str], ...]] | None:
    found = _found(parts[1:]) if len(parts) > 1 and parts[0] else None
    return None if found is None or CARD in found[0].values() else found


def _found(parts: list[str]) -> tuple[Methods, tuple[tuple[str, str], ...]] | None:
    fixed = _FIXED.get(tuple(parts))
    if fixed is not None:
        return fixed, ()
    if len(parts) < 2 or parts[0] != "tasks" or not parts[1]:
        return None
    if len(parts) == 2:
        task_id, _, act = parts[1].rpartition(":")
        if task_id and act in _ON_TASK:
            return _ON_TASK[act], (("id", task_id),)
        return _ONE_TASK, (("id", parts[1]),)
    if parts[2] != _PUSHES:
        return None
    if len(parts) == 3:
        return _ALL_PUSHES, (("taskId", parts[1]),)
    return (_ONE_PUSH, (("taskId", parts[1]), ("id", parts[3]))) if len(parts) == 4 and parts[3] else None
