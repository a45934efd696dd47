"""How much a rule asks of its view at once, however much there is: an engine that keeps records elsewhere loads that
much for one answer. (Contract 32.)"""

from __future__ import annotations

from typing import Any, Final

from tests.a2a.stage import ADA, BOB, CYD, Stage
from tests.conformance.runs import memo, raw, step
from tests.conformance.support import uid

from covenant import Limits, Result, Task, Text
from covenant.model import command as c
from covenant.model import event as e
from covenant.model import query as q
from covenant.model.run import Memo, RunLoaded
from covenant.rules.context import Commit, Need
from covenant.rules.decide import decide
from covenant.rules.query import answer

AT_ONCE: Final = 1000
STEPS_MAX: Final = 100


class Elsewhere:
    """A view of a state that has to be asked for each record before it shows it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._loaded: set[Any] = set()
        self.asked: list[int] = []  # how many records, each time
        self.spans: list[int] = []  # how many numbered records were listed, each time

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage.state, name)

    def get(self, key: str) -> Any:
        if key not in self._loaded:
            raise Need(key)
        return self._stage.state.get(key)

    def pieces(self, prefix: str, first: int, last: int) -> Any:
        self.spans.append(last + 1 - first)
        return self._stage.state.pieces(prefix, first, last)

    def load(self, need: Need) -> None:
        self.asked.append(len(need.wanted))
        self._loaded.update(need.wanted)

    def answer(self, query: q.Query) -> Any:
        while True:
            try:
                return answer(query, self, self._stage.ctx)
            except Need as need:
                self.load(need)

    def decide(self, command: c.Command) -> Commit:
        while True:
            try:
                return decide(command, self, self._stage.ctx)
            except Need as need:
                self.load(need)


def begun(stage: Stage) -> str:
    """Bob's run, and its lease."""
    stage.run(c.SendTask(ADA, Task(id=uid(1), recipient=BOB, intent_text="research")))
    return stage.lease()


def test_a_run_that_remembers_much_is_loaded_in_parts() -> None:
    stage = Stage()
    lease_id = begun(stage)
    numbers = iter(range(10, 10**6))
    for number in range(1, 31):
        memos = [memo(next(numbers)) for _ in range(100)]
        stage.run(c.CommitRun(BOB, lease_id, step(number, memos=memos), "one"))
    elsewhere = Elsewhere(stage)
    loaded: RunLoaded = elsewhere.answer(q.LoadRun(BOB, lease_id))
    assert [len(seen.memos) for seen in loaded.steps] == [100] * 30
    assert AT_ONCE <= max(elsewhere.asked) < AT_ONCE + 100  # with the whole of the last step


def test_a_page_of_a_run_has_so_many_steps_and_no_more() -> None:
    stage = Stage(Limits(page_max=2))
    lease_id = begun(stage)
    for number in range(1, 6):
        stage.run(c.CommitRun(BOB, lease_id, step(number, memos=[memo(10 + number)]), "one"))
    elsewhere = Elsewhere(stage)
    pages: list[RunLoaded] = [elsewhere.answer(q.LoadRun(BOB, lease_id, after)) for after in (0, 2, 4)]
    assert [[seen.number for seen in page.steps] for page in pages] == [[1, 2], [3, 4], [5]]
    assert [page.next for page in pages] == [2, 4, None]
    assert max(elsewhere.spans) == 2


def test_the_end_of_a_task_looks_through_so_many_steps_and_no_more() -> None:
    """Contract 9, 20: behind that it is left to the end of the run."""
    for steps, looked_through in ((STEPS_MAX, STEPS_MAX), (STEPS_MAX + 1, None)):
        stage = Stage()
        lease_id = begun(stage)
        part = Task(id=uid(2), recipient=CYD, intent_text="part")
        stage.run(c.CommitRun(BOB, lease_id, step(1, tasks=[part], memos=[memo(2)]), "one"))
        stage.run(c.CommitRun(BOB, lease_id, step(2, checkpoint=raw({"phase": 2})), "one"))
        for number in range(3, 2 + steps):
            stage.run(c.CommitRun(BOB, lease_id, step(number, memos=[Memo(f"memo {number}")]), "one"))
        (delivery,) = stage.run(c.LeaseTasks(CYD, CYD, "two"))
        elsewhere = Elsewhere(stage)
        result = Result(uid(2), "ok", (Text("done"),), None, delivery.lease_id)
        commit = elsewhere.decide(c.PostResult(CYD, result, "two"))
        drained = [event for event in commit.events if isinstance(event, e.Drained)]
        if looked_through is None:
            assert elsewhere.spans == []
            assert drained == []
        else:
            assert set(elsewhere.spans) == {looked_through}
            assert [event.key for event in drained] == [uid(2)]
