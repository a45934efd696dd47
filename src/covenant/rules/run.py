"""Runs: what a durable agent did since its last commit, all at once; and how it waits, wakes and is taken up again.
(Contract 18-24.)

A commit of a run carries its lease, so an old holder is refused, and its number, so one that is repeated is done once.
Whether a run parks is decided in the commit that asks for it, against what is there in that moment; whether it wakes,
in the commit that brings what it waits for (`rules.wake`). So no wake-up can fall in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import islice, takewhile
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, structs

from covenant.model import event as e
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow
from covenant.model.command import (
    CancelChildren,
    Command,
    CommitRun,
    JudgeEffect,
    PostResult,
    ResumeRun,
    SendTask,
    SignalRun,
    SweepRun,
    WakeRun,
)
from covenant.model.error import (
    CovenantError,
    KeyReused,
    LeaseMismatch,
    Malformed,
    NotARun,
    NotInDoubt,
    NotLeased,
    NotPermitted,
    NotProvenDead,
    ResultConflict,
    ResultGone,
    ResumesExhausted,
    TaskConflict,
    TaskTerminal,
    TooLarge,
    WrongStep,
)
from covenant.model.message import Message
from covenant.model.record import Asks, Outcome, Said, TaskRecord, TaskState, said_key
from covenant.model.run import (
    EFFECT,
    MESSAGE,
    NOTHING,
    EntryDraft,
    EntryRole,
    EntryType,
    Memo,
    Resumed,
    Run,
    RunCommit,
    Signal,
    Signaled,
    SignalSeen,
    Standing,
    Step,
    Wait,
    entry_key,
    mark_key,
    run_key,
    signal_key,
    step_key,
)
from covenant.model.task import Result, Task
from covenant.model.view import Moved
from covenant.rules.context import Commit, Context, View
from covenant.rules.end import end, end_asked
from covenant.rules.envelope import (
    check_count,
    check_id,
    check_json,
    check_key,
    check_text,
    check_time,
    digest_of,
    seal_message,
    seal_result,
    seal_task,
)
from covenant.rules.lease import held
from covenant.rules.page import Room
from covenant.rules.repair import declared_safety
from covenant.rules.result import post
from covenant.rules.retention import is_free
from covenant.rules.send import send
from covenant.rules.sight import lent, task_of_lease, visible_task

_NUMBER_MAX: Final = 2**53
_SIGNS_OF_LIFE: Final = 8  # in the time after which a silent worker may be taken for dead
_VERDICTS: Final = ("done", "failed", "retry")


# --- a commit ----------------------------------------------------------------------------------------------


def commit(command: CommitRun, view: View, ctx: Context) -> Commit:
    lease_id = check_id(command.lease_id, "lease_id")
    made = _checked(command.commit, ctx)
    record = task_of_lease(lease_id, command.by, view, ctx)
    run = _run_of(record, view)
    if run is not None and (run.step, run.step_lease) == (made.number, lease_id):
        return Commit((), _repeated(made, command.incarnation, record, view, ctx))
    held(lease_id, record)
    step = 0 if run is None else run.step
    if made.number != step + 1:
        raise WrongStep(f"the next step of this run is {step + 1}", task_id=record.task.id, expected=step + 1)
    return _Committing(command, made, record, run, view, ctx).all()


class _Committing:
    """One commit in the making: what it says first is seen by what it says later."""

    def __init__(
        self, command: CommitRun, made: RunCommit, record: TaskRecord, run: Run | None, view: View, ctx: Context
    ) -> None:
        self.made = made
        self.record = record
        self.task_id = record.task.id
        self.entries = 0 if run is None else run.entries
        self.run = run
        self.view = view
        self.ctx = ctx
        self.incarnation = command.incarnation
        self.agent = record.task.recipient
        self.events: list[e.Event] = []
        self.then: list[Command] = []
        self.outcomes: dict[str, Result] = {}  # of tasks that end in this commit
        self.sent: dict[str, Task] = {}
        self.leases: dict[str, str] = {}
        self.attempts: dict[str, int] = {}
        self.marks: set[str] = set()
        self.taken: set[str] = set()
        self.said = record.said
        self.generation = record.generation

    def all(self) -> Commit:
        made = self.made
        if self.run is None:
            self.events += _beginning(self.record, self.view, self.ctx)
        else:
            self._show_life()
        for result in made.answers:
            self._answer(result)
        for draft in made.entries:
            self._enter(draft)
        self._step()
        for task in made.tasks:
            self._send(task)
        for task_id in made.begins:
            self._take_up(task_id)
        for task_id in made.cancels:
            self._cancel(task_id)
        for signal_id in made.takes:
            self._take(signal_id)
        standing = self._finish()
        if made.checkpoint is not UNSET:
            self.then.append(SweepRun(None, self.task_id))
        return Commit(tuple(self.events), standing, then=tuple(self.then))

    def _show_life(self) -> None:
        """A commit is a sign of life; where steps come fast, one of several is enough."""
        lease = self.record.lease
        assert lease is not None
        if self.ctx.now - lease.seen_ms >= self.ctx.limits.run_lapse_ms // _SIGNS_OF_LIFE:
            self.events.append(e.Heartbeat(self.task_id))

    def _answer(self, result: Result) -> None:
        """A task that the run's own holder did. If it lost that task meanwhile, what it went on to do is void."""
        child = self.view.get(check_id(result.task_id, "task_id"))
        if not isinstance(child, TaskRecord) or child.run != self.task_id:
            raise NotPermitted("it answers the tasks of its own run only", task_id=result.task_id)
        if result.task_id in self.outcomes:
            raise ResultConflict(f"task {result.task_id} is answered twice", task_id=result.task_id)
        posted = post(PostResult(self.agent, result, self.incarnation), self.view, self.ctx)
        if isinstance(posted.reply, CovenantError):
            raise posted.reply
        self.events += posted.events
        self.outcomes[result.task_id] = result if child.result is None else child.result

    def _enter(self, draft: EntryDraft) -> None:
        number = self.entries + 1
        if number > self.ctx.limits.entries_max:
            raise TooLarge("the run has too many entries", field="entries", limit=self.ctx.limits.entries_max)
        if draft.parent >= number:
            raise Malformed("the parent of an entry comes before it", field="parent")
        if draft.key is not None:
            key, digest = marked(self.task_id, draft.key), digest_of_entry(draft)
            if key in self.marks or self.view.get(key) is not None:
                raise KeyReused(f"an entry under the key {draft.key} is there", key=draft.key)
            self.marks.add(key)
            self.events.append(e.Marked(key, number, digest))
        said = draft.said
        if draft.says is not None:
            said = self._say(draft.says)
        elif said is not None and said > self.record.said:
            raise Malformed("no such message", field="said")
        self.entries = number
        key = entry_key(self.task_id, number)
        parent = None if draft.parent == number - 1 else draft.parent
        kept = e.EntryKept(key, draft.id, draft.role, parent, draft.content, draft.type, said, draft.turn)
        self.events.append(kept)

    def _say(self, message: Message) -> int:
        if self.said - self.record.heard >= self.ctx.limits.messages_max:
            raise TooLarge("the task has too many messages", field="says", limit=self.ctx.limits.messages_max)
        self.said += 1
        self.generation += 1
        self.events += [e.Updated(self.task_id), e.Said(said_key(self.task_id, self.said), message)]
        return self.said

    def _step(self) -> None:
        made, lease = self.made, self.record.lease
        assert lease is not None
        if not 0 <= made.leaf <= self.entries:
            raise Malformed("the leaf is one of the entries", field="leaf")
        is_checkpoint = made.checkpoint is not UNSET
        state = NOTHING if made.checkpoint is UNSET else made.checkpoint
        key = run_key(self.task_id)
        count = len(made.entries)
        self.events.append(e.Stepped(key, made.number, lease.lease_id, count, made.leaf, is_checkpoint, state))
        if made.memos:
            self.events.append(e.StepKept(step_key(self.task_id, made.number), tuple(made.memos)))

    def _send(self, task: Task) -> None:
        """A task of the run. Its id is told by what it asks for: there before, it is the same."""
        own = structs.replace(task, parent=self.task_id)
        try:
            sealed = seal_task(own, self.agent, self.ctx)
        except CovenantError as refusal:
            refusal.details["task_id"] = task.id  # the run may go on without it
            raise
        twin, known = self.sent.get(sealed.id), self.view.get(sealed.id)
        if twin is not None:
            if digest_of(twin) != digest_of(sealed):
                raise TaskConflict(f"the id {sealed.id} is taken by other content", task_id=sealed.id)
        elif is_free(known, self.ctx):
            self.sent[sealed.id] = sealed
            self.events.append(e.Sent(sealed.id, sealed, run=self.task_id, run_step=self.made.number))
        elif not isinstance(known, TaskRecord):
            raise ResultGone(f"task {sealed.id} is past its retention", task_id=sealed.id)
        elif known.run != self.task_id or digest_of(known.task) != digest_of(sealed):
            raise TaskConflict(f"the id {sealed.id} is taken by other content", task_id=sealed.id)

    def _child(self, task_id: str) -> object:
        """What was there before this commit; one that it sends has had no life before."""
        return None if task_id in self.sent else self.view.get(task_id)

    def _take_up(self, task_id: str) -> None:
        """The run's holder does the task itself, if nobody else has it: it is the recipient, too."""
        child = self._child(check_id(task_id, "begins"))
        task = self.sent.get(task_id) or (child.task if isinstance(child, TaskRecord) else None)
        if task is None or task.recipient.pubkey != self.agent.pubkey:
            raise NotPermitted("a run takes up its own tasks to itself", task_id=task_id)
        if isinstance(child, TaskRecord) and (child.run != self.task_id or child.ready_for is None):
            return
        if task_id in self.leases:
            return
        lease_id = self.ctx.ids.lease()
        self.leases[task_id] = lease_id
        self.attempts[task_id] = 1 + (child.attempt if isinstance(child, TaskRecord) else 0)
        self.events.append(e.Leased(task_id, lease_id, self.incarnation))

    def _cancel(self, task_id: str) -> None:
        child = self._child(check_id(task_id, "cancels"))
        if not isinstance(child, TaskRecord) or child.run != self.task_id:
            raise NotPermitted("a run cancels its own tasks only", task_id=task_id)
        if child.outcome is None and task_id not in self.outcomes:
            ended = end(child, Outcome.CANCELED, "canceled: by its run", self.view, child.is_run)
            self.events += ended
            if child.is_run:
                self.then.append(CancelChildren(None, task_id))
            self.outcomes[task_id] = Result(task_id, "error", (), "canceled: by its run")

    def _take(self, signal_id: str) -> None:
        key = signal_key(self.task_id, check_text_of(signal_id, "takes", self.ctx))
        signal = self.view.get(key)
        if not isinstance(signal, Signal) or signal.taken or key in self.taken:
            raise Malformed(f"no signal {signal_id} waits", field="takes")
        self.taken.add(key)
        self.events.append(e.SignalTaken(key, _has_key(signal)))

    def _finish(self) -> Standing:
        made = self.made
        if made.result is not None:
            return self._end(made.result)
        if made.wait is None:
            return self._standing()
        found = look(made.wait, self.task_id, self.view, self.ctx, self.outcomes, frozenset(made.takes), self.sent)
        if found.is_there or (self.record.cancel_reason is not None and not made.is_told):
            return self._standing(found=found)
        asks = Asks.INPUT if made.wait.signals and not made.wait.tasks and made.wait.doubt is None else None
        restates = asks is not self.record.asks
        self.generation += restates
        note = self.said if restates and self.said > self.record.said else 0  # what it said last is what it asks
        self.events.append(e.RunWaits(run_key(self.task_id), made.wait, found.left))
        self.events.append(e.Parked(self.task_id, asks, made.wait.until_ms, restates, note))
        return self._standing(parked=True)

    def _end(self, result: Result) -> Standing:
        lease = self.record.lease
        assert lease is not None
        final = Result(
            self.task_id, result.status, result.content, result.error_message, lease.lease_id, None, result.message
        )
        posted = post(PostResult(self.agent, final, lease.incarnation), self.view, self.ctx)
        self.events += posted.events
        self.generation += 2 if final.content else 1
        return self._standing(ended=True)

    def _standing(self, parked: bool = False, ended: bool = False, found: Found | None = None) -> Standing:
        return Standing(
            self.task_id,
            self.made.number,
            self.generation,
            self.ctx.now,
            parked,
            ended,
            self.leases,
            self.attempts,
            [] if found is None else found.outcomes,
            [] if found is None else found.signals,
            self.record.cancel_reason is not None and not ended,
            self.record.cancel_reason,
        )


