"""What a run did since its last commit, all at once. (Contract 18, 20, 22, 23.)

A commit of a run carries its lease, so an old holder is refused, and its number, so one that is repeated is done once.
"""

from __future__ import annotations

from typing import Final

from msgspec import UNSET, structs

from covenant.model import event as e
from covenant.model.command import CancelChildren, Command, CommitRun, PostResult, SweepRun
from covenant.model.error import (
    CovenantError,
    KeyReused,
    Malformed,
    NotPermitted,
    ResultConflict,
    ResultGone,
    TaskConflict,
    TooLarge,
    WrongStep,
)
from covenant.model.message import Message
from covenant.model.record import Asks, Outcome, TaskRecord, said_key
from covenant.model.run import (
    NOTHING,
    EntryDraft,
    Run,
    RunCommit,
    Signal,
    Standing,
    entry_key,
    run_key,
    signal_key,
    step_key,
)
from covenant.model.task import Result, Task
from covenant.rules.context import Commit, Context, View, each
from covenant.rules.end import end
from covenant.rules.envelope import check_id, check_key, digest_of, seal_task
from covenant.rules.lease import held
from covenant.rules.result import post
from covenant.rules.retention import is_free
from covenant.rules.run.begin import beginning
from covenant.rules.run.draft import checked
from covenant.rules.run.entry import digest_of_entry, marked
from covenant.rules.run.hold import run_of
from covenant.rules.run.signal import has_key
from covenant.rules.run.wait import Found, look
from covenant.rules.sight import task_of_lease

_SIGNS_OF_LIFE: Final = 8  # in the time after which a silent worker may be taken for dead


def commit(command: CommitRun, view: View, ctx: Context) -> Commit:
    lease_id = check_id(command.lease_id, "lease_id")
    made = checked(command.commit, ctx.limits)
    record = task_of_lease(lease_id, command.by, view, ctx)
    run = run_of(record, view)
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
            self.events += beginning(self.record, self.view, self.ctx)
        else:
            self._show_life()
        each(self._answer, made.answers)
        each(self.view.get, [marked(self.task_id, draft.key) for draft in made.entries if draft.key is not None])
        for draft in made.entries:
            self._enter(draft)
        self._step()
        each(self._send, made.tasks)
        each(self._take_up, made.begins)
        each(self._cancel, made.cancels)
        each(self._take, made.takes)
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
        check_key(signal_id, "takes", self.ctx.limits.key_bytes_max)
        key = signal_key(self.task_id, signal_id)
        signal = self.view.get(key)
        if not isinstance(signal, Signal) or signal.taken or key in self.taken:
            raise Malformed(f"no signal {signal_id} waits", field="takes")
        self.taken.add(key)
        self.events.append(e.SignalTaken(key, has_key(signal)))

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


def _repeated(made: RunCommit, incarnation: str, record: TaskRecord, view: View, ctx: Context) -> Standing:
    """The answer was lost: it is told again, as far as it is still so. A task that another worker has by now is that
    one's."""
    is_held = record.lease is not None and record.lease.lease_id == _made_lease(record, view)
    leases, attempts = {}, {}
    each(view.get, made.begins)
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


def _made_lease(record: TaskRecord, view: View) -> str | None:
    """The lease under which the last step of a run was made."""
    run = view.get(run_key(record.task.id))
    return run.step_lease if isinstance(run, Run) else None
