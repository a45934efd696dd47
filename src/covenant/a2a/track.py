"""In which order a follower is shown what happens to a task: no gap, no repeat, whatever the connection does.

Pure: it is told what came, and says what to show and when to look at the task itself. It believes in generations until
the server disproves them: by a 0, by a number that repeats in one stream, or by a task that is younger than its number
says. From then on the order of the stream is all there is, and snapshots mend what a cut took away.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, structs

from covenant.a2a.seen import Element, Event, Task
from covenant.model.message import Part
from covenant.model.protocol import RESTARTED


class Look(Struct, frozen=True):
    """The task has to be read, as it is behind this generation."""

    after: int


class Track:
    def __init__(self, after: int | None = None, is_numbered: bool = True) -> None:
        self.known = after or 0  # the generation of what was shown last
        self.is_numbered = is_numbered
        self.is_over = False
        self.is_broken = False  # what this connection goes on to say has no place: it takes another
        self._has_shown = bool(after)
        self._has_dropped = False  # on the word of a number
        self._state: str | None = None
        self._last = 0  # the generation of what came last on this connection
        self._is_first = True  # of this connection
        self._marks: tuple[Any, ...] = ()
        self._parts: dict[str, list[Part]] = {}

    def reconnect(self) -> None:
        self.is_broken = False
        self._last = 0
        self._is_first = True

    def take(self, element: Element) -> Event | Look | None:
        """What to show for this element of a stream, if anything."""
        is_first, self._is_first = self._is_first, False
        if element.message is not None:
            self.is_over = True
            return Event(message=element.message)
        generation = element.generation
        if self.is_numbered and (generation < 1 or generation <= self._last):
            self.is_numbered = False
            self.is_broken = self._has_dropped
            if self.is_broken:
                return None
        self._last = generation
        if element.task is not None:
            return self._snapshot(element.task, is_first)
        if not self.is_numbered or not self.known or generation == self.known + 1:
            return self._show(element)
        if generation <= self.known:
            self._has_dropped = True
            return None
        return Look(generation - 1)

    def look(self, task: Task, least: int = 0) -> Event | None:
        """What to show for the task as it was read; `least` is the generation that it must have by now."""
        if self.is_numbered and (task.generation < 1 or task.generation < max(least, self.known)):
            self.is_numbered = False
            self.is_broken = True
        shown = self._snapshot(task, is_first=True)
        return shown if isinstance(shown, Event) else None

    def _snapshot(self, task: Task, is_first: bool) -> Event | Look | None:
        if not self.is_numbered:
            if is_first and self._has_shown and self._is_seen(task):
                self.is_over = task.is_terminal
                return None
            return self._show(Element(task=task), missed=is_first and self._has_shown)
        if task.generation < self.known:
            return Look(self.known - 1)
        if task.generation == self.known:
            if self._state in (None, task.state):
                self._has_dropped = True
                self.is_over = task.is_terminal
                return None
            self.is_numbered = False  # another task under the same number
            return self._show(Element(task=task), missed=True)
        has_gap = self.known > 0 and task.generation > self.known + 1
        return self._show(Element(task=task), missed=has_gap or bool((task.metadata or {}).get(RESTARTED)))

    def _show(self, element: Element, missed: bool = False) -> Event:
        self._has_shown = True
        if self.is_numbered:
            self.known = element.generation
        else:
            self._remember(element)
        if element.status is not None:
            self._state = element.status.state
            self.is_over = element.status.is_terminal
        return Event(**structs.asdict(element), missed=missed)

    # --- without numbers: what was seen is compared -------------------------------------------------------------

    def _remember(self, element: Element) -> None:
        if element.task is not None:
            self._marks = _marks(element)
            self._parts = {artifact.artifact_id: list(artifact.parts) for artifact in element.task.artifacts}
        elif element.status_update is not None:
            self._marks = _marks(element)
        elif element.artifact_update is not None:
            artifact = element.artifact_update.artifact
            if not element.artifact_update.append:
                self._parts[artifact.artifact_id] = list(artifact.parts)
            elif artifact.artifact_id in self._parts:
                self._parts[artifact.artifact_id].extend(artifact.parts)

    def _is_seen(self, task: Task) -> bool:
        parts = {artifact.artifact_id: list(artifact.parts) for artifact in task.artifacts}
        return self._marks == _marks(Element(task=task)) and self._parts == parts


def _marks(element: Element) -> tuple[Any, ...]:
    """What tells one status from another."""
    assert element.status is not None
    message = element.status.message
    return element.status.state, element.status.timestamp, None if message is None else message.message_id