def _beginning(record: TaskRecord, view: View, ctx: Context) -> list[e.Event]:
    """What its sender said while nobody had begun waits for the run as signals."""
    task_id = record.task.id
    events: list[e.Event] = [e.Begun(task_id), e.RunBegun(run_key(task_id), task_id, record.recipient)]
    for number, said in view.pieces(said_key(task_id, ""), 1, record.said):
        if isinstance(said, Said) and said.message.role == "ROLE_USER":
            name = _named_in(said.message) or MESSAGE
            events.append(e.Signaled(signal_key(task_id, ctx.ids.lease()), name, said=number))
    return events


def _repeated(made: RunCommit, incarnation: str, record: TaskRecord, view: View, ctx: Context) -> Standing:
    """The answer was lost: it is told again, as far as it is still so. A task that another worker has by now is that
    one's."""
    is_held = record.lease is not None and record.lease.lease_id == made_lease(record, view)
    leases, attempts = {}, {}
    for task_id in made.begins:
        child = view.get(task_id)
        if not isinstance(child, TaskRecord) or child.lease is None or child.run != record.task.id:
            continue
        if child.lease.incarnation == incarnation:
            leases[task_id] = child.lease.lease_id
            attempts[task_id] = child.attempt
    found = look(made.wait, record.task.id, view, ctx) if made.wait is not None and is_held else Found()
    return Standing(
        record.task.id,
        made.number,
        record.generation,
        ctx.now,
        parked=record.outcome is None and not is_held,
        ended=record.outcome is not None,
        leases=leases,
        attempts=attempts,
        outcomes=found.outcomes,
        signals=found.signals,
        cancel_requested=record.cancel_reason is not None and record.outcome is None,
        cancel_reason=record.cancel_reason,
    )


