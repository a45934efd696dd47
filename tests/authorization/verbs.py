"""Every verb of the exchange: what it demands, of whom, and where each surface has it.

This list is the documentation of authorization, and the only one: `docs/trust.md` shows it, `verdict.py` says what
follows from it for each caller and grant, `test_rules.py` holds the rules to that, and `test_surfaces.py` calls every
verb on every surface that has it. A verb, command, query or operation without a row fails `test_list.py`.

A call is looked at in this order: the token; the thing that the call names (`names`), which the caller must be able to
see; the grant (`action`), unless the caller is one of `free`; and then whether the caller may do this at all (`only`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

from msgspec import Raw, Struct

from covenant import AgentId, ForceError, RepairRequest, Requeue, Result, RetryPolicy, Task
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.message import Artifact, Message, Part
from covenant.model.peer import Capability, Demand, Grant, Role
from covenant.model.push import PushConfig
from covenant.model.run import RunCommit, Wait
from tests.authorization.world import Call, State

# --- the words of the list -----------------------------------------------------------------------------------


class Party(StrEnum):
    """The relation of a caller to the thing that it names."""

    OPERATOR = "operator"
    SENDER = "sender"
    RECIPIENT = "recipient"  # it alone holds the lease
    ITSELF = "itself"  # a run of this agent gave the task to the same agent
    ADDRESSED = "addressed"  # by a task that is being sent
    HOLDER = "holder"  # of the grant
    GRANTER = "granter"


OPERATOR, SENDER, RECIPIENT, ITSELF, ADDRESSED, HOLDER, GRANTER = Party


class Named(Struct, frozen=True):
    """A kind of thing: the parties that see it, and the code that everybody else gets, as if it were not there."""

    kind: str
    seen_by: frozenset[Party]
    unseen: str


TASK: Final = Named("task", frozenset((OPERATOR, SENDER, RECIPIENT)), "unknown_task")
LEASE: Final = Named("lease", frozenset((OPERATOR, RECIPIENT)), "unknown_lease")
CACHED: Final = Named("cached result", frozenset((OPERATOR, SENDER, RECIPIENT)), "unknown_task")
GRANT: Final = Named("grant", frozenset((OPERATOR, HOLDER, GRANTER)), "unknown_grant")

TASKS: Final = (State.IN_FLIGHT, State.QUEUED, State.ENDED, State.OWN, State.UNKNOWN)
RUNS: Final = (State.RUNNING, State.PARKED, State.IN_FLIGHT, State.UNKNOWN)

LET_IN: Final = "let in"


class Verb(Struct, frozen=True, kw_only=True):
    """One row of the list: first what authorization asks of a call, then how each surface is called."""

    name: str
    rule: Callable[[Call], tuple[Any, ...]]  # the commands and queries that the rules decide

    names: Named | None = None
    on: tuple[State, ...] = (State.NOTHING,)  # states of the thing that are tried; in the first, the call succeeds
    action: str | None = None  # `<recipient>` and the like stand for the label of that agent
    carries: frozenset[str] = frozenset()  # of peer, task, lease and risk, those that a scope is compared with
    free: frozenset[Party] = frozenset()  # these need no grant
    repeats_on: State | None = None  # in this state the call only repeats what was done, and needs no grant
    only: frozenset[Party] | None = None  # these may call it at all; None is everybody
    refusal: str | None = None  # the code for a missing grant, if it is another than everywhere
    lets_in: str = LET_IN  # the outcome of a call that is let in; another one if what it names is not there
    speaks_for_sender: bool = False  # the call names the sender of the task
    asks_recipient: bool = False  # the recipient must hold the grant, with `--recv-gate`
    from_run: bool = False  # a run sends the task: a grant with a bound, or one that was passed on, does not do
    each: bool = False  # the call concerns many tasks: a scope is compared with each, and not with the call
    besides: tuple[str, ...] = ()  # held by every caller

    http: str | None = None
    ipc: str | None = None  # the `kind` of the frame
    members: Callable[[Call], dict[str, Any]] | None = None  # of the frame; over HTTP, of path, query and body
    body: str | None = None  # the one member that the HTTP body is; else it is all that are not in the path
    a2a: str | None = None  # the operation: a JSON-RPC method, and a gRPC method
    rest: str | None = None
    params: Callable[[Call], dict[str, Any]] | None = None  # of the operation
    streams: bool = False


# --- the list --------------------------------------------------------------------------------------------------

_PIECE: Final = Artifact(artifact_id="draft", parts=(Part(text="one"),))
_URL: Final = "https://hooks.example.com/covenant"
_GO: Final = Wait(signals=("go",))
_parties = frozenset[Party]
_scopes = frozenset[str]


def _task(x: Call, **more: Any) -> Task:
    return Task(recipient=x.bob, intent_text="draft the brief", id=x.task, **more)


def _said(x: Call, role: Any = "ROLE_AGENT") -> Message:
    return Message(message_id=x.fresh, role=role, parts=(Part(text="half way"),))


def _user_message(x: Call, **more: Any) -> dict[str, Any]:
    message = {"messageId": x.fresh, "role": "ROLE_USER", "parts": [{"text": "draft the brief"}], **more}
    return {"message": message, "configuration": {"returnImmediately": True}}


def _repair(x: Call, what: Requeue | ForceError) -> tuple[c.RepairTask]:
    return (c.RepairTask(x.by, RepairRequest(x.task, what, "stuck")),)


def _may_read(x: Call, action: str, query: Any) -> tuple[Any, ...]:
    """Return the use of a right and the query that it covers, in this order."""
    return c.UseRight(x.by, action), query


def _granted(x: Call, parent: str | None) -> Grant:
    return Grant(Capability(x.fresh, x.bob, "a2a.recv.given@lab", x.caller, 1, parent=parent), "")


def _enrolled_with_grants(x: Call, agent: AgentId) -> c.EnrollPeer:
    grant = Grant(Capability(x.fresh, agent, "a2a.send.*", x.caller, 1), "")
    return c.EnrollPeer(x.by, agent, Role.PEER, "digest", (grant,))


_HOLDER: Final[dict[str, Any]] = {"names": LEASE, "on": TASKS}
_ANSWER: Final[dict[str, Any]] = {
    **_HOLDER,
    "action": "a2a.respond.<sender>",
    "carries": _scopes(("peer", "task", "lease")),
    "free": _parties((ITSELF,)),
}
_RUN_HOLDER: Final[dict[str, Any]] = {"names": LEASE, "on": (State.RUNNING, State.PARKED, State.UNKNOWN)}
_REPAIR: Final[dict[str, Any]] = {"names": TASK, "on": TASKS}
_WEBHOOK: Final[dict[str, Any]] = {"names": TASK, "on": TASKS, "only": _parties((OPERATOR, SENDER))}

VERBS: Final = (
    # sending
    Verb(
        name="send a task",
        action="a2a.send.<recipient>",
        carries=_scopes(("peer", "task")),
        rule=lambda x: (c.SendTask(x.caller, _task(x)),),
        http="POST /a2a/tasks",
        ipc="send_a2a_task",
        body="task",
        members=lambda x: {"task": {"id": x.task, "recipient": {"display": "bob@lab"}, "intent_text": "draft"}},
    ),
    Verb(
        name="send a task by the A2A protocol",
        action="a2a.send.<recipient>",
        carries=_scopes(("peer",)),
        rule=lambda x: (c.SendTask(x.caller, Task(recipient=x.bob, intent_text="draft"), protocol=True, shown=True),),
        a2a="SendMessage",
        rest="POST /message:send",
        params=_user_message,
    ),
    Verb(
        name="send a task and follow it",
        action="a2a.send.<recipient>",
        carries=_scopes(("peer",)),
        rule=lambda x: (c.SendTask(x.caller, Task(recipient=x.bob, intent_text="draft"), protocol=True, shown=True),),
        a2a="SendStreamingMessage",
        rest="POST /message:stream",
        params=_user_message,
        streams=True,
    ),
    Verb(
        name="send many tasks",  # each is let in or refused by itself
        action="a2a.send.<recipient>",
        carries=_scopes(("peer", "task")),
        rule=lambda x: (c.SendTask(x.caller, _task(x)),),
        http="POST /a2a/tasks/batch",
        ipc="send_a2a_tasks",
        members=lambda x: {"tasks": [{"id": x.task, "recipient": {"display": "bob@lab"}, "intent_text": "draft"}]},
    ),
    Verb(
        name="send a task in the name of another",
        action="a2a.send.<recipient>",
        carries=_scopes(("peer", "task")),
        speaks_for_sender=True,
        rule=lambda x: (c.SendTask(x.caller, _task(x, sender=x.alice)),),
    ),
    Verb(
        name="send a task to nobody",
        action="a2a.send.<nobody>",
        carries=_scopes(("peer", "task")),
        lets_in="unknown_peer",
        rule=lambda x: (c.SendTask(x.caller, Task(recipient=x.nobody, intent_text="draft", id=x.task)),),
    ),
    Verb(
        name="be sent a task, where recipients choose their senders",
        action="a2a.recv.<caller>",
        carries=_scopes(("peer",)),
        refusal="recipient_refused",
        asks_recipient=True,
        free=_parties((ADDRESSED,)),
        besides=("a2a.send.*",),
        rule=lambda x: (c.SendTask(x.caller, _task(x)),),
    ),
    Verb(
        name="add a message",
        names=TASK,
        on=TASKS,
        action="a2a.send.<recipient>",
        carries=_scopes(("peer", "task")),
        only=_parties((OPERATOR, SENDER)),
        rule=lambda x: (c.AddMessage(x.by, x.task, _said(x, "ROLE_USER")),),
        http="POST /a2a/tasks/{task_id}/message",
        ipc="add_a2a_message",
        members=lambda x: {"task_id": x.task, "text": "and more"},
        a2a="SendMessage",
        rest="POST /message:send",
        params=lambda x: _user_message(x, taskId=x.task),
    ),
    Verb(
        name="cancel a task",
        names=TASK,
        on=(*TASKS, State.CANCELED),
        repeats_on=State.CANCELED,
        action="a2a.cancel.<other side>",
        carries=_scopes(("peer", "task")),
        only=_parties((OPERATOR, SENDER)),
        rule=lambda x: (c.CancelTask(x.by, x.task, "no longer needed"),),
        http="POST /a2a/tasks/{task_id}/cancel",
        ipc="cancel_a2a_task",
        members=lambda x: {"task_id": x.task, "reason": "no longer needed"},
        a2a="CancelTask",
        rest="POST /tasks/{id}:cancel",
        params=lambda x: {"id": x.task},
    ),
    # receiving
    Verb(
        name="receive a task",
        rule=lambda x: (c.LeaseTasks(x.by, x.caller, "w1"),),
        http="GET /a2a/tasks/next",
        ipc="try_recv_a2a_task",
        members=lambda x: {},
    ),
    Verb(
        name="receive several tasks",
        rule=lambda x: (c.LeaseTasks(x.by, x.caller, "w1", 2),),
        http="POST /a2a/tasks/next/batch",
        ipc="try_recv_a2a_tasks",
        members=lambda x: {"limit": 2},
    ),
    Verb(
        name="receive a task of another",
        only=_parties((OPERATOR,)),
        rule=lambda x: (c.LeaseTasks(x.by, x.zoe, "w1"),),
        http="POST /a2a/tasks/next?for={for}",
        ipc="try_recv_a2a_task",
        members=lambda x: {"for": "zoe@lab"},
    ),
    Verb(
        name="receive a task of anybody",
        only=_parties((OPERATOR,)),
        rule=lambda x: (c.LeaseTasks(x.by, None, "w1"),),
        http="GET /a2a/tasks/next",
        ipc="try_recv_a2a_task",
        members=lambda x: {"for": "*"},
    ),
    Verb(
        name="receive a result",
        rule=lambda x: (c.DrainResults(x.by, x.caller),),
        http="GET /a2a/results/next",
        ipc="try_recv_a2a_result",
        members=lambda x: {},
    ),
    Verb(
        name="receive several results",
        rule=lambda x: (c.DrainResults(x.by, x.caller, 2),),
        http="POST /a2a/results/next/batch",
        ipc="try_recv_a2a_results",
        members=lambda x: {"limit": 2},
    ),
    Verb(
        name="receive a result of another",
        only=_parties((OPERATOR,)),
        rule=lambda x: (c.DrainResults(x.by, x.zoe),),
        http="POST /a2a/results/next?for={for}",
        ipc="try_recv_a2a_result",
        members=lambda x: {"for": "zoe@lab"},
    ),
    Verb(
        name="give back what was received",  # by the receipt that the caller itself made up
        rule=lambda x: (c.GiveBack(x.by, (), ()),),
        http="POST /a2a/give-back",
        ipc="give_back",
        members=lambda x: {"receipt": "r-1"},
    ),
    # reading
    Verb(
        name="list the newest tasks",
        rule=lambda x: (q.RecentTasks(x.by, 10),),
        http="GET /a2a/tasks/recent",
        ipc="recent_a2a_tasks",
        members=lambda x: {},
    ),
    Verb(
        name="list the newest results",
        rule=lambda x: (q.RecentResults(x.by, 10),),
        http="GET /a2a/results/recent",
        ipc="recent_a2a_results",
        members=lambda x: {},
    ),
    Verb(
        name="look at the queue",
        rule=lambda x: (q.ListQueue(x.by, 10),),
        http="GET /a2a/queue",
        ipc="a2a_queue",
        members=lambda x: {},
    ),
    Verb(
        name="follow all events",
        rule=lambda x: (),
        http="GET /a2a/events",
        members=lambda x: {},
        streams=True,
    ),
    Verb(
        name="get a task",
        names=TASK,
        on=TASKS,
        rule=lambda x: (q.GetTask(x.by, x.task),),
        http="GET /a2a/tasks/{task_id}",
        ipc="get_a2a_task",
        members=lambda x: {"task_id": x.task},
    ),
    Verb(
        name="get a task as the A2A protocol shows it",
        names=TASK,
        on=TASKS,
        rule=lambda x: (q.GetDialog(x.by, x.task), c.ShowTask(x.by, x.task)),
        a2a="GetTask",
        rest="GET /tasks/{id}",
        params=lambda x: {"id": x.task},
    ),
    Verb(
        name="list tasks as the A2A protocol shows them",
        rule=lambda x: (q.ListDialogs(x.caller, x.bob.pubkey, 10),),
        a2a="ListTasks",
        rest="GET /tasks",
        params=lambda x: {},
    ),
    Verb(
        name="follow a task",
        names=TASK,
        on=TASKS,
        rule=lambda x: (q.GetDialog(x.by, x.task), q.GetPlace(x.by, x.task)),
        a2a="SubscribeToTask",
        rest="GET /tasks/{id}:subscribe",
        params=lambda x: {"id": x.task},
        streams=True,
    ),
    Verb(
        name="get what hangs below a task",
        names=TASK,
        on=TASKS,
        rule=lambda x: (q.GetTree(x.by, x.task),),
        http="GET /a2a/tasks/{task_id}/tree",
        ipc="get_a2a_tree",
        members=lambda x: {"task_id": x.task},
    ),
    Verb(
        name="get the story of a task",
        names=TASK,
        on=TASKS,
        rule=lambda x: (q.GetTask(x.by, x.task),),
        http="GET /a2a/tasks/{task_id}/why",
        ipc="a2a_story",
        members=lambda x: {"task_id": x.task},
    ),
    Verb(
        name="get a result",
        names=TASK,
        on=TASKS,
        rule=lambda x: (q.GetResult(x.by, x.task),),
        http="GET /a2a/results/{task_id}",
        ipc="get_a2a_result",
        members=lambda x: {"task_id": x.task},
    ),
    # holding a lease
    Verb(
        name="post a result",
        **{**_ANSWER, "names": TASK},
        repeats_on=State.ENDED,
        only=_parties((OPERATOR, RECIPIENT)),
        rule=lambda x: (c.PostResult(x.by, Result(x.task, "ok", (), None, x.lease), "w1"),),
        http="POST /a2a/results",
        ipc="post_a2a_result",
        body="result",
        members=lambda x: {"result": {"task_id": x.task, "lease_id": x.lease, "status": "ok", "content": []}},
    ),
    Verb(
        name="give a sign of life",
        **_HOLDER,
        rule=lambda x: (c.BeatLease(x.by, x.lease),),
        http="POST /a2a/leases/{lease_id}/heartbeat",
        ipc="heartbeat_a2a_lease",
        members=lambda x: {"lease_id": x.lease},
    ),
    Verb(
        name="release a lease",
        **_HOLDER,
        rule=lambda x: (c.ReleaseLease(x.by, x.lease),),
        http="POST /a2a/leases/{lease_id}/release",
        ipc="release_a2a_lease",
        members=lambda x: {"lease_id": x.lease},
    ),
    Verb(
        name="read what the sender has added",
        **_HOLDER,
        rule=lambda x: (q.ListInputs(x.by, x.lease),),
        http="GET /a2a/leases/{lease_id}/inputs",
        ipc="inputs_a2a_lease",
        members=lambda x: {"lease_id": x.lease},
    ),
    Verb(
        name="say how far the work is",
        **_ANSWER,
        rule=lambda x: (c.UpdateTask(x.by, x.lease, _said(x)),),
        http="POST /a2a/leases/{lease_id}/update",
        ipc="update_a2a_lease",
        members=lambda x: {"lease_id": x.lease, "text": "half way"},
    ),
    Verb(
        name="ask the sender",
        **_ANSWER,
        rule=lambda x: (c.UpdateTask(x.by, x.lease, None, x.asks),),
        http="POST /a2a/leases/{lease_id}/ask",
        ipc="ask_a2a_lease",
        members=lambda x: {"lease_id": x.lease},
    ),
    Verb(
        name="hand over an artifact",
        **_ANSWER,
        rule=lambda x: (c.AddArtifact(x.by, x.lease, _PIECE),),
        http="POST /a2a/leases/{lease_id}/artifact",
        ipc="artifact_a2a_lease",
        members=lambda x: {"lease_id": x.lease, "artifact": {"artifactId": "draft", "parts": [{"text": "one"}]}},
    ),
    Verb(
        name="reject a task",
        **_ANSWER,
        rule=lambda x: (c.RejectTask(x.by, x.lease, _said(x)),),
        http="POST /a2a/leases/{lease_id}/reject",
        ipc="reject_a2a_lease",
        members=lambda x: {"lease_id": x.lease, "text": "not mine to do"},
    ),
    Verb(
        name="answer by a message alone",
        **{**_ANSWER, "on": tuple(state for state in TASKS if state is not State.OWN)},
        rule=lambda x: (c.ReplyDirectly(x.by, x.lease, _said(x)),),
        http="POST /a2a/leases/{lease_id}/reply",
        ipc="reply_a2a_lease",
        members=lambda x: {"lease_id": x.lease, "text": "hello"},
    ),
    # runs of durable agents
    Verb(
        name="commit a step of a run",
        **{**_ANSWER, "on": _RUN_HOLDER["on"]},
        rule=lambda x: (c.CommitRun(x.by, x.lease, RunCommit(number=2), "w1"),),
        http="POST /a2a/leases/{lease_id}/commit",
        ipc="commit_run",
        body="commit",
        members=lambda x: {"lease_id": x.lease, "commit": {"number": 2}},
    ),
    Verb(
        name="give a task from a run to another agent",
        **_RUN_HOLDER,
        action="a2a.send.<zoe>",
        carries=_scopes(("peer", "task")),
        from_run=True,
        besides=("a2a.respond.*",),
        rule=lambda x: (
            c.CommitRun(
                x.by,
                x.lease,
                RunCommit(number=2, tasks=(Task(id=x.child, recipient=x.zoe, intent_text="a part of it"),)),
                "w1",
            ),
        ),
    ),
    Verb(
        name="load a run",
        **_RUN_HOLDER,
        rule=lambda x: (q.LoadRun(x.by, x.lease),),
        http="GET /a2a/leases/{lease_id}/run",
        ipc="load_run",
        members=lambda x: {"lease_id": x.lease},
    ),
    Verb(
        name="look for what a run waits for",
        **_RUN_HOLDER,
        rule=lambda x: (q.LookAround(x.by, x.lease, _GO),),
        http="POST /a2a/leases/{lease_id}/look",
        ipc="look_around",
        members=lambda x: {"lease_id": x.lease, "wait": {"signals": ["go"]}},
    ),
    Verb(
        name="find an entry of a run",
        **_RUN_HOLDER,
        rule=lambda x: (q.FindEntry(x.by, x.lease, "k"),),
        http="GET /a2a/leases/{lease_id}/entry",
        ipc="find_entry",
        members=lambda x: {"lease_id": x.lease, "key": "k"},
    ),
    Verb(
        name="list runs",
        rule=lambda x: (q.ListRuns(x.by, 10),),
        http="GET /runs",
        ipc="list_runs",
        members=lambda x: {},
    ),
    Verb(
        name="get a run",
        names=TASK,
        on=RUNS,
        rule=lambda x: (q.GetRun(x.by, x.task),),
        http="GET /runs/{task_id}",
        ipc="get_run",
        members=lambda x: {"task_id": x.task},
    ),
    Verb(
        name="read the entries of a run",
        names=TASK,
        on=RUNS,
        rule=lambda x: (q.ListEntries(x.by, x.task, 10),),
        http="GET /runs/{task_id}/entries",
        ipc="run_entries",
        members=lambda x: {"task_id": x.task},
    ),
    Verb(
        name="signal a run",
        names=TASK,
        on=RUNS,
        action="a2a.send.<recipient>",
        carries=_scopes(("peer", "task")),
        free=_parties((RECIPIENT,)),
        rule=lambda x: (c.SignalRun(x.by, x.task, "go"),),
        http="POST /runs/{task_id}/signal",
        ipc="signal_run",
        members=lambda x: {"task_id": x.task, "name": "go", "value": 1},
    ),
    Verb(
        name="signal a run, and start it if it is not there",  # who may not send does not learn whether it is
        on=(State.NOTHING, State.RUNNING, State.PARKED),
        free=_parties((RECIPIENT,)),
        action="a2a.send.<recipient>",
        carries=_scopes(("peer", "task")),
        rule=lambda x: (c.SignalRun(x.by, x.task, "go", Raw(b"1"), None, _task(x)),),
        http="POST /runs/{task_id}/signal",
        ipc="signal_run",
        members=lambda x: {
            "task_id": x.task,
            "name": "go",
            "start": {"id": x.task, "recipient": {"display": "bob@lab"}, "intent_text": "a run"},
        },
    ),
    Verb(
        name="start a run in the name of another",
        action="a2a.send.<recipient>",
        carries=_scopes(("peer", "task")),
        speaks_for_sender=True,
        rule=lambda x: (c.SignalRun(x.by, x.task, "go", Raw(b"1"), None, _task(x, sender=x.alice)),),
    ),
    Verb(
        name="start a run of nobody",
        action="a2a.send.<nobody>",
        carries=_scopes(("peer", "task")),
        lets_in="unknown_peer",
        rule=lambda x: (
            c.SignalRun(x.by, x.task, "go", Raw(b"1"), None, Task(recipient=x.nobody, intent_text="run", id=x.task)),
        ),
    ),
    Verb(
        name="wake a run",
        names=TASK,
        on=RUNS,
        only=_parties((OPERATOR, RECIPIENT)),
        rule=lambda x: (c.WakeRun(x.by, x.task),),
        http="POST /runs/{task_id}/wake",
        ipc="wake_run",
        members=lambda x: {"task_id": x.task},
    ),
    Verb(
        name="take a run from a dead worker",
        names=TASK,
        on=RUNS,
        action="a2a.repair.requeue",
        carries=_scopes(("peer", "task", "risk")),
        free=_parties((RECIPIENT,)),
        rule=lambda x: (c.ResumeRun(x.by, x.task, None, "w1", "attested", "it crashed"),),
        http="POST /runs/{task_id}/resume",
        ipc="resume_run",
        members=lambda x: {"task_id": x.task, "dead": "w1", "evidence": "attested", "reason": "it crashed"},
    ),
    Verb(
        name="say what became of an effect",
        names=TASK,
        on=(State.PARKED, State.RUNNING, State.UNKNOWN),
        action="a2a.repair.requeue",
        carries=_scopes(("peer", "task", "risk")),
        free=_parties((RECIPIENT,)),
        rule=lambda x: (c.JudgeEffect(x.by, x.task, "charge", "retry", "I looked"),),
        http="POST /runs/{task_id}/effect",
        ipc="judge_effect",
        members=lambda x: {"task_id": x.task, "effect": "charge", "verdict": "retry", "reason": "I looked"},
    ),
    # repair
    Verb(
        name="requeue a task",
        **_REPAIR,
        action="a2a.repair.requeue",
        carries=_scopes(("peer", "task", "lease", "risk")),
        rule=lambda x: _repair(x, Requeue(x.risk, x.lease)),
        http="POST /a2a/repair",
        ipc="repair_a2a_task",
        body="request",
        members=lambda x: {
            "request": {
                "task_id": x.task,
                "reason": "stuck",
                "command": {"action": "requeue", "duplicate_risk": x.risk, "lease_id": x.lease},
            }
        },
    ),
    Verb(
        name="end a task with an error",
        **_REPAIR,
        action="a2a.repair.force_error",
        carries=_scopes(("peer", "task", "lease")),
        rule=lambda x: _repair(x, ForceError("it hangs", x.lease)),
        http="POST /a2a/repair",
        ipc="repair_a2a_task",
        body="request",
        members=lambda x: {
            "request": {
                "task_id": x.task,
                "reason": "stuck",
                "command": {"action": "force_error", "message": "it hangs", "lease_id": x.lease},
            }
        },
    ),
    Verb(
        name="preview the retry gate",
        only=_parties((OPERATOR,)),
        rule=lambda x: (c.RetryStale(x.by, RetryPolicy()),),
        http="POST /a2a/retry-stale",
        ipc="retry_a2a_stale",
        members=lambda x: {},
    ),
    Verb(
        name="run the retry gate",
        action="a2a.repair.requeue",
        each=True,
        only=_parties((OPERATOR,)),
        rule=lambda x: (c.RetryStale(x.by, RetryPolicy(enabled=True)),),
        http="POST /a2a/retry-stale",
        ipc="retry_a2a_stale",
        members=lambda x: {"policy": {"enabled": True}},
    ),
    Verb(
        name="list cached results",
        rule=lambda x: (q.ListCached(x.by, 10),),
        http="GET /a2a/cache",
        ipc="list_a2a_cache",
        members=lambda x: {},
    ),
    Verb(
        name="forget a cached result",
        names=CACHED,
        on=(State.CACHED, State.UNKNOWN),
        action="a2a.cache.forget",
        rule=lambda x: (c.ForgetCached(x.by, x.slot, "wrong"),),
        http="DELETE /a2a/cache",
        ipc="forget_a2a_cached",
        members=lambda x: {"entry_id": x.slot, "reason": "wrong"},
    ),
    Verb(
        name="compact the history",
        action="store.compact",
        rule=lambda x: (c.CompactHistory(x.by, None),),
        http="POST /a2a/compact",
        ipc="compact_a2a",
        members=lambda x: {},
    ),
    # webhooks and cards
    Verb(
        name="set a webhook",
        **_WEBHOOK,
        rule=lambda x: (c.SetPush(x.by, x.task, PushConfig(id="hook", url=_URL)),),
        a2a="CreateTaskPushNotificationConfig",
        rest="POST /tasks/{taskId}/pushNotificationConfigs",
        params=lambda x: {"taskId": x.task, "id": "hook", "url": _URL},
    ),
    Verb(
        name="get a webhook",
        **_WEBHOOK,
        rule=lambda x: (q.GetPush(x.by, x.task, "hook"),),
        a2a="GetTaskPushNotificationConfig",
        rest="GET /tasks/{taskId}/pushNotificationConfigs/{id}",
        params=lambda x: {"taskId": x.task, "id": "hook"},
    ),
    Verb(
        name="list webhooks",
        **_WEBHOOK,
        rule=lambda x: (q.ListPushes(x.by, x.task),),
        a2a="ListTaskPushNotificationConfigs",
        rest="GET /tasks/{taskId}/pushNotificationConfigs",
        params=lambda x: {"taskId": x.task},
    ),
    Verb(
        name="drop a webhook",
        **_WEBHOOK,
        rule=lambda x: (c.DropPush(x.by, x.task, "hook"),),
        a2a="DeleteTaskPushNotificationConfig",
        rest="DELETE /tasks/{taskId}/pushNotificationConfigs/{id}",
        params=lambda x: {"taskId": x.task, "id": "hook"},
    ),
    Verb(
        name="publish one's own card",
        action="agents.publish",
        free=_parties((OPERATOR,)),
        rule=lambda x: (c.PublishCard(x.by, x.caller, {"name": "me"}),),
        http="POST /a2a/agents",
        ipc="publish_agent",
        members=lambda x: {},
    ),
    Verb(
        name="publish the card of another",
        action="agents.publish",
        free=_parties((OPERATOR,)),
        only=_parties((OPERATOR,)),
        rule=lambda x: (c.PublishCard(x.by, x.zoe, {"name": "zoe"}),),
        http="POST /a2a/agents",
        ipc="publish_agent",
        members=lambda x: {"name": "zoe@lab", "card": {"name": "zoe"}},
    ),
    Verb(
        name="withdraw one's own card",
        action="agents.publish",
        free=_parties((OPERATOR,)),
        rule=lambda x: (c.WithdrawCard(x.by, x.caller),),
        http="DELETE /a2a/agents/{name}",
        ipc="withdraw_agent",
        members=lambda x: {"name": x.caller.display},
    ),
    Verb(
        name="withdraw the card of another",
        action="agents.publish",
        free=_parties((OPERATOR,)),
        only=_parties((OPERATOR,)),
        rule=lambda x: (c.WithdrawCard(x.by, x.zoe),),
        http="DELETE /a2a/agents/{name}",
        ipc="withdraw_agent",
        members=lambda x: {"name": "zoe@lab"},
    ),
    Verb(
        name="list published agents",
        rule=lambda x: (q.ListCards(x.by, 10),),
        http="GET /a2a/agents",
        ipc="list_agents",
        members=lambda x: {},
    ),
    Verb(
        name="get a published agent",
        rule=lambda x: (q.GetCard(x.by, x.bob.pubkey),),
        http="GET /a2a/agents/{name}",
        ipc="get_agent",
        members=lambda x: {"name": "bob@lab"},
    ),
    Verb(
        name="get the extended card of an agent",
        rule=lambda x: (q.GetCard(x.by, x.bob.pubkey),),
        a2a="GetExtendedAgentCard",
        rest="GET /extendedAgentCard",
        params=lambda x: {},
    ),
    # peers and grants
    Verb(
        name="enroll a peer",
        action="peers.enroll",
        free=_parties((OPERATOR,)),
        rule=lambda x: (c.EnrollPeer(x.by, AgentId.named(f"p{x.fresh}@lab"), Role.PEER, "digest"),),
        http="POST /peers",
        ipc="enroll_peer",
        members=lambda x: {"display": f"p{x.fresh}@lab"},
    ),
    Verb(
        name="enroll a peer with grants",
        action="peers.enroll",
        free=_parties((OPERATOR,)),
        only=_parties((OPERATOR,)),
        rule=lambda x: (_enrolled_with_grants(x, AgentId.named(f"p{x.fresh}@lab")),),
        http="POST /peers",
        ipc="enroll_peer",
        members=lambda x: {"display": f"p{x.fresh}@lab", "grants": ["a2a.send.*"]},
    ),
    Verb(
        name="list peers",
        action="peers.list",
        free=_parties((OPERATOR,)),
        rule=lambda x: _may_read(x, "peers.list", q.ListPeers(x.by, 10)),
        http="GET /peers",
        ipc="list_peers",
        members=lambda x: {},
    ),
    Verb(
        name="revoke a peer",
        action="peers.revoke",
        free=_parties((OPERATOR,)),
        rule=lambda x: (c.RevokePeer(x.by, x.visitor.pubkey, "left"),),
        http="DELETE /peers/{peer}",
        ipc="revoke_peer",
        members=lambda x: {"peer": x.visitor.display},
    ),
    Verb(
        name="change one's own token",
        rule=lambda x: (c.RotateToken(x.by, x.caller.pubkey, "digest"),),
        http="POST /peers/rotate",
        ipc="rotate_token",
        members=lambda x: {},
    ),
    Verb(
        name="change the token of another",
        only=_parties((OPERATOR,)),
        rule=lambda x: (c.RotateToken(x.by, x.visitor.pubkey, "digest"),),
        http="POST /peers/rotate",
        ipc="rotate_token",
        members=lambda x: {"peer": x.visitor.display},
    ),
    Verb(
        name="grant an action",
        only=_parties((OPERATOR,)),
        rule=lambda x: (c.GrantCapability(x.by, _granted(x, None)),),
        http="POST /capabilities",
        ipc="grant_capability",
        members=lambda x: {"subject": "bob@lab", "action": "a2a.recv.given@lab"},
    ),
    Verb(
        name="pass a grant on",
        names=Named("grant", _parties((OPERATOR, HOLDER)), "unknown_grant"),
        on=(State.GRANTED, State.UNKNOWN),
        rule=lambda x: (c.GrantCapability(x.by, _granted(x, x.grant)),),
        http="POST /capabilities",
        ipc="grant_capability",
        members=lambda x: {"subject": "bob@lab", "action": "a2a.recv.given@lab", "parent": x.grant},
    ),
    Verb(
        name="revoke a grant",
        names=GRANT,
        on=(State.GRANTED, State.PASSED_ON, State.UNKNOWN),
        only=_parties((OPERATOR, GRANTER)),
        rule=lambda x: (c.RevokeCapability(x.by, x.grant, "over"),),
        http="DELETE /capabilities/{grant_id}",
        ipc="revoke_capability",
        members=lambda x: {"grant_id": x.grant},
    ),
    Verb(
        name="list one's own grants",
        rule=lambda x: (q.ListGrants(x.by, 10, x.caller.pubkey),),
        http="GET /capabilities",
        ipc="list_capabilities",
        members=lambda x: {},
    ),
    Verb(
        name="list the grants of another",
        action="capabilities.list",
        free=_parties((OPERATOR,)),
        rule=lambda x: _may_read(x, "capabilities.list", q.ListGrants(x.by, 10, x.zoe.pubkey)),
        http="GET /capabilities",
        ipc="list_capabilities",
        members=lambda x: {"subject": "zoe@lab"},
    ),
    Verb(
        name="ask what one may oneself",
        rule=lambda x: (q.CheckGrant(None, x.caller.pubkey, Demand("audit.read", "check")),),
        http="GET /capabilities/check",
        ipc="check_capability",
        members=lambda x: {"action": "audit.read"},
    ),
    Verb(
        name="ask what another may",
        action="capabilities.list",
        free=_parties((OPERATOR,)),
        rule=lambda x: _may_read(
            x, "capabilities.list", q.CheckGrant(None, x.zoe.pubkey, Demand("audit.read", "check"))
        ),
        http="GET /capabilities/check",
        ipc="check_capability",
        members=lambda x: {"action": "audit.read", "subject": "zoe@lab"},
    ),
    # the exchange itself
    Verb(
        name="read the audit: one's own rows, or with `audit.read` those of all",
        rule=lambda x: (),
        http="GET /audit",
        ipc="recent_audit",
        members=lambda x: {},
    ),
    Verb(
        name="list daemons",
        action="audit.read",
        free=_parties((OPERATOR,)),
        rule=lambda x: (c.UseRight(x.by, "audit.read"),),
        http="GET /daemons",
        ipc="list_daemons",
        members=lambda x: {},
    ),
    Verb(name="ask who one is", rule=lambda x: (), http="GET /whoami", ipc="whoami", members=lambda x: {}),
    Verb(name="ask for the version", rule=lambda x: (), ipc="version", members=lambda x: {}),
)


# --- what needs no row -------------------------------------------------------------------------------------------

OPEN: Final = {  # HTTP without a token
    "GET /healthz": "whether the process lives",
    "GET /readyz": "whether it takes work",
    "GET /version": "the realm's key, and the limits that a client needs to know",
    "GET /metrics": "totals",
    "GET /openapi.json": "the description of this API",
    "GET /docs": "a page to try it",
    "GET /.well-known/agent-card.json": "the card of the default agent",
    "GET /agents/bob@lab/.well-known/agent-card.json": "the card of an agent",
}
INTERNAL: Final[dict[type, str]] = {  # what no caller can ask for
    c.CancelChildren: "a step of a cascade",
    c.SettleSlot: "a step of what follows a result",
    c.SweepRun: "a step of what a run lets go of",
    c.EndGrants: "a step of what a revoked peer leaves",
    c.Expire: "the clock",
    c.SignHead: "the daemon signs the end of the audit chain",
    c.NoteRefusal: "the daemon writes down who came without a token",
    c.NotePush: "the daemon notes how far a webhook was told",
    q.GetPushed: "the daemon looks how far a webhook was told",
    q.DeepQueues: "the daemon looks for queues that are too long",
}
