"""The checker itself: a history in which all is well has no violation, and each promise that is broken is found."""

from __future__ import annotations

from itertools import count
from typing import Any, Final

import pytest
from msgspec import structs

from tests.cluster.checker import Rule, violations
from tests.cluster.history import Outcome, Step, Verb


def step(verb: Verb, at: float, **facts: Any) -> Step:
    return Step(client=facts.pop("client", "c"), verb=verb, began=at, ended=facts.pop("ended", at + 1), **facts)


def lease(at: float, attempt: int, **facts: Any) -> Step:
    return step(Verb.LEASE, at, task="t", lease=f"l{attempt}", attempt=attempt, **{"generation": 0, **facts})


def under(verb: Verb, at: float, lease: str, **facts: Any) -> Step:
    return step(verb, at, task="t", lease=lease, **facts)


SENT: Final = step(Verb.SEND, 0, task="t", generation=1)
DRAINED: Final = step(Verb.DRAIN, 90, task="t", text="done", is_last=True)
POSTED: Final = under(Verb.POST, 80, "l1", text="done", generation=9)
LEASED: Final = lease(10, 1, generation=2)
WELL: Final = [SENT, LEASED, POSTED, DRAINED]

SUPERSEDED: Final = [
    SENT,
    LEASED,
    under(Verb.BEAT, 15, "l1"),
    under(Verb.REQUEUE, 20, "l1", generation=3, client="operator"),
    lease(30, 2, generation=4),
    under(Verb.POST, 40, "l1", outcome=Outcome.REFUSED, code="lease_superseded", text="late"),
    under(Verb.PART, 45, "l2", text="half", generation=5),
    step(Verb.DRAIN, 48, task="t", attempt=2, text="half"),
    under(Verb.POST, 50, "l2", text="done", generation=7),
    under(Verb.POST, 52, "l2", text="done", generation=7, duplicate=True),
    under(Verb.POST, 54, "l2", outcome=Outcome.REFUSED, code="result_conflict", text="other"),
    DRAINED,
    step(Verb.READ, 95, task="t", text="done", is_last=True),
]


def streamed(stream: str, texts: list[str], **facts: Any) -> list[Step]:
    times = count(100)
    return [
        step(
            Verb.EVENT,
            next(times),
            task="t",
            stream=stream,
            generation=generation,
            text=text,
            is_last=text == "completed",
            **facts,
        )
        for generation, text in enumerate(texts, 2)
    ]


ASKED: Final = step(Verb.SEND, 0, task="t", key="k", stream="a2a", generation=1)
EVENTS: Final = ["working", "<piece 1>", "<piece 2>", "completed"]
WRITTEN: Final = [
    ASKED,
    lease(10, 1, generation=2),
    under(Verb.WRITE, 20, "l1", text="<piece 1>", generation=3),
    under(Verb.WRITE, 30, "l1", text="<piece 2>", outcome=Outcome.UNKNOWN),
    under(Verb.WRITE, 35, "l1", text="<piece 2>", generation=4, duplicate=True),
    under(Verb.POST, 40, "l1", generation=5),
    *streamed("one", EVENTS),
    *streamed("other", EVENTS),
]

KEYED: Final = [
    step(Verb.SEND, 0, task="t", key="k", generation=1),
    step(Verb.SEND, 1, task="u", key="k", generation=1),
    LEASED,
    POSTED,
    DRAINED,
    step(Verb.DRAIN, 91, task="u", text="done", is_last=True),
]


def changed(steps: list[Step], place: int, **facts: Any) -> list[Step]:
    return [*steps[:place], structs.replace(steps[place], **facts), *steps[place + 1 :]]


def without(steps: list[Step], *gone: Step) -> list[Step]:
    return [step for step in steps if step not in gone]


def _requeue_of(lease_id: str) -> Step:
    return under(Verb.REQUEUE, 5, lease_id, outcome=Outcome.REFUSED, code="not_leased")


GOOD: Final = {
    "plain": WELL,
    "seen by the operator, and given back because its answer reached nobody": [*WELL, _requeue_of("l0")],
    "superseded": SUPERSEDED,
    "streamed": WRITTEN,
    "two tasks under a key": KEYED,
    "still there": [SENT, step(Verb.STANDING, 99, task="t")],
    "never acknowledged": [structs.replace(SENT, outcome=Outcome.UNKNOWN)],
    "read because the drain was not heard": [*WELL[:3], structs.replace(DRAINED, verb=Verb.READ)],
    "posted by one whose outcome is unknown": changed(WELL, 2, outcome=Outcome.UNKNOWN),
    "requeued by one whose outcome is unknown": changed(SUPERSEDED, 3, outcome=Outcome.UNKNOWN, generation=0),
    "an unknown release that happens much later": [
        SENT,
        LEASED,
        under(Verb.RELEASE, 20, "l1", outcome=Outcome.UNKNOWN),
        lease(70, 2, generation=4),
        under(Verb.POST, 80, "l2", text="done", generation=6),
        DRAINED,
    ],
}