def made_lease(record: TaskRecord, view: View) -> str | None:
    """The lease under which the last step of a run was made."""
    run = view.get(run_key(record.task.id))
    return run.step_lease if isinstance(run, Run) else None


# --- what there is -----------------------------------------------------------------------------------------


class Found:
    """Of what a run waits for: what is there, and how many of the tasks are not."""

    def __init__(self) -> None:
        self.outcomes: list[Result] = []
        self.signals: list[SignalSeen] = []
        self.left = 0
        self.is_there = False


def look(
    wait: Wait,
    task_id: str,
    view: View,
    ctx: Context,
    outcomes: dict[str, Result] | None = None,
    takes: frozenset[str] = frozenset(),
    sent: dict[str, Task] | None = None,
) -> Found:
    found = Found()
    ended: list[Result] = []
    for child_id in sorted(wait.tasks):
        result = (outcomes or {}).get(child_id)
        if result is None and child_id not in (sent or {}):
            result = _outcome(child_id, task_id, view)
        if result is not None:
            ended.append(result)
    found.left = len(wait.tasks) - len(ended)
    room = Room(ctx.limits)
    found.outcomes = list(takewhile(room.takes, ended))
    found.signals = _matching(wait.signals, task_id, view, ctx, takes)
    failed = wait.fail_fast and any(result.status == "error" for result in ended)
    tasks = bool(ended) and (wait.first or found.left == 0 or failed)
    found.is_there = tasks or bool(found.signals) or (wait.until_ms is not None and wait.until_ms <= ctx.now)
    return found


