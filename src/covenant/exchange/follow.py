"""Following a task: everything that happened to it since a generation, in order, each once. (Contract 15, 17.)

What happened is told from the log, so it is the same for whoever asks, from any daemon and after any restart. Who is
further back than the log reaches is told that, and begins anew from the task as it is.

The log of a task is a chain that leads back from its newest event. Who is far behind is told its oldest stretch first:
one walk back marks where stretches begin, and they are read again as they are told. However far it is, no more than one
stretch is in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from msgspec import Struct

from covenant.exchange.exchange import Exchange
from covenant.model.audit import Logged
from covenant.model.peer import Caller
from covenant.model.protocol import Update
from covenant.model.query import GetPlace
from covenant.model.view import Place
from covenant.rules.protocol import steps_in, updates_of

_COMMITS_AT_ONCE: Final = 500
_STEPS_MAX: Final = 200_000  # that are remembered at once; who is further behind begins anew


class Trail(Struct, frozen=True):
    """`is_whole`: nothing is missing between the generation that was asked for and the first of these. There may be
    more behind the last."""

    updates: list[Update]
    is_whole: bool


class Step(Struct, frozen=True, gc=False):
    """A commit that moved a task: where it is in the log, and the generation before it."""

    seq: int
    before: int


class Steps(Struct, frozen=True):
    """What happened to a task by where it is told, for who takes long over each of them. The newest first."""

    place: Place
    steps: list[Step]
    is_whole: bool


async def steps_since(exchange: Exchange, caller: Caller, task_id: str, after: int) -> Steps:
    place: Place = await exchange.ask(caller, GetPlace(exchange.by(caller), task_id))
    generation, seq = place.generation, place.order
    steps: list[Step] = []
    while generation > after and seq > 0 and len(steps) <= _STEPS_MAX:
        commits = await exchange.store.log_trail(seq, place.task_id, _COMMITS_AT_ONCE)
        if not commits:
            break
        for logged in commits:
            moved = steps_in(logged, place.task_id)
            if moved:
                generation -= moved
                steps.append(Step(seq, generation))
            seq = logged.previous(place.task_id)
            if generation <= after:
                break
    return Steps(place, steps, generation <= after)


async def updates_at(exchange: Exchange, place: Place, step: Step) -> list[Update]:
    """Nothing when the log has lost it meanwhile."""
    commits = await exchange.store.log_trail(step.seq, place.task_id, 1)
    return updates_of(commits[0], place.task_id, place.context_id, step.before) if commits else []


async def follow(exchange: Exchange, caller: Caller, task_id: str, after: int) -> AsyncIterator[Trail]:
    """Until the task has ended, or the daemon does. A trail that is not whole is the last. Who follows has its place
    among those who wait, from its beginning to its end: it is not refused half way."""
    while True:
        async for seen in _stretches(exchange, caller, task_id, after):
            yield seen
            if not seen.is_whole or seen.updates[-1].ends:
                return
            after = seen.updates[-1].generation
        if exchange.is_draining:
            return
        entry = await exchange.watch(caller, task_id, after, exchange.bounds.wait_ms_max, has_place=True)
        if entry.outcome is not None and entry.generation <= after:
            return


class _Mark(Struct, frozen=True):
    """An event of a task, and the generation that it led to."""

    seq: int
    generation: int


async def _stretches(exchange: Exchange, caller: Caller, task_id: str, after: int) -> AsyncIterator[Trail]:
    """The oldest first, up to the task as it is now."""
    place: Place = await exchange.ask(caller, GetPlace(exchange.by(caller), task_id))
    here = _Mark(place.order, place.generation)
    marks: list[_Mark] = []
    commits: Sequence[Logged] = ()
    while here.generation > after:
        marks.append(here)
        commits = await _read(exchange, here, place, after)
        if not commits:
            yield Trail([], False)
            return
        *_, here = _walk(commits, here, place, after)
    while marks:
        mark = marks.pop()
        if mark.generation <= after:
            continue  # signs of life alone, which move nothing
        updates = await _told(exchange, mark, place, after, commits)
        commits = ()
        yield Trail(updates, bool(updates))
        if not updates:
            return
        after = updates[-1].generation


async def _read(exchange: Exchange, mark: _Mark, place: Place, after: int) -> Sequence[Logged]:
    """Who follows live wants one commit, and not all that came before it."""
    limit = min(mark.generation - after, _COMMITS_AT_ONCE)
    return await exchange.store.log_trail(mark.seq, place.task_id, limit) if mark.seq > 0 else ()


def _walk(commits: Sequence[Logged], mark: _Mark, place: Place, after: int) -> Iterator[_Mark]:
    """Commit by commit back: what stood before each, as far as to this generation."""
    generation = mark.generation
    for logged in commits:
        if generation <= after:
            return
        generation -= steps_in(logged, place.task_id)
        yield _Mark(logged.previous(place.task_id), generation)


async def _told(exchange: Exchange, mark: _Mark, place: Place, after: int, commits: Sequence[Logged]) -> list[Update]:
    """From a mark back to this generation, in the protocol's words, the oldest first; nothing when the log has been cut
    since the mark was made. What is read again may come in smaller pieces."""
    steps: list[list[Update]] = []
    while mark.generation > after:
        commits = commits or await _read(exchange, mark, place, after)
        if not commits:
            return []
        for logged, before in zip(commits, _walk(commits, mark, place, after), strict=False):
            steps.append(updates_of(logged, place.task_id, place.context_id, before.generation))
            mark = before
        commits = ()
    return [update for step in reversed(steps) for update in step if update.generation > after]
