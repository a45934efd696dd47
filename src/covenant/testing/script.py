"""What the world around a run does, one thing each time that the run has come to rest."""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct


class Tell(Struct, frozen=True):
    """A signal to the run."""

    name: str
    value: Any = None


class Say(Struct, frozen=True):
    """A message of the task's sender."""

    text: str


class Pass(Struct, frozen=True):
    """Time goes by."""

    ms: int


class Answer(Struct, frozen=True):
    """Another agent does the oldest task that the run has sent to others."""


Step: TypeAlias = Tell | Say | Pass | Answer
