"""Where an A2A client wants to be told of what happens to its task."""

from __future__ import annotations

from msgspec import Struct

PUSH_PREFIX = "push:"


class Authentication(Struct, frozen=True, omit_defaults=True, gc=False):
    scheme: str
    credentials: str | None = None

    def __repr__(self) -> str:
        return f"Authentication({self.scheme!r})"


class PushConfig(Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True, gc=False):
    """`token` and the credentials are the receiver's secrets: they are sent to it and shown to nobody."""

    id: str
    url: str
    token: str | None = None
    authentication: Authentication | None = None
    protocol_version: str | None = None  # in whose words it is told; None is the newest

    def __repr__(self) -> str:
        return f"PushConfig({self.id!r})"


class Push(Struct, gc=False, omit_defaults=True):
    """A webhook and how far it has been told: everything up to this generation."""

    config: PushConfig
    delivered: int
    order: int = 0
    since: int = 0  # the event that set it


def push_key(task_id: str, config_id: str) -> str:
    return f"{PUSH_PREFIX}{task_id}:{config_id}"


def pushed_task(key: str) -> str:
    """The task that such a key belongs to."""
    return key[len(PUSH_PREFIX) :].partition(":")[0]
