"""What a run remembers since its last checkpoint. (Contract 20.)

Every operation has a key: what it is, a hash of its content, and how often the same has come before in this call of
the function. Other content cannot shift it, so a path that is taken on one call and not on the next moves nothing.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections import Counter
from typing import Any, Final

from covenant.agents import values
from covenant.model.run import NOTHING, Memo, RunLoaded
from covenant.model.task import Result
from covenant.rules.content_key import content_hash

_KEY_BYTES: Final = 12  # enough among the operations of one run; and there are many of them


class Memory:
    """Of the operations since the last checkpoint: what each came to."""

    def __init__(self) -> None:
        self._memos: dict[str, Memo] = {}
        self._seen: Counter[str] = Counter()
        self._free: dict[str, list[int]] = {}  # what was counted and came to nothing
        self.entry_ids: dict[int, str] = {}
        self.outcomes: dict[str, Result] = {}  # of the run's tasks that have ended

    def learn(self, loaded: RunLoaded) -> None:
        """A page of what was committed before."""
        for step in loaded.steps:
            self._memos.update((memo.key, memo) for memo in step.memos)
            self.entry_ids.update(step.entries)
            self.outcomes.update((result.task_id, result) for result in step.outcomes)

    def key(self, operation: str, content: Any) -> str:
        """The key of an operation that comes now. It counts: ask once for each."""
        hashed = bytes.fromhex(content_hash(operation, content))[:_KEY_BYTES]
        digest = urlsafe_b64encode(hashed).decode()
        if free := self._free.get(digest):
            count = min(free)
            free.remove(count)
        else:
            count = self._seen[digest]
            self._seen[digest] += 1
        return f"{digest}#{count}" if count else digest

    def give_back(self, key: str) -> None:
        """The operation never came to anything: the next that is the same has its key."""
        digest, _, count = key.partition("#")
        self._free.setdefault(digest, []).append(int(count or 0))

    def count(self, name: str) -> int:
        """How often this has been asked for in this call of the function."""
        self._seen[name] += 1
        return self._seen[name]

    def recall(self, key: str) -> Memo | None:
        return self._memos.get(key)

    def keep(self, memo: Memo) -> None:
        self._memos[memo.key] = memo

    def forget(self) -> None:
        """A checkpoint: what lies before it is not looked for any more."""
        self._memos.clear()
        self._seen.clear()
        self._free.clear()


def noted(key: str, value: Any) -> Memo:
    return Memo(key, NOTHING if value is None else values.raw(value))
