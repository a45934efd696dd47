"""The door: who may do what, decided in the same commit as what they do. (Contract 25-28.)

A call is let in when its token is good, then when its task can be seen, then when a grant covers it, in this order:
what a caller cannot see is unknown to it, whatever it may do elsewhere. The check leaves a row beside the change that
it allowed or refused, and a bounded grant loses a use only if the call succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeAlias

from msgspec import structs

from covenant.model import command as c
from covenant.model.agent import AgentId, check_agent
from covenant.model.audit import AuditRow
from covenant.model.error import (
    CovenantError,
    InvalidInput,
    MissingCapability,
    NotPermitted,
    RecipientRefused,
    ScopeMismatch,
    SenderMismatch,
    UnknownPeer,
)
from covenant.model.peer import Caller, Demand, Grant, Peer, peer_key
from covenant.model.record import TaskRecord, Tombstone
from covenant.model.repair import Requeue
from covenant.model.task import Task
from covenant.rules.cache import visible_slot
from covenant.rules.context import Commit, Context, View, Way
from covenant.rules.envelope import check_id
from covenant.rules.grant import (
    authorize,
    demand_for,
    holds,
    is_lasting,
    is_live,
    recall,
    refusal_for,
    remember,
    spellings,
    uses_of,
)
from covenant.rules.peer import check_caller
from covenant.rules.retention import is_free
from covenant.rules.send_key import send_key
from covenant.rules.sight import is_visible, task_of_lease, visible_task

Decide: TypeAlias = Callable[[c.Command, View, Context], Commit]


def admit(call: c.Call, view: View, ctx: Context, decide: Decide) -> Commit:
    """The commit of the command inside, with the checks that let it in; or the refusal, with those that did not."""
    check_caller(call.caller, view)
    checks: list[AuditRow] = []
    try:
        let_in = _sent if type(call.command) is c.SendTask else _let_in
        commit = let_in(call.caller, call.command, view, ctx, decide, checks)  # type: ignore[arg-type]  # as looked up
    except CovenantError as refusal:
        return _refused(refusal, call, checks, ctx)
    if checks:
        commit.audit = (*checks, *commit.audit)
    return commit


def _let_in(
    caller: Caller, command: c.Command, view: View, ctx: Context, decide: Decide, checks: list[AuditRow]
) -> Commit:
    demand_of = DEMANDS.get(type(command))
    demand = None if demand_of is None else demand_of(command, caller, view, ctx)
    if demand is None:
        return decide(command, view, ctx)
    if type(command) is c.CommitRun and command.commit.tasks:
        sent: list[AuditRow] = []
        try:
            command = _addressed_tasks(caller, command, view, ctx, sent)
        except CovenantError:
            again = _repeated(command, view, ctx, decide)
            if again is not None:
                return again
            checks += sent
            raise
        checks += sent
    if type(command) is c.RetryStale:
        return _retried(caller, command, demand, view, ctx, decide, checks)
    if type(command) is c.SignalRun and _seems_to_start(command, view, ctx):
        return _started(caller, command, demand, view, ctx, decide, checks)
    grant, reason = recall(caller.agent.pubkey, demand, view, ctx)
    if reason is not None:
        return _repeated(command, view, ctx, decide) or _missing(caller, demand, reason, checks)
    if grant is None:  # the operator may without a grant
        return decide(command, view, ctx)
    checks.append(_check_row(demand, grant))
    return _decided(command, demand, grant, view, ctx, decide)


def _started(
    caller: Caller,
    command: c.SignalRun,
    demand: Demand,
    view: View,
    ctx: Context,
    decide: Decide,
    checks: list[AuditRow],
) -> Commit:
    """Let a signal in that begins a run, as the send that it is."""
    assert command.start is not None and demand.counterparty is not None
    grant, reason = recall(caller.agent.pubkey, demand, view, ctx)
    if grant is None:
        assert reason is not None
        return _unsent(caller, command.start.recipient, demand.task_id, reason, view, ctx, checks)
    checks.append(_check_row(demand, grant))
    start = structs.replace(command.start, sender=caller.agent, recipient=demand.counterparty)
    agreed = _check_recipient(c.SendTask(command.by, start), caller, view, ctx, checks)
    return _decided(structs.replace(command, start=start), demand, grant, view, ctx, decide, agreed)


def _sent(
    caller: Caller, command: c.SendTask, view: View, ctx: Context, decide: Decide, checks: list[AuditRow]
) -> Commit:
    """A way that was open stays open until a peer or a grant is touched, where nothing else could close it."""
    task, sender, given = command.task, caller.agent, command.task.recipient
    check_agent(given, "recipient")
    if task.sender is not None:
        _check_sender(task.sender, sender)
    name = (sender.pubkey, given.display, given.pubkey)
    way = ctx.ways.get(name)
    if way is not None and way.order == view.trust_order:
        checks += way.rows
        return _decided(_truly_addressed(command, sender, way.demand), way.demand, way.grant, view, ctx, decide)
    task_id = check_id(task.id, "id") if task.id else None
    demand = _as_addressed(known_agent(given, view), task_id)
    grant, reason = authorize(sender.pubkey, demand, view, ctx)
    if grant is None:
        assert reason is not None
        again = _sent_before(command, sender, demand, view, ctx, decide)
        return again or _unsent(caller, given, task_id, reason, view, ctx, checks)
    command = _truly_addressed(command, sender, demand)
    try:
        gate: list[AuditRow] = []
        agreed = _check_recipient(command, caller, view, ctx, gate)
    except CovenantError:
        again = _sent_before(command, sender, demand, view, ctx, decide)
        if again is not None:
            return again
        checks += [_check_row(demand, grant), *gate]
        raise
    checks += [_check_row(demand, grant), *gate]
    if is_lasting(grant.capability) and not ctx.recv_gate:
        remember(ctx.ways, name, Way(view.trust_order, demand, grant, tuple(checks)))
    return _decided(command, demand, grant, view, ctx, decide, agreed)


def _sent_before(
    command: c.SendTask, sender: AgentId, demand: Demand, view: View, ctx: Context, decide: Decide
) -> Commit | None:
    """Return the answer to a send that was let in before, or None if this send is new.

    The task is only compared if the sender has one with this id or this key: a comparison takes as long as the task is
    large, and this caller may not send.
    """
    assert demand.counterparty is not None
    known = None if demand.task_id is None else view.get(demand.task_id)
    is_own = isinstance(known, (TaskRecord, Tombstone)) and known.sender == sender.pubkey
    if not is_own and command.key is not None:
        is_own = view.get(send_key(sender.pubkey, demand.counterparty.pubkey, command.key, ctx)) is not None
    return _repeated(_truly_addressed(command, sender, demand), view, ctx, decide) if is_own else None


def _check_sender(named: AgentId | None, caller: AgentId) -> None:
    """By its key, or by the one that stands for its label."""
    if named is not None and named != caller and named != AgentId.named(caller.display):
        raise SenderMismatch(f"{caller} cannot send as {named}", caller=caller.display)


def _addressed_tasks(
    caller: Caller, command: c.CommitRun, view: View, ctx: Context, checks: list[AuditRow]
) -> c.CommitRun:
    """The tasks of a run go through the door one by one, each under a grant of its own; those to the agent itself are
    its own affair."""
    tasks = []
    for task in command.commit.tasks:
        try:
            tasks.append(_addressed_task(caller, command, task, view, ctx, checks))
        except CovenantError as refusal:
            refusal.details["task_id"] = task.id  # the run may go on without it
            raise
    commit = structs.replace(command.commit, tasks=tuple(tasks))
    return c.CommitRun(command.by, command.lease_id, commit, command.incarnation)


def _addressed_task(
    caller: Caller, command: c.CommitRun, task: Task, view: View, ctx: Context, checks: list[AuditRow]
) -> Task:
    check_agent(task.recipient, "recipient")
    recipient = known_agent(task.recipient, view)
    if recipient.pubkey == caller.agent.pubkey:
        return structs.replace(task, sender=caller.agent, recipient=caller.agent)
    task_id = check_id(task.id, "id") if task.id else None
    demand = _as_addressed(recipient, task_id)
    send = _truly_addressed(c.SendTask(command.by, task), caller.agent, demand)
    grant, reason = recall(caller.agent.pubkey, demand, view, ctx)
    if grant is None:
        assert reason is not None
        return _unsent(caller, task.recipient, task_id, reason, view, ctx, checks)
    checks.append(_check_row(demand, grant))
    agreed = _check_recipient(send, caller, view, ctx, checks)
    if _is_counted(grant) or (agreed is not None and _is_counted(agreed)):
        raise NotPermitted("a run sends under grants without a bound on their uses", action=demand.action)
    return send.task


def _is_counted(grant: Grant) -> bool:
    """Return whether a use of this grant may have to be counted: it, or one that it was delegated from, has a bound."""
    return grant.capability.scope.max_uses is not None or grant.capability.parent is not None


def _decided(
    command: c.Command,
    demand: Demand,
    grant: Grant,
    view: View,
    ctx: Context,
    decide: Decide,
    agreed: Grant | None = None,
) -> Commit:
    """Decide the command and count a use of the grant, and of `agreed`, under which the recipient takes the task."""
    ctx.granted = demand.action
    try:
        commit = decide(command, view, ctx)
    finally:
        ctx.granted = None
    if _is_counted(grant) and _is_a_use(command, commit):
        commit.events = (*commit.events, *uses_of(grant, view))
    if agreed is not None and _is_counted(agreed) and _is_a_use(command, commit):
        commit.events = (*commit.events, *uses_of(agreed, view))
    return commit


def _is_a_use(command: c.Command, commit: Commit) -> bool:
    """What was refused, and what only told again what had been done before, costs nothing."""
    done = bool(commit.events) or type(command) is c.UseRight
    return done and not isinstance(commit.reply, CovenantError)


def _repeated(command: c.Command, view: View, ctx: Context, decide: Decide) -> Commit | None:
    """A call that was let in once and whose answer was lost may have used its grant up: it is answered again. What
    changes nothing needs no grant."""
    if type(command) in _NEVER_REPEATED:
        return None
    try:
        commit = decide(command, view, ctx)
    except CovenantError:
        return None
    return None if commit.events or commit.audit or isinstance(commit.reply, CovenantError) else commit


_NEVER_REPEATED: Final = frozenset((c.UseRight, c.EnrollPeer, c.RevokePeer, c.PublishCard, c.CompactHistory))
"""Commands that have no second answer: the same again is another change."""


def _missing(caller: Caller, demand: Demand, reason: str, checks: list[AuditRow]) -> NoReturn:
    checks.append(_check_row(demand, None))
    raise refusal_for(caller.agent, demand, reason)


def _retried(
    caller: Caller,
    command: c.RetryStale,
    demand: Demand,
    view: View,
    ctx: Context,
    decide: Decide,
    checks: list[AuditRow],
) -> Commit:
    """The gate asks for each task whether a grant reaches it, and uses one up for each that it requeues."""
    licence = _Licence(caller, view, ctx)
    if not licence.is_there(demand):
        held = holds(caller.agent.pubkey, demand, view)
        return _missing(caller, demand, ScopeMismatch.code if held else MissingCapability.code, checks)
    checks.append(AuditRow("capability_check", demand.action, scope_id=demand.label, passed=True))
    ctx.granted, ctx.may_requeue = demand.action, licence.reaches
    try:
        commit = decide(command, view, ctx)
    finally:
        ctx.granted = ctx.may_requeue = None
    commit.events = (*commit.events, *(event for grant in licence.used for event in uses_of(grant, view)))
    return commit


class _Licence:
    """The grants behind one pass of the retry gate. What it says yes to counts as used in this pass."""

    def __init__(self, caller: Caller, view: View, ctx: Context) -> None:
        self.used: list[Grant] = []
        self._caller = caller
        self._view = view
        self._ctx = ctx

    def is_there(self, demand: Demand) -> bool:
        """Return whether a live grant of the action is there. Whether it covers a task is asked for each task."""
        by_pin = (self._view.grants(self._caller.agent.pubkey, action) for action in spellings(demand))
        grants = (grant for pins in by_pin for pinned in pins.values() for grant in pinned.values())
        return any(is_live(grant, self._view, self._ctx) for grant in grants)

    def reaches(self, record: TaskRecord) -> bool:
        assert record.lease is not None
        demand = demand_for(
            "a2a.repair.requeue",
            "a2a-auto-retry",
            counterparty(record, self._caller),
            record.task.id,
            record.lease.lease_id,
            "idempotent",
        )
        grant, _ = authorize(self._caller.agent.pubkey, demand, self._view, self._ctx)
        if grant is None:
            return False
        limit = grant.capability.scope.max_uses
        if limit is not None and grant.uses + sum(used is grant for used in self.used) >= limit:
            return False
        self.used.append(grant)
        return True


def _check_row(demand: Demand, grant: Grant | None) -> AuditRow:
    return AuditRow(
        "capability_check",
        demand.action,
        scope_id=demand.label,
        passed=grant is not None,
        grant=None if grant is None else grant.capability.id,
    )


def _refused(refusal: CovenantError, call: c.Call, checks: list[AuditRow], ctx: Context) -> Commit:
    """A refusal is written down with the checks before it, unless the same caller is being refused over and over: then
    it is counted. What nobody could make sense of was no attempt at anything, and leaves no row."""
    if isinstance(refusal, InvalidInput) and not checks:
        return Commit((), refusal)
    not_written = ctx.refused(call.caller.agent.pubkey)
    if not_written < 0:
        return Commit((), refusal)
    if not checks or checks[-1].passed:
        name, task_id = type(call.command).__name__, refusal.details.get("task_id")
        checks.append(AuditRow("rejected", name, reason=refusal.code, task_id=task_id))
    if not_written:
        checks[-1] = structs.replace(checks[-1], counts={"not_written": not_written})
    return Commit((), refusal, tuple(checks))


# --- what each command demands -----------------------------------------------------------------------------


def _as_addressed(recipient: AgentId, task_id: str | None) -> Demand:
    """Return what a send to this recipient demands.

    A refusal names the recipient as the caller did, since a caller without a grant for it must not learn which keys and
    labels are enrolled.
    """
    return demand_for("a2a.send.", f"a2a-send:{recipient.display}", recipient, task_id)


def _unsent(
    caller: Caller,
    given: AgentId,
    task_id: str | None,
    reason: str,
    view: View,
    ctx: Context,
    checks: list[AuditRow],
) -> NoReturn:
    """Refuse a send to the recipient that the caller gave. `reason` is why the peer that it means is out of reach.

    If the caller's grant reaches the name that it gave, nobody has that name with that key.
    """
    demand = _as_addressed(given, task_id)
    grant, why = authorize(caller.agent.pubkey, demand, view, ctx)
    if grant is not None:
        checks.append(_check_row(demand, grant))
        raise _nobody(given)
    code = ScopeMismatch.code if ScopeMismatch.code in (why, reason) else MissingCapability.code
    _missing(caller, demand, code, checks)


def _nobody(agent: AgentId) -> UnknownPeer:
    return UnknownPeer(f"no peer {agent.display}", peer=agent.display)


def known_agent(agent: AgentId, view: View) -> AgentId:
    """A key says who somebody is: what label a caller puts beside it does not count."""
    pubkey = agent.pubkey
    if pubkey == AgentId.named(agent.display).pubkey:  # the key that stands for a label: whoever has the label is meant
        pubkey = view.peer_named(agent.display) or pubkey
    peer = view.get(peer_key(pubkey))
    return peer.agent if isinstance(peer, Peer) else agent


def _truly_addressed(command: c.SendTask, sender: AgentId, demand: Demand) -> c.SendTask:
    """With the labels that the two were enrolled under, whatever the caller has put there."""
    task, recipient = command.task, demand.counterparty
    assert recipient is not None
    given = task.recipient
    if task.sender is None and given.display == recipient.display and given.pubkey == recipient.pubkey:
        return command
    return structs.replace(command, task=structs.replace(task, sender=sender, recipient=recipient))


def _check_recipient(
    command: c.SendTask, caller: Caller, view: View, ctx: Context, checks: list[AuditRow]
) -> Grant | None:
    """Raise unless the recipient is enrolled and, with `--recv-gate`, holds a grant to receive from this sender.

    Returns that grant, or None if none is needed.
    """
    peer, sender = living_recipient(command.task.recipient, view), caller.agent
    if not ctx.recv_gate or sender == peer.agent:
        return None
    demand = demand_for("a2a.recv.", f"a2a-recv:{peer.agent.display}", sender)
    grant, _ = authorize(peer.agent.pubkey, demand, view, ctx)
    checks.append(_check_row(demand, grant))
    if grant is None:
        raise RecipientRefused(f"{peer.agent.display} does not take tasks of {sender}", peer=peer.agent.display)
    return grant


def living_recipient(recipient: AgentId, view: View) -> Peer:
    """The peer to which a task goes. Raises UnknownPeer for one that nobody is, or is any more."""
    peer = view.get(peer_key(recipient.pubkey))
    if not isinstance(peer, Peer) or peer.revoked_ms is not None:
        raise _nobody(recipient)
    return peer


def _respond(command: c.PostResult, caller: Caller, view: View, ctx: Context) -> Demand | None:
    task_id = check_id(command.result.task_id, "task_id")
    record = visible_task(task_id, command.by, view, ctx)
    sender = record.task.sender
    assert sender is not None
    if _is_own_affair(record, caller):
        return None
    lease = command.result.lease_id
    return demand_for("a2a.respond.", f"a2a-respond:{task_id}", sender, task_id, lease)


def _is_own_affair(record: TaskRecord, caller: Caller) -> bool:
    """A task of a run to its own agent is answered without a grant, as it was sent without one."""
    sender = record.task.sender
    return record.run is not None and sender is not None and sender.pubkey == caller.agent.pubkey


def _converse(command: c.AddMessage, caller: Caller, view: View, ctx: Context) -> Demand:
    """To add to a task is to send to its recipient."""
    record = visible_task(check_id(command.task_id, "task_id"), command.by, view, ctx)
    recipient = record.task.recipient
    return _as_addressed(recipient, record.task.id)


def _hold(
    command: c.UpdateTask | c.AddArtifact | c.RejectTask | c.ReplyDirectly | c.CommitRun,
    caller: Caller,
    view: View,
    ctx: Context,
) -> Demand | None:
    """What a holder says is an answer to the sender."""
    lease_id = check_id(command.lease_id, "lease_id")
    record = task_of_lease(lease_id, command.by, view, ctx)
    task = record.task
    assert task.sender is not None
    if _is_own_affair(record, caller):
        return None
    return demand_for("a2a.respond.", f"a2a-respond:{task.id}", task.sender, task.id, lease_id)


def _signal(command: c.SignalRun, caller: Caller, view: View, ctx: Context) -> Demand | None:
    """Return what a signal demands: the right to send to the agent of the run, and nothing for that agent itself.

    With a start, an id of a run that the caller cannot see is treated as a free one. Only a caller that may send learns
    from `task_conflict`, as with any send, that the id is taken.
    """
    task_id = check_id(command.task_id, "task_id")
    start = command.start
    if start is not None and _seems_to_start(command, view, ctx):
        check_agent(start.recipient, "recipient")
        _check_sender(start.sender, caller.agent)
        return _as_addressed(known_agent(start.recipient, view), task_id)
    recipient = visible_task(task_id, command.by, view, ctx).task.recipient
    if recipient.pubkey == caller.agent.pubkey:
        return None
    return _as_addressed(recipient, task_id)


def _seems_to_start(command: c.SignalRun, view: View, ctx: Context) -> bool:
    """Return whether the signal comes with a start, and its caller sees no run with this id."""
    known = view.get(check_id(command.task_id, "task_id"))
    return command.start is not None and (not is_visible(known, command.by, ctx) or is_free(known, ctx))


def _judge(command: c.JudgeEffect | c.ResumeRun, caller: Caller, view: View, ctx: Context) -> Demand | None:
    """Of its own runs an agent answers for itself; anybody else needs the right to repair."""
    record = visible_task(check_id(command.task_id, "task_id"), command.by, view, ctx)
    if record.recipient == caller.agent.pubkey:
        return None
    other, task_id = counterparty(record, caller), record.task.id
    return demand_for("a2a.repair.requeue", f"a2a-repair:{task_id}", other, task_id, duplicate_risk="operator_accepted")


def _cancel(command: c.CancelTask, caller: Caller, view: View, ctx: Context) -> Demand:
    record = visible_task(check_id(command.task_id, "task_id"), command.by, view, ctx)
    other = counterparty(record, caller)
    return demand_for("a2a.cancel.", f"a2a-cancel:{record.task.id}", other, record.task.id)


def _repair(command: c.RepairTask, caller: Caller, view: View, ctx: Context) -> Demand:
    request = command.request
    record = visible_task(check_id(request.task_id, "task_id"), command.by, view, ctx)
    requeue = isinstance(request.command, Requeue)
    return demand_for(
        "a2a.repair.requeue" if requeue else "a2a.repair.force_error",
        f"a2a-repair:{record.task.id}",
        counterparty(record, caller),
        record.task.id,
        request.command.lease_id,
        request.command.duplicate_risk if isinstance(request.command, Requeue) else None,
    )


def counterparty(record: TaskRecord, caller: Caller) -> AgentId:
    """The other side of a task: for its sender the recipient, for anybody else the sender."""
    sender = record.task.sender
    assert sender is not None
    return record.task.recipient if caller.agent.pubkey == record.sender else sender


def _retry(command: c.RetryStale, caller: Caller, view: View, ctx: Context) -> Demand | None:
    """Looking is free. What it may requeue is asked for each task."""
    return demand_for("a2a.repair.requeue", "a2a-auto-retry") if command.policy.enabled else None


def _forget(command: c.ForgetCached, caller: Caller, view: View, ctx: Context) -> Demand:
    visible_slot(command.slot, command.by, view, ctx)
    return demand_for("a2a.cache.forget", "a2a:cache")


def _plain(action: str, label: str) -> Callable[[Any, Caller, View, Context], Demand]:
    demand = demand_for(action, label)

    def demand_of(command: Any, caller: Caller, view: View, ctx: Context) -> Demand:
        return demand

    return demand_of


def _receive(command: c.LeaseTasks | c.DrainResults, caller: Caller, view: View, ctx: Context) -> None:
    """A peer receives for itself; the operator for everybody."""
    agent = command.recipient if isinstance(command, c.LeaseTasks) else command.peer
    if agent is not caller.agent and agent != caller.agent and not caller.is_operator:
        raise NotPermitted(f"{caller.agent} receives for itself only")


def _use(command: c.UseRight, caller: Caller, view: View, ctx: Context) -> Demand:
    return demand_for(command.action, command.action)


def use_right(command: c.UseRight, view: View, ctx: Context) -> Commit:
    return Commit(())


DEMANDS: dict[type, Callable[[Any, Caller, View, Context], Demand | None]] = {
    c.AddMessage: _converse,
    c.PostResult: _respond,
    c.UpdateTask: _hold,
    c.AddArtifact: _hold,
    c.RejectTask: _hold,
    c.ReplyDirectly: _hold,
    c.CommitRun: _hold,
    c.SignalRun: _signal,
    c.JudgeEffect: _judge,
    c.ResumeRun: _judge,
    c.CancelTask: _cancel,
    c.RepairTask: _repair,
    c.RetryStale: _retry,
    c.ForgetCached: _forget,
    c.CompactHistory: _plain("store.compact", "store:compact"),
    c.EnrollPeer: _plain("peers.enroll", "peers:enroll"),
    c.RevokePeer: _plain("peers.revoke", "peers:revoke"),
    c.LeaseTasks: _receive,
    c.DrainResults: _receive,
    c.UseRight: _use,
    c.PublishCard: _plain("agents.publish", "agents:publish"),
    c.WithdrawCard: _plain("agents.publish", "agents:publish"),
}