BAD: Final[list[tuple[Rule, list[Step]]]] = [
    (Rule.SEND_LOST, WELL[:3]),
    (Rule.SEND_LOST, [SENT]),
    (Rule.SEND_LOST, without(WRITTEN, *[step for step in WRITTEN if step.verb is Verb.EVENT])),
    (Rule.RESULT_TWICE, [*WELL, structs.replace(DRAINED, began=95, ended=96)]),
    (Rule.RESULT_TWICE, [*SUPERSEDED, structs.replace(SUPERSEDED[7], began=60, ended=61)]),
    (Rule.RESULT_CHANGED, changed(WELL, 3, text="other")),
    (Rule.RESULT_CHANGED, changed(changed(WELL, 2, outcome=Outcome.UNKNOWN), 3, text="other")),
    (Rule.RESULT_CHANGED, changed(SUPERSEDED, 12, text="late")),
    (Rule.RESULT_CHANGED, changed(KEYED, 5, text="other")),
    (Rule.ACCEPTED_TWICE, [*WELL, under(Verb.POST, 85, "l1", text="other", generation=10)]),
    (Rule.ACCEPTED_TWICE, [*WELL, structs.replace(POSTED, began=82, ended=83, generation=11)]),
    (Rule.DONE_TWICE, [*KEYED, step(Verb.POST, 70, task="u", lease="m1", text="done", generation=4)]),
    (Rule.KEY_SPLIT, [*WRITTEN, structs.replace(ASKED, task="u"), step(Verb.STANDING, 99, task="u")]),
    (Rule.LEASED_TWICE, without(SUPERSEDED, SUPERSEDED[3])),
    (Rule.LEASED_TWICE, changed(SUPERSEDED, 3, began=35, ended=36)),
    (Rule.LEASED_TWICE, changed(SUPERSEDED, 3, outcome=Outcome.REFUSED, code="not_permitted")),
    (Rule.ATTEMPT_REPEATED, changed(SUPERSEDED, 4, attempt=1)),
    (Rule.ATTEMPT_REPEATED, changed(SUPERSEDED, 4, began=2, ended=3)),
    (Rule.LEASE_ENDED_TWICE, [*WELL, under(Verb.REQUEUE, 70, "l1", generation=5, ended=85)]),
    (Rule.LEASE_ENDED_TWICE, [*SUPERSEDED, under(Verb.RELEASE, 18, "l1", generation=8, ended=25)]),
    (Rule.SUPERSEDED_WROTE, changed(SUPERSEDED, 5, outcome=Outcome.DONE, code="")),
    (Rule.SUPERSEDED_WROTE, changed(SUPERSEDED, 2, began=22, ended=23)),
    (Rule.SUPERSEDED_WROTE, [*SUPERSEDED, under(Verb.WRITE, 35, "l1", text="<late>", generation=8)]),
    (Rule.SUPERSEDED_WROTE, [*WELL, under(Verb.BEAT, 85, "l1")]),
    (Rule.SUPERSEDED_WROTE, changed(changed(SUPERSEDED, 3, outcome=Outcome.UNKNOWN), 2, began=35, ended=36)),
    (Rule.REFUSED_WITHOUT_CAUSE, [*WELL, _requeue_of("l1")]),
    (Rule.REFUSED_WITHOUT_CAUSE, changed(WELL, 2, outcome=Outcome.REFUSED, code="lease_superseded")),
    (Rule.REFUSED_WITHOUT_CAUSE, [*WELL, under(Verb.BEAT, 20, "l1", outcome=Outcome.REFUSED, code="task_terminal")]),
    (Rule.GENERATION_REPEATED, changed(SUPERSEDED, 4, generation=3)),
    (Rule.GENERATION_REPEATED, changed(SUPERSEDED, 3, generation=9)),
    (Rule.STREAM_BROKEN, without(WRITTEN, WRITTEN[7])),
    (Rule.STREAM_BROKEN, [*WRITTEN, structs.replace(WRITTEN[7], began=150, ended=151)]),
    (Rule.STREAM_BROKEN, [*WRITTEN, structs.replace(WRITTEN[9], generation=6, began=150, is_last=False)]),
    (Rule.STREAM_BROKEN, without(WRITTEN, WRITTEN[6])),
    (Rule.STREAM_UNFINISHED, without(WRITTEN, WRITTEN[9])),
    (Rule.STREAMS_DIFFER, changed(WRITTEN, 10, text="submitted")),
    (Rule.WRITE_LOST, changed(changed(WRITTEN, 7, text="<none>"), 11, text="<none>")),
    (Rule.WRITE_LOST, changed(WRITTEN, 2, generation=8)),
    (Rule.WRITE_TWICE, changed(changed(WRITTEN, 7, text="<piece 2>"), 11, text="<piece 2>")),
    (Rule.UNTYPED, [*WELL, step(Verb.DRAIN, 50, outcome=Outcome.UNKNOWN, code="internal")]),
    (Rule.UNTYPED, [*WELL, under(Verb.BEAT, 50, "l1", outcome=Outcome.UNKNOWN, code="internal")]),
]


@pytest.mark.parametrize("steps", GOOD.values(), ids=GOOD)
def test_a_history_in_which_all_is_well_has_no_violation(steps: list[Step]) -> None:
    assert violations(steps) == []


@pytest.mark.parametrize(("rule", "steps"), BAD, ids=[f"{rule.name} {number}" for number, (rule, _) in enumerate(BAD)])
def test_a_broken_promise_is_found(rule: Rule, steps: list[Step]) -> None:
    assert rule in {found.rule for found in violations(steps)}


def test_every_promise_can_be_seen_broken() -> None:
    assert {rule for rule, _ in BAD} == set(Rule)


def test_the_order_in_which_histories_come_does_not_matter() -> None:
    for steps in GOOD.values():
        assert violations(reversed(steps)) == []
    for _, steps in BAD:
        assert {found.rule for found in violations(reversed(steps))} == {found.rule for found in violations(steps)}
