"""Signals to a run: how one is told, and which ones wait to be heard. (Contract 22.)

A message to a run is a signal, too. What a run hears is kept until the commit that takes it (`run.commit`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, Final

from msgspec import Raw, structs

from covenant.model import event as e
from covenant.model.command import SendTask, SignalRun
from covenant.model.error import InvalidInput, Malformed, NotARun, TaskTerminal, TooLarge, UnknownTask
from covenant.model.limits import Limits
from covenant.model.message import Message
from covenant.model.record import Said, Slot, TaskRecord, said_key
from covenant.model.run import EFFECT, MESSAGE, Signal, Signaled, SignalSeen, signal_key
from covenant.model.view import Sent
from covenant.rules.context import Commit, Context, Lacks, View, each
from covenant.rules.envelope import check_id, check_key
from covenant.rules.page import Room
from covenant.rules.retention import is_free
from covenant.rules.run.pattern import matches
from covenant.rules.run.value import check_value
from covenant.rules.run.wake import wakes
from covenant.rules.send import send
from covenant.rules.sight import is_visible, visible_task

_NEAR: Final = 64  # of the signals that wait: who hears one after the other finds it there


def signal(command: SignalRun, view: View, ctx: Context) -> Commit:
    task_id = check_id(command.task_id, "task_id")
    name = _check_name(command.name, "name", ctx.limits)
    value = check_value(command.value, "value", ctx.limits)
    if command.start is not None and command.start.id and check_id(command.start.id, "start.id") != task_id:
        raise Malformed(f"a start has the id of the run, {task_id}, or none", field="start.id")
    known = view.get(task_id)
    if command.start is not None and (is_free(known, ctx) or not is_visible(known, command.by, ctx)):
        return _start(command, task_id, name, value, view, ctx)
    record = visible_task(task_id, command.by, view, ctx)
    if record.outcome is not None:
        raise TaskTerminal(f"task {task_id} has ended: {record.outcome}", task_id=task_id, outcome=record.outcome)
    signal_id = _signal_id(command, ctx)
    key = signal_key(task_id, signal_id)
    if command.key is not None and view.get(key) is not None:
        return Commit((), Signaled(task_id, signal_id, record.generation, duplicate=True))
    _check_room(task_id, view, ctx)
    woken = wakes(record, view, name)
    events: list[e.Event] = [e.Signaled(key, name, value)]
    if woken is not None:
        events.append(woken)
    moved = 0 if woken is None else int(woken.restates)
    return Commit(tuple(events), Signaled(task_id, signal_id, record.generation + moved))


def _start(command: SignalRun, task_id: str, name: str, value: Raw, view: View, ctx: Context) -> Commit:
    """Send the task of a run together with its first signal, in one commit.

    Raises TaskConflict, as any send, if the id belongs to a task that the sender cannot see; UnknownTask if it belonged
    to a task of the sender that is gone; NotARun if another task with the same idempotency key would answer the start:
    no run would begin, and nobody would receive the signal.
    """
    assert command.start is not None
    task = structs.replace(command.start, id=task_id)
    commit = send(SendTask(command.by, task), view, ctx)
    sent = commit.reply
    assert isinstance(sent, Sent)
    if sent.duplicate:
        raise UnknownTask(f"no task {task_id}", task_id=task_id)
    if sent.replayed or sent.follows is not None:
        why = "another task has its idempotency key, and answers it: send it without a signal, or signal that task"
        raise NotARun(f"task {task_id} would begin no run: {why}", task_id=task_id, held_by=_holder(commit, view))
    signal_id = _signal_id(command, ctx)
    commit.events = (*commit.events, e.Signaled(signal_key(task_id, signal_id), name, value))
    commit.reply = Signaled(task_id, signal_id, sent.generation, started=True)
    return commit


def _holder(commit: Commit, view: View) -> str | None:
    """Return the id of the task that holds the idempotency key of the one that is sent."""
    slots = (view.get(event.slot) for event in commit.events if isinstance(event, e.Sent) and event.slot is not None)
    return next((slot.leader or slot.source for slot in slots if isinstance(slot, Slot)), None)


def _signal_id(command: SignalRun, ctx: Context) -> str:
    """One under a key of its sender has an id made of both."""
    if command.key is None:
        return ctx.ids.lease()
    check_key(command.key, "key", ctx.limits.key_bytes_max)
    sender = "" if command.by is None else command.by.pubkey
    return "k" + sha256(f"{sender}\n{command.key}".encode()).hexdigest()[:32]


def has_key(signal: Signal) -> bool:
    return signal.id.startswith("k")


def _check_name(value: str, field: str, limits: Limits) -> str:
    """A signal's name. Those of decisions are nobody's to send."""
    check_key(value, field, limits.key_bytes_max)
    if value.startswith(EFFECT) or "*" in value:
        raise Malformed(f"{field} is no pattern, and does not begin with {EFFECT}", field=field)
    return value


def _check_room(task_id: str, view: View, ctx: Context) -> None:
    limit = ctx.limits.signals_max
    if view.signal_count(task_id) >= limit:
        raise TooLarge("too many signals wait for this run", field="signals", limit=limit)


def message_signal(
    message: Message, number: int, record: TaskRecord, view: View, ctx: Context
) -> tuple[list[e.Event], bool]:
    """A message to a run is a signal to it: under the name that the message gives, else as a message. What it does not
    name it does not answer: who says something beside the question has approved of nothing. With whether it is what
    the run waits for."""
    task_id = record.task.id
    _check_room(task_id, view, ctx)
    name = name_of(message, ctx.limits)
    woken = wakes(record, view, name)
    events: list[e.Event] = [e.Signaled(signal_key(task_id, ctx.ids.lease()), name, said=number)]
    if woken is not None:
        events.append(e.Woken(task_id))  # the message itself has changed the status
    return events, woken is not None


def name_of(message: Message, limits: Limits) -> str:
    """The name under which a message is heard. One that a signal cannot have is none: the message may have been meant
    for a task that is no run, and there such a member is the client's own."""
    name: Any = None if message.metadata is None else message.metadata.get("signal")
    try:
        return MESSAGE if name is None else _check_name(name, "signal", limits)
    except InvalidInput:
        return MESSAGE