def _outcome(child_id: str, task_id: str, view: View) -> Result | None:
    child = view.get(child_id)
    if not isinstance(child, TaskRecord) or child.run != task_id:
        raise ResultGone(f"task {child_id} is none of this run, or past its retention", task_id=child_id)
    return None if child.result is None else lent(child.result)


def _matching(
    patterns: Sequence[str], task_id: str, view: View, ctx: Context, takes: frozenset[str]
) -> list[SignalSeen]:
    """For each pattern the oldest signal that waits."""
    if not patterns:
        return []
    waiting = [signal for signal in view.signals(task_id, ctx.limits.signals_max) if signal.id not in takes]
    found: dict[str, Signal] = {}
    for pattern in patterns:
        first = next((signal for signal in waiting if matches(pattern, signal.name)), None)
        if first is not None:
            found[first.id] = first
    return [seen(signal, task_id, view) for signal in found.values()]


def every_signal(patterns: Sequence[str], task_id: str, view: View, ctx: Context) -> list[SignalSeen]:
    """All that fit and that one answer and one commit carry, oldest first."""
    room = Room(ctx.limits)
    waiting = view.signals(task_id, ctx.limits.signals_max)
    fitting = (signal for signal in waiting if any(matches(pattern, signal.name) for pattern in patterns))
    carried = islice(fitting, ctx.limits.batch_max)
    return list(takewhile(room.takes, (seen(signal, task_id, view) for signal in carried)))


def seen(signal: Signal, task_id: str, view: View) -> SignalSeen:
    message = None
    if signal.said is not None:
        said = view.get(said_key(task_id, signal.said))
        message = said.message if isinstance(said, Said) else None
    return SignalSeen(signal.id, signal.name, signal.at_ms, signal.order, signal.value, signal.said, message)


def matches(pattern: str, name: str) -> bool:
    """Names have segments between dots: `*` is any one, `**` any one or more; all else is itself."""
    if pattern == name:
        return True
    return "*" in pattern and _match(pattern.split("."), name.split("."))


def _match(pattern: list[str], name: list[str]) -> bool:
    """How far each prefix of the pattern reaches, so that no pattern takes longer than its length times the name's."""
    reach = {0}
    for segment in pattern:
        if segment == "**":
            first = min(reach, default=len(name))
            reach = set(range(first + 1, len(name) + 1))
        else:
            reach = {at + 1 for at in reach if at < len(name) and segment in ("*", name[at])}
        if not reach:
            return False
    return len(name) in reach


# --- signals -----------------------------------------------------------------------------------------------


def signal(command: SignalRun, view: View, ctx: Context) -> Commit:
    task_id = check_id(command.task_id, "task_id")
    name = check_name(command.name, "name", ctx)
    value = check_value(command.value, "value", ctx)
    known = view.get(task_id)
    if command.start is not None and is_free(known, ctx):
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
    """The run begins with its first signal, in one commit."""
    assert command.start is not None
    task = structs.replace(command.start, id=task_id)
    started = send(SendTask(command.by, task), view, ctx)
    signal_id = _signal_id(command, ctx)
    started.events = (*started.events, e.Signaled(signal_key(task_id, signal_id), name, value))
    started.reply = Signaled(task_id, signal_id, 1, started=True)
    return started


def _signal_id(command: SignalRun, ctx: Context) -> str:
    """One under a key of its sender has an id made of both."""
    if command.key is None:
        return ctx.ids.lease()
    check_key(command.key, "key", ctx.limits.key_bytes_max)
    sender = "" if command.by is None else command.by.pubkey
    return "k" + sha256(f"{sender}\n{command.key}".encode()).hexdigest()[:32]


