"""Tasks with webhooks. One daemon at a time, the one that leads, posts for all of them: it is told which have moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from covenant.model.record import Key


class Hooks:
    def __init__(self, leads: Callable[[], bool]) -> None:
        self._leads = leads
        self._on_move: Callable[[str], None] | None = None
        self._tasks: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def watch(self, tell: Callable[[str], None]) -> None:
        self._on_move = tell
        self.moved(self._tasks)

    def lead(self) -> None:
        """From now on this daemon posts: for each of them it may have something to tell."""
        if self._on_move is not None:
            for task_id in self._tasks:
                self._on_move(task_id)

    def add(self, task_id: str) -> None:
        self._tasks.add(task_id)

    def replace(self, tasks: set[str]) -> None:
        """These are all that there are."""
        new, self._tasks = tasks - self._tasks, tasks
        self.moved(new)

    def moved(self, keys: Iterable[Key]) -> None:
        if self._on_move is not None and self._leads():
            for key in keys:
                if key in self._tasks:
                    self._on_move(key)