def first_signals(
    patterns: Sequence[str], task_id: str, view: View, ctx: Context, takes: frozenset[str]
) -> list[SignalSeen]:
    """For each pattern the oldest signal that waits."""
    if not patterns:
        return []
    firsts: list[Signal | None] = []
    for oldest in _oldest(task_id, _NEAR + len(takes), view, ctx):
        waiting = [signal for signal in oldest if signal.id not in takes]
        firsts = [next((one for one in waiting if matches(pattern, one.name)), None) for pattern in patterns]
        if None not in firsts:
            break
    shown: list[SignalSeen] = []
    found = {first.id: first for first in firsts if first is not None}
    each(lambda signal: shown.append(seen(signal, task_id, view)), found.values())
    return shown


def _oldest(task_id: str, near: int, view: View, ctx: Context) -> Iterator[Sequence[Signal]]:
    """What waits, oldest first: a few of them, and all for whom those are not enough."""
    for limit in (near, ctx.limits.signals_max):
        oldest = view.signals(task_id, limit)
        yield oldest
        if len(oldest) < limit:
            return


def every_signal(patterns: Sequence[str], task_id: str, view: View, ctx: Context) -> list[SignalSeen]:
    """All that fit and that one answer and one commit carry, oldest first."""
    room = Room(ctx.limits)
    count_max = ctx.limits.batch_max
    fitting: list[Signal] = []
    for oldest in _oldest(task_id, count_max, view, ctx):
        fitting = [signal for signal in oldest if any(matches(pattern, signal.name) for pattern in patterns)]
        if len(fitting) >= count_max:
            break
    shown: list[SignalSeen] = []
    lacks = Lacks()
    for signal in fitting[:count_max]:
        with lacks:
            one = seen(signal, task_id, view)
            if not room.takes(one):
                break
            shown.append(one)
    lacks.settle()
    return shown


def seen(signal: Signal, task_id: str, view: View) -> SignalSeen:
    message = None
    if signal.said is not None:
        said = view.get(said_key(task_id, signal.said))
        message = said.message if isinstance(said, Said) else None
    return SignalSeen(signal.id, signal.name, signal.at_ms, signal.order, signal.value, signal.said, message)