def _has_key(signal: Signal) -> bool:
    return signal.id.startswith("k")


def _check_room(task_id: str, view: View, ctx: Context) -> None:
    limit = ctx.limits.signals_max
    if len(view.signals(task_id, limit)) >= limit:
        raise TooLarge("too many signals wait for this run", field="signals", limit=limit)


def wakes(record: TaskRecord, view: View, name: str) -> e.Woken | None:
    """What a signal of this name does to a run that waits for it."""
    if record.state is not TaskState.PARKED or record.ready_for is not None:
        return None
    run = view.get(run_key(record.task.id))
    if not isinstance(run, Run) or run.wait is None:
        return None
    if not any(matches(pattern, name) for pattern in run.wait.signals):
        return None
    return e.Woken(record.task.id, restates=record.asks is not None)


def message_signal(
    message: Message, number: int, record: TaskRecord, view: View, ctx: Context
) -> tuple[list[e.Event], bool]:
    """A message to a run is a signal to it: under the name that the message gives, else as a message. What it does not
    name it does not answer: who says something beside the question has approved of nothing. With whether it is what
    the run waits for."""
    task_id = record.task.id
    _check_room(task_id, view, ctx)
    name = _named_in(message) or MESSAGE
    woken = wakes(record, view, name)
    events: list[e.Event] = [e.Signaled(signal_key(task_id, ctx.ids.lease()), name, said=number)]
    if woken is not None:
        events.append(e.Woken(task_id))  # the message itself has changed the status
    return events, woken is not None


def _named_in(message: Message) -> str | None:
    name = None if message.metadata is None else message.metadata.get("signal")
    return name if isinstance(name, str) and name.strip() and not name.startswith(EFFECT) else None


def wake(command: WakeRun, view: View, ctx: Context) -> Commit:
    """By the agent itself, which has more to do than wait."""
    record = visible_task(check_id(command.task_id, "task_id"), command.by, view, ctx)
    _check_own(command.by, record, ctx)
    parked = record.state is TaskState.PARKED and record.ready_for is None
    return Commit((e.Woken(record.task.id),) if parked else (), Moved(record.task.id, record.generation))


def judge(command: JudgeEffect, view: View, ctx: Context) -> Commit:
    """Somebody says what became of an effect: the run hears it, and goes on."""
    task_id = check_id(command.task_id, "task_id")
    check_text(command.reason, "reason", ctx.limits.text_bytes_max)
    if command.verdict not in _VERDICTS:
        raise Malformed("a verdict is `done`, `failed` or `retry`", field="verdict")
    value = check_value(command.value, "value", ctx)
    record = visible_task(task_id, command.by, view, ctx)
    _check_own(command.by, record, ctx)
    run = view.get(run_key(task_id))
    wait = run.wait if isinstance(run, Run) and record.state is TaskState.PARKED else None
    if wait is None or wait.doubt is None or wait.doubt != command.effect or record.ready_for is not None:
        raise NotInDoubt(f"no effect {command.effect} of this run is in doubt", task_id=task_id)
    said = msgspec.json.encode({"verdict": command.verdict, "value": value})
    signaled = e.Signaled(signal_key(task_id, ctx.ids.lease()), wait.signals[0], Raw(said))
    row = AuditRow("effect", command.verdict, subject=command.effect, task_id=task_id, reason=command.reason)
    return Commit((signaled, e.Woken(task_id)), Moved(task_id, record.generation), (row,))


def _check_own(by: AgentId | None, record: TaskRecord, ctx: Context) -> None:
    """Or who holds a grant that lets it repair."""
    if by is not None and by.pubkey != record.recipient and ctx.granted is None:
        raise NotPermitted("only the agent of a run does this, or the operator", task_id=record.task.id)


# --- after a crash -----------------------------------------------------------------------------------------


def resume(command: ResumeRun, view: View, ctx: Context) -> Commit:
    """A dead worker's run goes on under a new lease; a task of a run that may be done twice is done again, by who asks,
    and one that may not is for repair. A run that its worker has not begun with begins here: that it is one at all,
    only its agent knows. The operator asks for nobody in particular, and so leaves it to whoever comes."""
    task_id = check_id(command.task_id, "task_id")
    check_text(command.reason, "reason", ctx.limits.text_bytes_max)
    check_text(command.dead, "dead", ctx.limits.text_bytes_max)
    if command.incarnation is not None:
        check_text(command.incarnation, "incarnation", ctx.limits.text_bytes_max)
    record = visible_task(task_id, command.by, view, ctx)
    _check_own(command.by, record, ctx)
    lease, run = record.lease, view.get(run_key(task_id))
    is_redone = run is None and record.run is not None and declared_safety(record) == "idempotent"
    may_be_repeated = run.dead == command.dead if isinstance(run, Run) else is_redone
    if may_be_repeated and command.dead != command.incarnation and _is_taken_over(command, record):
        lease_id = "" if lease is None else lease.lease_id
        return Commit((), Resumed(lent(record.task), lease_id, record.attempt, record.generation))
    if run is None and not is_redone and (command.by is None or record.run is not None):
        raise NotARun(f"task {task_id} is no run, or has not begun", task_id=task_id)
    if lease is None:
        raise NotLeased(f"task {task_id} is not in flight", task_id=task_id, state=record.state)
    if lease.incarnation != command.dead:
        raise LeaseMismatch("it is held by another worker", task_id=task_id, expected=command.dead)
    if lease.incarnation == command.incarnation:
        raise Malformed("a worker cannot vouch for its own death", field="dead")
    _check_dead(command, record, ctx)
    row = AuditRow(
        "resume",
        command.evidence,
        subject=command.dead,
        task_id=task_id,
        lease_id=lease.lease_id,
        attempt=record.attempt,
        reason=command.reason,
        declared=declared_safety(record),
    )
    if record.cancel_reason is not None:
        events, then = end_asked(record, view)
        reply = Resumed(lent(record.task), "", record.attempt, record.generation + 1)
        return Commit(events, reply, (row,), then)
    if is_redone:
        return _redo(command, record, row, ctx)
    return _take_over(command, record, run if isinstance(run, Run) else None, row, view, ctx)


