"""Whether the mailbox kept its promises, told from what its clients saw and from nothing else.

An acknowledged step happened at some moment between its beginning and its end. One whose outcome is unknown happened at
some moment after its beginning, or never: its request may lie in a frozen daemon for as long as that is frozen. What
follows from this for certain, and contradicts a promise, is a violation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import combinations, pairwise
from typing import Final, NamedTuple

from tests.cluster.history import Outcome, Step, Verb


class Rule(StrEnum):
    """The promises, each by what breaks it."""

    SEND_LOST = "an acknowledged send has no result, and is not there either"
    RESULT_TWICE = "a result reached its sender twice"
    RESULT_CHANGED = "a result is not the one that was accepted"
    ACCEPTED_TWICE = "two results of a task were accepted"
    DONE_TWICE = "work under one key was answered under two tasks"
    KEY_SPLIT = "one key led to two tasks"
    LEASED_TWICE = "a lease was handed out while another one held"
    ATTEMPT_REPEATED = "attempts do not grow from lease to lease"
    LEASE_ENDED_TWICE = "a lease ended twice"
    SUPERSEDED_WROTE = "a lease that had ended was written under"
    REFUSED_WITHOUT_CAUSE = "a lease that nobody ended was refused"
    GENERATION_REPEATED = "generations do not grow from change to change"
    STREAM_BROKEN = "a stream has a gap or a repeat"
    STREAM_UNFINISHED = "a stream has no end"
    STREAMS_DIFFER = "two streams of a task differ"
    WRITE_LOST = "an acknowledged write is not in the stream"
    WRITE_TWICE = "a write is in the stream twice"
    UNTYPED = "an answer that says nothing of the outcome"


class Violation(NamedTuple):
    rule: Rule
    task: str
    why: str


_ENDS: Final = (Verb.POST, Verb.RELEASE, Verb.REQUEUE)
_USES: Final = (Verb.BEAT, Verb.WRITE, Verb.PART)
_MOVES: Final = (Verb.LEASE, Verb.WRITE, Verb.PART, *_ENDS)
_ENDED: Final = ("lease_superseded", "task_terminal", "result_conflict", "not_leased", "lease_mismatch")


def violations(steps: Iterable[Step]) -> list[Violation]:
    """All there are, task by task."""
    of_task, of_key = defaultdict[str, list[Step]](list), defaultdict[str, list[Step]](list)
    for step in sorted(steps, key=lambda step: step.began):
        of_task[step.task].append(step)
        if step.verb is Verb.SEND and step.key and step.outcome is Outcome.DONE:
            of_key[step.key].append(step)
    found = [Violation(rule, task, why) for task, own in of_task.items() for rule, why in _of_one(own, bool(task))]
    for key, sends in of_key.items():
        alike = {step.task: of_task[step.task] for step in sends}
        found += [Violation(rule, ", ".join(sorted(alike)), why) for rule, why in _of_a_key(key, sends, alike)]
    return found


_Found = Iterator[tuple[Rule, str]]


def _of_one(steps: list[Step], is_task: bool) -> _Found:
    yield from _untyped(steps)
    if is_task:
        for check in _CHECKS:
            yield from check(steps)


# --- words ---------------------------------------------------------------------------------------------------


def _done(steps: Iterable[Step], *verbs: Verb) -> list[Step]:
    return [step for step in steps if step.verb in verbs and step.outcome is Outcome.DONE]


def _tried(steps: Iterable[Step], *verbs: Verb) -> list[Step]:
    """What happened, or may have."""
    return [step for step in steps if step.verb in verbs and step.outcome is not Outcome.REFUSED]


def _told(step: Step) -> str:
    return f"{step.client} {step.verb} {step.lease[:8]} at {step.began:.3f}-{step.ended:.3f}"


def _final(steps: Iterable[Step]) -> list[Step]:
    """The results that reached somebody who was to have them."""
    return [step for step in _done(steps, Verb.DRAIN, Verb.READ) if step.is_last]


# --- sends and results ---------------------------------------------------------------------------------------


def _untyped(steps: list[Step]) -> _Found:
    for step in steps:
        if step.code == "internal":
            yield Rule.UNTYPED, f"{_told(step)}: {step.text}"


def _lost(steps: list[Step]) -> _Found:
    is_there = _final(steps) or _done(steps, Verb.STANDING) or any(step.is_last for step in _done(steps, Verb.EVENT))
    for send in _done(steps, Verb.SEND)[:1]:
        if not is_there:
            yield Rule.SEND_LOST, _told(send)


def _drained_twice(steps: list[Step]) -> _Found:
    drained = Counter((step.is_last, step.attempt, step.text) for step in _done(steps, Verb.DRAIN))
    finals = sum(count for (is_last, _, _), count in drained.items() if is_last)
    if finals > 1:
        yield Rule.RESULT_TWICE, f"{finals} final results were drained"
    for (is_last, _, text), count in drained.items():
        if not is_last and count > 1:
            yield Rule.RESULT_TWICE, f"the partial {text!r} was drained {count} times"


def _accepted(steps: list[Step]) -> _Found:
    accepted = _done(steps, Verb.POST)
    if len({(step.lease, step.text) for step in accepted}) > 1:
        yield Rule.ACCEPTED_TWICE, "; ".join(f"{_told(step)}: {step.text!r}" for step in accepted)
    elif sum(not step.duplicate for step in accepted) > 1:
        yield Rule.ACCEPTED_TWICE, "the same result was accepted twice as new"


def _changed(steps: list[Step]) -> _Found:
    """Of a task, or of all tasks under one key."""
    texts = {step.text for step in _final(steps)}
    if len(texts) > 1:
        yield Rule.RESULT_CHANGED, f"its sender saw {sorted(texts)}"
    accepted = {step.text for step in _done(steps, Verb.POST)} or {step.text for step in _tried(steps, Verb.POST)}
    for text in texts - accepted:
        yield Rule.RESULT_CHANGED, f"{text!r} instead of {sorted(accepted)}"


def _changed_alone(steps: list[Step]) -> _Found:
    if not any(step.key for step in steps if step.verb is Verb.SEND):
        yield from _changed(steps)


# --- leases --------------------------------------------------------------------------------------------------


def _leased(steps: list[Step]) -> _Found:
    leases = sorted(_done(steps, Verb.LEASE), key=lambda step: (step.attempt, step.ended))
    for earlier, later in pairwise(leases):
        if earlier.attempt == later.attempt or later.ended < earlier.began:
            yield Rule.ATTEMPT_REPEATED, f"{_told(earlier)}, attempt {earlier.attempt}; {_told(later)}, {later.attempt}"
        ends = [step for step in _tried(steps, Verb.RELEASE, Verb.REQUEUE) if step.lease == earlier.lease]
        if not any(end.began <= later.ended for end in ends):
            yield Rule.LEASED_TWICE, f"{_told(earlier)}; {_told(later)}"


def _ended_twice(steps: list[Step]) -> _Found:
    for lease, ends in _by_lease(_done(steps, *_ENDS)).items():
        new = [step for step in ends if not step.duplicate]
        if len(new) > 1 and {step.verb for step in new} != {Verb.POST}:
            yield Rule.LEASE_ENDED_TWICE, f"{lease}: " + "; ".join(map(_told, new))


def _superseded(steps: list[Step]) -> _Found:
    """Who begins to write when another already knows that the lease is over is refused."""
    leases = _done(steps, Verb.LEASE)
    attempt_of = {step.lease: step.attempt for step in leases}
    ends = _done(steps, *_ENDS)
    for step in _done(steps, *_USES, *_ENDS):
        if not step.lease or (step.duplicate and step.verb in _ENDS):
            continue
        over = [end for end in ends if end is not step and end.lease == step.lease and end.ended < step.began]
        over += [
            lease
            for lease in leases
            if lease.attempt > attempt_of.get(step.lease, lease.attempt) and lease.ended < step.began
        ]
        if over:
            yield Rule.SUPERSEDED_WROTE, f"{_told(step)} after {_told(over[0])}"


def _refused(steps: list[Step]) -> _Found:
    heard_of = {step.lease for step in _done(steps, Verb.LEASE)}
    for step in steps:
        if step.outcome is not Outcome.REFUSED or step.verb not in _USES + _ENDS or step.code not in _ENDED:
            continue
        if step.verb is Verb.REQUEUE and step.lease not in heard_of:
            continue  # its answer reached nobody: it was given back after the operator had seen it
        causes = [
            other
            for other in _tried(steps, *_ENDS)
            if other is not step
            and other.began < step.ended
            and (other.lease == step.lease or step.verb is Verb.REQUEUE)
        ]
        if not causes:
            yield Rule.REFUSED_WITHOUT_CAUSE, f"{_told(step)}: {step.code}"


def _by_lease(steps: Iterable[Step]) -> dict[str, list[Step]]:
    found = defaultdict[str, list[Step]](list)
    for step in steps:
        found[step.lease].append(step)
    return found


# --- generations and streams ---------------------------------------------------------------------------------


def _generations(steps: list[Step]) -> _Found:
    moves = [step for step in _done(steps, *_MOVES) if not step.duplicate and step.generation]
    for one, other in combinations(moves, 2):
        if one.generation == other.generation:
            yield Rule.GENERATION_REPEATED, f"{_told(one)} and {_told(other)}: both {one.generation}"
        elif one.generation > other.generation and one.ended < other.began:
            yield Rule.GENERATION_REPEATED, f"{_told(one)} at {one.generation}, then {_told(other)}, {other.generation}"


def _streams(steps: list[Step]) -> _Found:
    streams = defaultdict[tuple[str, str], list[Step]](list)
    for step in sorted(_done(steps, Verb.EVENT), key=lambda step: step.ended):
        streams[step.client, step.stream].append(step)
    whole = {}
    for (client, name), events in streams.items():
        numbers = [step.generation for step in events]
        if numbers != list(range(2, len(numbers) + 2)):  # the first is the send itself
            yield Rule.STREAM_BROKEN, f"{client}, {name}: {numbers}"
        elif any(step.is_last for step in events[:-1]):
            yield Rule.STREAM_BROKEN, f"{client}, {name}: it goes on behind its end"
        elif not events[-1].is_last:
            yield Rule.STREAM_UNFINISHED, f"{client}, {name}: up to {numbers[-1]}"
        else:
            whole[f"{client}, {name}"] = [step.text for step in events]
    for (one, first), (other, second) in pairwise(whole.items()):
        if first != second:
            yield Rule.STREAMS_DIFFER, f"{one}: {first}; {other}: {second}"
    for name, texts in whole.items():
        for rule, why in _writes(steps, texts):
            yield rule, f"{name}: {why}"


def _writes(steps: list[Step], texts: list[str]) -> _Found:
    """What a holder was told is written is there once, at its generation if that is known."""
    for text in dict.fromkeys(step.text for step in _tried(steps, Verb.WRITE)):
        places = [place for place, event in enumerate(texts, 2) if text in event]
        done = [step for step in _done(steps, Verb.WRITE) if step.text == text]
        if len(places) > 1:
            yield Rule.WRITE_TWICE, f"{text!r} at {places}"
        elif done and not places:
            yield Rule.WRITE_LOST, f"{text!r}"
        elif done and not done[0].duplicate and places != [done[0].generation]:
            yield Rule.WRITE_LOST, f"{text!r} is at {places}, not at {done[0].generation}"


# --- keys ----------------------------------------------------------------------------------------------------


def _of_a_key(key: str, sends: list[Step], alike: dict[str, list[Step]]) -> _Found:
    """A key of the protocol names one task; one of the mailbox joins several to one work."""
    if any(send.stream for send in sends):
        if len(alike) > 1:
            yield Rule.KEY_SPLIT, key
        return
    answered = [task for task, steps in alike.items() if _done(steps, Verb.POST)]
    if len(answered) > 1:
        yield Rule.DONE_TWICE, f"{key}: {answered}"
    yield from _changed([step for steps in alike.values() for step in steps])


_CHECKS: Final[tuple[Callable[[list[Step]], _Found], ...]] = (
    _lost,
    _drained_twice,
    _accepted,
    _changed_alone,
    _leased,
    _ended_twice,
    _superseded,
    _refused,
    _generations,
    _streams,
)
