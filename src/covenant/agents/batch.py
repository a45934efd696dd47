"""What a run has done since its last commit, for the next one to carry. (Contract 22.)"""

from __future__ import annotations

from msgspec import UNSET, Raw, UnsetType

from covenant.model.run import EntryDraft, Memo, RunCommit, Wait
from covenant.model.task import Result, Task


class Batch:
    def __init__(self) -> None:
        self.entries: list[EntryDraft] = []
        self.memos: list[Memo] = []
        self.tasks: dict[str, Task] = {}
        self.begins: list[str] = []
        self.answers: list[Result] = []
        self.cancels: list[str] = []
        self.takes: list[str] = []
        self.checkpoint: Raw | UnsetType = UNSET
        self.bytes = 0  # of the values in it

    @property
    def is_empty(self) -> bool:
        return not (
            self.entries
            or self.memos
            or self.tasks
            or self.begins
            or self.answers
            or self.cancels
            or self.takes
            or self.checkpoint is not UNSET
        )

    def put_before(self, later: Batch) -> None:
        """What was noted while this one was on its way goes with it, as it was refused."""
        if later.checkpoint is not UNSET:
            self.memos.clear()
            self.checkpoint = later.checkpoint
        self.entries += later.entries
        self.memos += later.memos
        self.tasks.update(later.tasks)
        self.begins += later.begins
        self.answers += later.answers
        self.cancels += later.cancels
        self.takes += later.takes
        self.bytes += later.bytes

    def leave_out(self, child_id: str, memo: Memo) -> None:
        """A task that was refused: what is remembered of it takes its place."""
        self.tasks.pop(child_id, None)
        self.begins = [begun for begun in self.begins if begun != child_id]
        self.memos = [kept for kept in self.memos if kept.key != memo.key] + [memo]

    def commit(self, number: int, leaf: int, wait: Wait | None, result: Result | None, is_told: bool) -> RunCommit:
        return RunCommit(
            number=number,
            entries=tuple(self.entries),
            memos=tuple(self.memos),
            tasks=tuple(self.tasks.values()),
            begins=tuple(self.begins),
            answers=tuple(self.answers),
            cancels=tuple(self.cancels),
            takes=tuple(self.takes),
            checkpoint=self.checkpoint,
            leaf=leaf,
            wait=wait,
            result=result,
            is_told=is_told,
        )