def _redo(command: ResumeRun, record: TaskRecord, row: AuditRow, ctx: Context) -> Commit:
    """The next attempt at a task of a run. Who asks gets it in the same commit: the dead may still stand in the queue,
    and be handed it again."""
    task_id, lease = record.task.id, record.lease
    assert lease is not None
    requeued = e.Requeued(task_id, lease.lease_id, "resumed", command.reason)
    if command.incarnation is None:
        return Commit((requeued,), Resumed(lent(record.task), "", record.attempt, record.generation + 1), (row,))
    lease_id = ctx.ids.lease()
    leased = e.Leased(task_id, lease_id, command.incarnation)
    reply = Resumed(lent(record.task), lease_id, record.attempt + 1, record.generation + 2)
    return Commit((requeued, leased), reply, (row,))


def _take_over(
    command: ResumeRun, record: TaskRecord, run: Run | None, row: AuditRow, view: View, ctx: Context
) -> Commit:
    task_id = record.task.id
    if run is not None and run.resumes >= ctx.limits.resumes_max and command.by is not None:
        raise ResumesExhausted(
            f"it was taken up {run.resumes} times and got no further: the operator decides", task_id=task_id
        )
    begun = _beginning(record, view, ctx) if run is None else ()
    counted = e.RunResumed(run_key(task_id), command.dead)
    lease_id = ctx.ids.lease()
    if command.incarnation is not None:
        taken_up = e.TakenUp(task_id, lease_id, command.incarnation)
        reply = Resumed(lent(record.task), lease_id, record.attempt, record.generation)
        return Commit((*begun, taken_up, counted), reply, (row,))
    restates = record.asks is not None
    woken = (e.TakenUp(task_id, lease_id, ""), e.Woken(task_id, restates))
    requeued = _requeue_of_the_dead(command, record, view, ctx)
    given = [event.key for event in requeued]
    reply = Resumed(lent(record.task), "", record.attempt, record.generation + restates, given)
    return Commit((*begun, *woken, counted, *requeued), reply, (row,))


def _requeue_of_the_dead(command: ResumeRun, record: TaskRecord, view: View, ctx: Context) -> list[e.Requeued]:
    """The tasks of a run that its dead worker held, too, as far as they may be done twice."""
    held_by_it = [
        child
        for child in view.leases(0, ctx.limits.scan_max, record.recipient)
        if child.run == record.task.id and _held_by(child, record.recipient, command.dead)
    ]
    safe = [child for child in held_by_it if declared_safety(child) == "idempotent" and child.cancel_reason is None]
    return [
        e.Requeued(child.task.id, child.lease.lease_id, "resumed", command.reason)
        for child in safe[: ctx.limits.step_records_max]
        if child.lease is not None
    ]


def _held_by(child: TaskRecord, agent: str, incarnation: str) -> bool:
    """An agent knows of its own workers only: others may give theirs the same names."""
    return child.recipient == agent and child.lease is not None and child.lease.incarnation == incarnation


def _is_taken_over(command: ResumeRun, record: TaskRecord) -> bool:
    """It was done before, and the answer was lost."""
    if command.incarnation is None:
        return record.state is TaskState.PARKED and record.ready_for is not None
    return record.lease is not None and record.lease.incarnation == command.incarnation


def _check_dead(command: ResumeRun, record: TaskRecord, ctx: Context) -> None:
    """A worker that was silent for long enough is dead to us; or the agent itself vouches for it, which knows."""
    if command.evidence == "attested":
        return
    if command.evidence != "lapsed":
        raise Malformed("evidence is `lapsed` or `attested`", field="evidence")
    assert record.lease is not None
    silent_ms = ctx.now - record.lease.seen_ms
    if silent_ms < ctx.limits.run_lapse_ms:
        raise NotProvenDead(
            f"its worker gave a sign of life {max(0, silent_ms)} ms ago",
            task_id=record.task.id,
            silent_ms=max(0, silent_ms),
            lapse_ms=ctx.limits.run_lapse_ms,
        )


