"""A reply says what the record says after the commit, for every command of random programs. (Contract 14.)

The rules write a reply beside the events that they decide; this folds the events and compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.postgres.author import Author, Pause

from covenant import CovenantError, Limits
from covenant.model import command as c
from covenant.model.record import TaskRecord
from covenant.model.run import Signaled
from covenant.model.view import Posted, Released
from covenant.rules.context import Context
from covenant.rules.decide import decide
from covenant.store.clock import CountingIds
from covenant.store.state import State

EXAMPLES: Final = 40
LINES: Final = 200
FLOORS: Final = {  # how many replies of each must have been compared
    **dict.fromkeys(("LeaseTasks", "SendTask", "SignalRun"), 150),
    **dict.fromkeys(("started", "PostResult", "UpdateTask"), 60),
    **dict.fromkeys(("AddMessage", "CommitRun", "WakeRun", "ReleaseLease"), 20),
    **dict.fromkeys(("AddArtifact", "RejectTask", "CancelTask"), 10),
    "RepairTask": 3,
}
LIMITS: Final = Limits(retention_ms=20_000, error_ttl_ms=1_000, step_records_max=3)


class Rules:
    """The rules on a state in memory, with nothing around them."""

    def __init__(self, counts: Counter[str]) -> None:
        self.state = State()
        self.ctx = Context(1_700_000_000_000, CountingIds(), LIMITS)
        self._counts = counts

    def run(self, command: c.Command | c.Call) -> None:
        waiting: list[c.Command | c.Call] = [command]
        while waiting:
            now = waiting.pop(0)
            try:
                commit = decide(now, self.state, self.ctx)
            except CovenantError:
                continue  # it has changed nothing
            if commit.events:
                self.state.apply(commit.events, self.ctx.now, commit.fresh)
                self.ctx.compaction = self.state.compaction
            asked = now.command if isinstance(now, c.Call) else now
            if isinstance(asked, c.DrainResults):
                continue  # an answer tells the generation at which it was given
            for task_id, reply in replies_in(commit.reply):
                self._check(asked, task_id, reply)
            waiting += commit.then

    def _check(self, command: c.Command, task_id: str, reply: Any) -> None:
        record = self.state.get(task_id)
        if reply.generation == 0 or not isinstance(record, TaskRecord):
            return  # past retention: nothing is known of it
        if isinstance(reply, Posted) and reply.duplicate and reply.sequence is not None:
            assert reply.generation <= record.generation  # the same answer as to the first post of this piece
            return
        assert reply.generation == record.generation, (command, reply)
        for name in ("state", "attempt"):
            if hasattr(reply, name) and not isinstance(reply, Released):
                assert getattr(reply, name) == getattr(record, name), (command, reply)
        self._counts[type(command).__name__] += 1
        if isinstance(reply, Signaled):
            self._counts["started"] += reply.started
            waits = [signal.id for signal in self.state.signals(task_id, 100, taken=True)]
            assert record.outcome is None and reply.signal_id in waits, (command, reply)


def replies_in(reply: Any) -> Iterator[tuple[str, Any]]:
    """Yield the replies that name the generation which a task has now."""
    for one in reply if isinstance(reply, list) else [reply]:
        if hasattr(one, "generation"):
            if hasattr(one, "task_id"):
                yield one.task_id, one
            elif hasattr(one, "lease_id"):
                yield one.task.id, one


def play(seed: int, counts: Counter[str]) -> None:
    rules = Rules(counts)
    random = Random(seed)
    author = Author(seed, rules.state, lambda: rules.ctx.now)
    for _ in range(LINES):
        line = starting(author, random) if random.random() < 0.1 else author.line()
        if isinstance(line, Pause):
            rules.ctx.now += line.by_ms
            rules.run(c.Expire(None))
            continue
        for command in line if isinstance(line, tuple) else (line,):
            rules.run(command)


def starting(author: Author, random: Random) -> c.Command:
    """A signal with a start, under keys that others have, too."""
    sent = author.send()
    assert isinstance(sent, c.SendTask)
    task_id = f"66666666-6666-4666-8666-{random.randrange(2**40):012x}"
    return c.SignalRun(sent.by, sent.task.id or task_id, "go", start=sent.task)


def test_a_reply_says_what_the_record_says() -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(st.integers(0, 2**32))
    def says_the_same(seed: int) -> None:
        play(seed, counts)

    says_the_same()
    for name, floor in FLOORS.items():
        assert counts[name] >= floor, (name, counts)
