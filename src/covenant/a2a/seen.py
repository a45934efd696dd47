"""What a client of the A2A protocol sees: tasks, and what happens to them, as any server tells it.

A server may know less than ours: a generation that it does not tell is 0, which means "unknown"; a state that this
version has not heard of is passed on as it came.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from covenant.a2a.fault import BAD_AGENT, Fault
from covenant.a2a.wire import PushSettings
from covenant.model.message import Message, Part
from covenant.model.protocol import State

_TERMINAL: Final = frozenset(state.value for state in State if state.is_terminal)
_INTERRUPTED: Final = frozenset(state.value for state in State if state.is_interrupted)
_OPAQUE: Final = ("data", "metadata", "params")  # whose insides are the agent's own


class _Seen(Struct, frozen=True, omit_defaults=True, rename="camel", kw_only=True, gc=False):
    pass


class Status(_Seen, frozen=True):
    state: str
    message: Message | None = None
    timestamp: str | None = None

    @property
    def is_terminal(self) -> bool:
        return self.state in _TERMINAL

    @property
    def is_interrupted(self) -> bool:
        """The agent waits for the client."""
        return self.state in _INTERRUPTED


class Artifact(_Seen, frozen=True):
    artifact_id: str
    parts: tuple[Part, ...] = ()  # the last chunk of a stream may be empty
    name: str | None = None
    description: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()


class Task(_Seen, frozen=True):
    id: str
    status: Status
    context_id: str = ""
    artifacts: tuple[Artifact, ...] = ()
    history: tuple[Message, ...] = ()
    metadata: dict[str, Any] | None = None
    generation: int = 0

    @property
    def state(self) -> str:
        return self.status.state

    @property
    def is_terminal(self) -> bool:
        return self.status.is_terminal

    @property
    def is_interrupted(self) -> bool:
        return self.status.is_interrupted


class StatusUpdate(_Seen, frozen=True):
    task_id: str
    status: Status
    context_id: str = ""
    metadata: dict[str, Any] | None = None
    generation: int = 0


class ArtifactUpdate(_Seen, frozen=True):
    task_id: str
    artifact: Artifact
    context_id: str = ""
    append: bool = False
    last_chunk: bool = False
    metadata: dict[str, Any] | None = None
    generation: int = 0


class Element(_Seen, frozen=True):
    """What a stream brings: exactly one of these."""

    task: Task | None = None
    message: Message | None = None
    status_update: StatusUpdate | None = None
    artifact_update: ArtifactUpdate | None = None

    @property
    def generation(self) -> int:
        told = self.task or self.status_update or self.artifact_update
        return 0 if told is None else told.generation

    @property
    def task_id(self) -> str:
        told = self.status_update or self.artifact_update
        return self.task.id if self.task is not None else "" if told is None else told.task_id

    @property
    def status(self) -> Status | None:
        told = self.task or self.status_update
        return None if told is None else told.status


class Event(Element, frozen=True):
    """What a follower is shown. A snapshot (`task`) that `missed` something stands for events that nobody can show any
    more: the task is right, how it came to be so is not told."""

    missed: bool = False

    @property
    def is_last(self) -> bool:
        return self.message is not None or (self.status is not None and self.status.is_terminal)


class TaskPage(_Seen, frozen=True):
    tasks: tuple[Task, ...] = ()
    next_page_token: str = ""


class PushPage(_Seen, frozen=True):
    configs: tuple[PushSettings, ...] = ()
    next_page_token: str = ""


_decoders: Final[dict[type[Any], msgspec.json.Decoder[Any]]] = {}


def read(data: bytes | msgspec.Raw, kind: type[Any]) -> Any:
    """Numbers of 64 bits come as strings, unset members of some servers as null."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind, strict=False)
    try:
        if b"null" in bytes(data):
            return msgspec.convert(_without_null(msgspec.json.decode(data)), kind, strict=False)
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise Fault(BAD_AGENT, f"an answer that does not read: {wrong}") from None


def _without_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_null(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        name: inner if name in _OPAQUE else _without_null(inner)
        for name, inner in value.items()
        if inner is not None or name == "data"
    }