# --- letting go --------------------------------------------------------------------------------------------


def sweep(command: SweepRun, view: View, ctx: Context) -> Commit:
    """One step: what lies before the last checkpoint is forgotten, and the tasks that it told of are let go."""
    run = view.get(run_key(command.task_id))
    if not isinstance(run, Run) or run.is_swept:
        return Commit(())
    if run.swept < run.floor:
        return _sweep_steps(run, view, ctx)
    if not run.closed:
        return Commit(())
    return _sweep_rest(run, command.after, view, ctx)


def _sweep_steps(run: Run, view: View, ctx: Context) -> Commit:
    events: list[e.Event] = []
    let_go: set[str] = set()
    swept = run.swept
    limit = ctx.limits.step_records_max
    for number, step in view.pieces(step_key(run.task_id, ""), run.swept + 1, min(run.floor, run.swept + limit)):
        if len(events) >= limit:
            break
        swept = number
        events.append(e.StepDropped(step_key(run.task_id, number)))
        for memo in step.memos if isinstance(step, Step) else ():
            if memo.task is not None and memo.task not in let_go and _is_finished(view.get(memo.task)):
                let_go.add(memo.task)
                events.append(e.Drained(memo.task))
    if len(events) < limit:
        swept = min(run.floor, run.swept + limit)
    events += _forgotten_keys(run.task_id, view, ctx)
    events.append(e.RunSwept(run_key(run.task_id), swept))
    return Commit(tuple(events), then=(SweepRun(None, run.task_id),))


def _forgotten_keys(task_id: str, view: View, ctx: Context) -> list[e.Event]:
    """The keys of signals that were heard stay as long as those of tasks: a run may live for ever."""
    oldest = view.heard(task_id, ctx.limits.step_records_max)
    old = takewhile(lambda signal: signal.at_ms + ctx.limits.dedup_ms <= ctx.now, oldest)
    return [e.SignalTaken(signal_key(task_id, signal.id)) for signal in old]


def _is_finished(child: object) -> bool:
    return isinstance(child, TaskRecord) and child.state is TaskState.RESULT_PENDING


def _sweep_rest(run: Run, after: int, view: View, ctx: Context) -> Commit:
    """The run is over: what nobody waits for any more."""
    limit = ctx.limits.step_records_max
    children = view.children(run.task_id, after, limit)
    events: list[e.Event] = [
        e.Drained(child.task.id)
        for child in children
        if child.run == run.task_id and child.state is TaskState.RESULT_PENDING
    ]
    if len(children) == limit:
        return Commit(tuple(events), then=(SweepRun(None, run.task_id, children[-1].sent_order),))
    signals = view.signals(run.task_id, limit, taken=True)
    events += [e.SignalTaken(signal_key(run.task_id, kept.id)) for kept in signals]
    if len(signals) == limit:
        return Commit(tuple(events), then=(SweepRun(None, run.task_id, after),))
    events.append(e.RunSwept(run_key(run.task_id), run.swept, is_done=True))
    return Commit(tuple(events))


# --- checking ----------------------------------------------------------------------------------------------


def _checked(made: RunCommit, ctx: Context) -> RunCommit:
    """The commit as it will be kept: complete, bounded, and nobody else's."""
    limits = ctx.limits
    if type(made) is not RunCommit:
        raise Malformed("a commit of a run is needed", field="commit")
    check_count(made.number, "number", _NUMBER_MAX)
    check_count(made.leaf, "leaf", _NUMBER_MAX)
    lists = ("entries", "tasks", "begins", "answers", "cancels", "takes", "memos")
    for name in lists:
        listed = getattr(made, name)
        if not isinstance(listed, (list, tuple)):
            raise Malformed(f"{name} is a list", field=name)
        limit = limits.batch_max * (8 if name == "memos" else 1)
        if len(listed) > limit:
            raise TooLarge(f"a commit has at most {limit} {name}", field=name, size=len(listed), limit=limit)
    if made.wait is not None and made.result is not None:
        raise Malformed("a run that ends waits for nothing", field="wait")
    return structs.replace(
        made,
        entries=tuple(_checked_entry(draft, ctx) for draft in made.entries),
        memos=tuple(_checked_memo(memo, ctx) for memo in made.memos),
        checkpoint=UNSET if made.checkpoint is UNSET else check_value(made.checkpoint, "checkpoint", ctx),
        wait=None if made.wait is None else checked_wait(made.wait, ctx),
        result=None if made.result is None else _checked_result(made.result, ctx),
    )


def _checked_result(result: Result, ctx: Context) -> Result:
    sealed = seal_result(result, ctx.limits)
    if sealed.status == "partial":
        raise Malformed("a run ends with `ok` or `error`", field="result")
    return sealed


