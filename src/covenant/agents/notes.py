"""What a run notes as it goes: remembered at once, and kept with the next commit, as far as that carries it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Final

from msgspec import Raw

from covenant.agents.batch import Batch
from covenant.agents.memory import Memory, noted
from covenant.mailbox import Mailbox
from covenant.model.error import TooLarge
from covenant.model.run import NOTHING, Memo
from covenant.rules.envelope import check_text
from covenant.rules.run.value import check_value

_BYTES_MAX: Final = 6 * 1024 * 1024  # of the values that a commit carries: a daemon takes 8 MiB at once


class Notes:
    def __init__(self, box: Mailbox) -> None:
        self.memory = Memory()
        self.batch = Batch()
        self.cancels_due: list[str] = []  # of tasks that are about to be sent
        self._box = box

    def note(self, key: str, value: Any) -> Memo:
        memo = noted(key, value)
        self.remember(memo)
        return memo

    def remember(self, memo: Memo) -> None:
        self.check_value(memo.value, is_wrapped=True)
        self.memory.keep(memo)
        self.batch.memos.append(memo)
        self.batch.bytes += len(memoryview(memo.value))

    # --- for a commit -------------------------------------------------------------------------------------

    def hand_over(self) -> Batch:
        """All that was noted so far; what comes now is for the commit after it."""
        batch, self.batch = self.batch, Batch()
        return batch

    def take_back(self, batch: Batch) -> None:
        """It was refused: it goes again, with what was noted meanwhile."""
        batch.put_before(self.batch)
        self.batch = batch

    # --- whether a commit would carry it ------------------------------------------------------------------

    def check_room(self, key: str | None, noted: Sized, what: str, size: int = 0) -> None:
        """Refuse what the next commit would not carry. That depends on when the last one was: so the operation is
        refused again when it comes again in another call of the function."""
        limit, full_key = self._box.limits.batch_max, f"{key}/full"
        was_full = self.memory.recall(full_key) is not None
        if not was_full and len(noted) < limit and self.carries(size):
            return
        if not was_full and key is not None:
            self.remember(Memo(full_key))
        told = f"a commit has at most {limit} {what}, and {_BYTES_MAX} bytes: wait for something in between"
        raise TooLarge(told, field=what, limit=limit)

    def carries(self, size: int) -> bool:
        """Whether so many bytes go with what is noted; one value of any size does, alone."""
        return not self.batch.bytes or self.batch.bytes + size <= _BYTES_MAX

    @property
    def is_full(self) -> bool:
        batch = self.batch
        most = max(len(batch.entries), len(batch.memos), len(batch.cancels) + len(self.cancels_due))
        return most >= self._box.limits.batch_max

    def check_name(self, name: str, what: str) -> None:
        check_text(name, what, self._box.limits.key_bytes_max)

    def check_value(self, value: Raw, *, is_wrapped: bool = False) -> None:
        if value is NOTHING:
            return
        body, limits = bytes(value), self._box.limits
        if len(body) > limits.content_bytes_max or body.count(b"[") + body.count(b"{") > limits.content_depth_max:
            check_value(value, "value", limits, is_wrapped=is_wrapped)
