"""What is refused behind a commit."""

from __future__ import annotations

import pytest

from covenant import CovenantError
from covenant.a2a.fault import TASK_NOT_FOUND, Fault
from covenant.exchange.outcome import committed
from covenant.model.error import StoreClosed, StoreUnavailable, TaskTerminal, Unauthenticated


@pytest.mark.parametrize(
    "refusal",
    [
        StoreUnavailable("it is away", outcome="not_stored"),
        StoreClosed("it was closed"),
        Unauthenticated("another token is good now", retry_after_ms=5),
        Fault(TASK_NOT_FOUND, "it is buried", taskId="t"),
    ],
    ids=lambda refusal: refusal.code,
)
def test_what_is_refused_behind_a_commit_has_an_unknown_outcome_and_is_the_same_else(refusal: CovenantError) -> None:
    before = dict(refusal.details)
    with pytest.raises(type(refusal)) as told, committed:
        raise refusal
    assert told.value.to_wire() == {**refusal.to_wire(), "outcome": "unknown"}
    assert getattr(told.value, "kind", None) is getattr(refusal, "kind", None)
    assert refusal.details == before  # others may have been told it, too


def test_how_a_task_has_ended_is_not_taken_for_the_outcome_of_a_call() -> None:
    with pytest.raises(TaskTerminal) as told, committed:
        raise TaskTerminal("it has ended", outcome="canceled")
    assert told.value.details == {"outcome": "canceled"}