def _checked_entry(draft: EntryDraft, ctx: Context) -> EntryDraft:
    if type(draft) is not EntryDraft or type(draft.role) is not EntryRole or type(draft.type) is not EntryType:
        raise Malformed("an entry has a role and a type", field="entries")
    check_key(draft.id, "entry.id", ctx.limits.key_bytes_max)
    check_count(draft.parent, "entry.parent", _NUMBER_MAX)
    if draft.said is not None:
        check_count(draft.said, "entry.said", _NUMBER_MAX)
    for name in ("turn", "key"):
        if getattr(draft, name) is not None:
            check_key(getattr(draft, name), f"entry.{name}", ctx.limits.key_bytes_max)
    content = check_value(draft.content, "entry.content", ctx)
    says = draft.says
    if says is not None:
        says = structs.replace(seal_message(says, ctx.limits), role="ROLE_AGENT")
    return structs.replace(draft, content=content, says=says)


def _checked_memo(memo: Memo, ctx: Context) -> Memo:
    if type(memo) is not Memo:
        raise Malformed("a memo is needed", field="memos")
    check_key(memo.key, "memo.key", ctx.limits.key_bytes_max)
    if memo.begun is not None:
        check_key(memo.begun, "memo.begun", ctx.limits.key_bytes_max)
    if memo.entry is not None:
        check_count(memo.entry, "memo.entry", _NUMBER_MAX)
    if memo.task is not None:
        check_id(memo.task, "memo.task")
    if memo.value is NOTHING:
        return memo
    return Memo(memo.key, check_value(memo.value, "memo.value", ctx), memo.entry, memo.task, memo.begun)


def checked_wait(wait: Wait, ctx: Context) -> Wait:
    if type(wait) is not Wait:
        raise Malformed("a wait is needed", field="wait")
    if not wait.tasks and not wait.signals and wait.until_ms is None:
        raise Malformed("a wait is for something", field="wait")
    for name, listed in (("tasks", wait.tasks), ("signals", wait.signals)):
        if len(listed) > ctx.limits.batch_max:
            raise TooLarge(f"a wait has too many {name}", field="wait", size=len(listed), limit=ctx.limits.batch_max)
    for task_id in wait.tasks:
        if check_id(task_id, "wait.tasks") != task_id:
            raise Malformed("ids are in small letters", field="wait.tasks")
    for pattern in wait.signals:
        check_key(pattern, "wait.signals", ctx.limits.key_bytes_max)
    if wait.until_ms is not None:
        check_time(wait.until_ms, "wait.until_ms")
    if wait.doubt is not None:
        check_key(wait.doubt, "wait.doubt", ctx.limits.key_bytes_max)
        if len(wait.signals) != 1 or not wait.signals[0].startswith(EFFECT):
            raise Malformed("what is in doubt waits for its own decision", field="wait.doubt")
    return wait


def check_value(value: Raw, field: str, ctx: Context) -> Raw:
    """JSON as we keep it, of a size that we keep."""
    if value is NOTHING:
        return value
    if type(value) is not Raw:
        raise Malformed(f"{field} is JSON", field=field)
    size = len(memoryview(value))
    if size > ctx.limits.content_bytes_max:
        raise TooLarge(f"{field} has {size} bytes", field=field, size=size, limit=ctx.limits.content_bytes_max)
    try:
        body = bytes(value)
        decoded = msgspec.json.decode(body)
        if body.count(b"[") + body.count(b"{") > ctx.limits.content_depth_max:  # else it cannot be too deep
            check_json(decoded, ctx.limits)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise Malformed(f"{field}: {wrong}", field=field) from None
    return Raw(body)


def check_name(value: str, field: str, ctx: Context) -> str:
    """A signal's name. Those of decisions are nobody's to send."""
    check_key(value, field, ctx.limits.key_bytes_max)
    if value.startswith(EFFECT) or "*" in value:
        raise Malformed(f"{field} is no pattern, and does not begin with {EFFECT}", field=field)
    return value


def check_text_of(value: Any, field: str, ctx: Context) -> str:
    check_key(value, field, ctx.limits.key_bytes_max)
    return str(value)


def marked(task_id: str, key: str) -> str:
    return mark_key(task_id, sha256(key.encode()).hexdigest()[:32])


def digest_of_entry(draft: EntryDraft) -> str:
    content = msgspec.json.encode(
        (draft.role, draft.type, draft.content, draft.says and draft.says.parts), order="deterministic"
    )
    return sha256(content).hexdigest()[:32]


def _run_of(record: TaskRecord, view: View) -> Run | None:
    run = view.get(run_key(record.task.id)) if record.is_run else None
    return run if isinstance(run, Run) else None


def held_run(lease_id: str, by: AgentId | None, view: View, ctx: Context) -> tuple[TaskRecord, Run | None]:
    """For its holder alone."""
    record = task_of_lease(check_id(lease_id, "lease_id"), by, view, ctx)
    held(lease_id, record)
    return record, _run_of(record, view)
