"""What goes over the wire, in both directions, on HTTP and IPC alike.

Every request and every reply is an object with a `kind`. Over IPC the whole object is a frame; over HTTP its members
come from the path, the query and the body, as `places` says. Shapes that the first protocol had are kept to the letter;
what was added stands beside them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Raw, Struct, field

from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow
from covenant.model.daemon import DaemonView
from covenant.model.limits import Limits
from covenant.model.message import Artifact, Message
from covenant.model.peer import GrantedView, PeerView, Scope
from covenant.model.record import Asks, TaskState
from covenant.model.repair import RepairOutcome, RepairRequest, RetryPolicy, RetryReport
from covenant.model.run import (
    NOTHING,
    EntryFound,
    EntrySeen,
    Evidence,
    RunCommit,
    RunLoaded,
    RunSeen,
    RunStatus,
    Standing,
    Verdict,
    Wait,
)
from covenant.model.task import Result, Task
from covenant.model.view import Answer, CachedResult, Input, QueueEntry, TreeNode

PAGE = 10


# --- requests ----------------------------------------------------------------------------------------------


class Request(
    Struct, frozen=True, tag_field="kind", omit_defaults=True, gc=False, kw_only=True, forbid_unknown_fields=True
):
    """`id` is the caller's, and comes back with the reply: with it, requests of one connection run side by side.

    An unknown member is refused: a filter or a bound with a slip in its name would else be ignored without a word.
    (Contract 34.) What a request carries, a task or a result, ignores its unknown members as the first protocol does.
    """

    id: int | str | None = None


class Authenticate(Request, frozen=True, tag="authenticate"):
    token: str


class SendTask(Request, frozen=True, tag="send_a2a_task"):
    task: Task


class SendTasks(Request, frozen=True, tag="send_a2a_tasks"):
    tasks: list[Task]


class RecvTask(Request, frozen=True, tag="try_recv_a2a_task"):
    """`for` names a recipient other than the caller: `*` is everybody. That is the operator's. `receipt` is a name that
    the caller makes up: the same receive again gets the same answer, and `give_back` undoes it. `incarnation` names the
    worker that will hold the lease; without it, the worker is the caller's key, whichever daemon answers."""

    wait_ms: int = 0
    incarnation: str | None = None
    recipient: str | None = field(default=None, name="for")
    receipt: str | None = None


class RecvTasks(Request, frozen=True, tag="try_recv_a2a_tasks"):
    """`kinds`: of these alone; an empty name stands for tasks without a kind."""

    limit: int
    wait_ms: int = 0
    incarnation: str | None = None
    recipient: str | None = field(default=None, name="for")
    receipt: str | None = None
    kinds: frozenset[str] | None = None


class RecentTasks(Request, frozen=True, tag="recent_a2a_tasks"):
    limit: int = PAGE


class PostResult(Request, frozen=True, tag="post_a2a_result"):
    """`incarnation` is as of a receive. A result that names no lease is taken from the worker of the first attempt."""

    result: Result
    incarnation: str | None = None


class RecvResult(Request, frozen=True, tag="try_recv_a2a_result"):
    wait_ms: int = 0
    peer: str | None = field(default=None, name="for")
    receipt: str | None = None


class RecvResults(Request, frozen=True, tag="try_recv_a2a_results"):
    limit: int
    wait_ms: int = 0
    peer: str | None = field(default=None, name="for")
    receipt: str | None = None


class GiveBack(Request, frozen=True, tag="give_back"):
    """Undo a receive whose answer never came: it has taken nothing, or gives back what it took."""

    receipt: str


class RecentResults(Request, frozen=True, tag="recent_a2a_results"):
    limit: int = PAGE


class Queue(Request, frozen=True, tag="a2a_queue"):
    limit: int = PAGE
    min_lease_age_ms: int | None = None
    deadline_within_ms: int | None = None
    state: TaskState | None = None
    cursor: str | None = None


class GetTask(Request, frozen=True, tag="get_a2a_task"):
    task_id: str
    current_generation: int | None = None
    wait_ms: int = 0
    cancel_known: bool | None = None  # a wait also ends when a cancel is asked for that the caller does not know of


class GetTree(Request, frozen=True, tag="get_a2a_tree"):
    task_id: str


class GetResult(Request, frozen=True, tag="get_a2a_result"):
    task_id: str


class Heartbeat(Request, frozen=True, tag="heartbeat_a2a_lease"):
    lease_id: str


class Release(Request, frozen=True, tag="release_a2a_lease"):
    lease_id: str
    reason: str = "released"
    not_before_ms: int | None = None


class AddMessage(Request, frozen=True, tag="add_a2a_message"):
    """More from the sender of an open task, as input for who holds it, or will. `text` stands for a message of one
    part. With `if_generation` only if the task is still as the caller knows it."""

    task_id: str
    message: Message | None = None
    text: str | None = None
    if_generation: int | None = None


class Update(Request, frozen=True, tag="update_a2a_lease"):
    """How far the holder is. `text` stands for a message of one part. `receipt` is a name that the caller makes up:
    the same update again under it is the same update."""

    lease_id: str
    message: Message | None = None
    text: str | None = None
    receipt: str | None = None


class AddArtifact(Request, frozen=True, tag="artifact_a2a_lease"):
    """What the holder has made: a whole artifact, or with `append` a piece of one. `receipt` is as of an update."""

    lease_id: str
    artifact: Artifact
    append: bool = False
    last: bool = field(default=False, name="lastChunk")
    receipt: str | None = None


class Ask(Request, frozen=True, tag="ask_a2a_lease"):
    """The holder waits for its sender. With `after`, it asks only if the sender has said nothing behind that number.
    `text` and `receipt` are as of an update."""

    lease_id: str
    asks: Asks = Asks.INPUT
    message: Message | None = None
    text: str | None = None
    after: int | None = None
    receipt: str | None = None


class Reject(Request, frozen=True, tag="reject_a2a_lease"):
    """The holder will not do it, and says why."""

    lease_id: str
    message: Message | None = None
    text: str | None = None


class ReplyDirectly(Request, frozen=True, tag="reply_a2a_lease"):
    """A message is the whole answer, and there was no task: for what came by the A2A protocol. Where a client has seen
    the task already, the message is its last word."""

    lease_id: str
    message: Message | None = None
    text: str | None = None


class ListInputs(Request, frozen=True, tag="inputs_a2a_lease"):
    """What the sender has said since its first message, behind the number that the caller has read. A wait ends when
    there is something, or when a cancel is asked for that the caller does not know of."""

    lease_id: str
    after: int = 0
    wait_ms: int = 0
    cancel_known: bool = False


class CommitRun(Request, frozen=True, tag="commit_run"):
    """All that a run did since its last commit, and what it waits for or ends with. Under the same lease and number it
    is done once."""

    lease_id: str
    commit: RunCommit
    incarnation: str | None = None


class LoadRun(Request, frozen=True, tag="load_run"):
    """What a run remembers, for its holder: the steps behind this one, as many as an answer carries."""

    lease_id: str
    after: int = 0


class LookAround(Request, frozen=True, tag="look_around"):
    """For the holder of a run: what of this is there; with `every`, all the signals that fit."""

    lease_id: str
    wait: Wait
    every: bool = False


class FindEntry(Request, frozen=True, tag="find_entry"):
    """For the holder of a run: the entry that was added under this key."""

    lease_id: str
    key: str


class ListRuns(Request, frozen=True, tag="list_runs"):
    """Newest first. A page may end early and still have a cursor."""

    limit: int = PAGE
    status: RunStatus | None = None
    cursor: str | None = None


class GetRun(Request, frozen=True, tag="get_run"):
    task_id: str


class RunEntries(Request, frozen=True, tag="run_entries"):
    """The way to a leaf of a run, or to its last one, oldest first; with `every`, its other branches too. `before` goes
    on with what lies before a page."""

    task_id: str
    limit: int = PAGE
    leaf: int | None = None
    before: int | None = None
    every: bool = False


class SignalRun(Request, frozen=True, tag="signal_run"):
    """Tell a run something. Under the same key of the same caller it is told once; with `start`, the run begins with it
    if there is none yet."""

    task_id: str
    name: str
    value: Raw = NOTHING
    key: str | None = None
    start: Task | None = None


class WakeRun(Request, frozen=True, tag="wake_run"):
    """Make a run that waits ready to be taken up: for its own agent, and the operator."""

    task_id: str


class ResumeRun(Request, frozen=True, tag="resume_run"):
    """Take a run from the incarnation of a worker that is dead: silent for long enough, or known to be. It goes on
    under a lease of this incarnation; without one, any worker of its agent may take it up."""

    task_id: str
    dead: str
    reason: str
    evidence: Evidence = "lapsed"
    incarnation: str | None = None


class JudgeEffect(Request, frozen=True, tag="judge_effect"):
    """Say what became of an effect that is in doubt: `done` with its value, `failed` with a message, or `retry`."""

    task_id: str
    effect: str
    verdict: Verdict
    reason: str
    value: Raw = NOTHING


class Cancel(Request, frozen=True, tag="cancel_a2a_task"):
    task_id: str
    reason: str = "canceled"
    graceful: bool = False
    cascade: bool = False


class Repair(Request, frozen=True, tag="repair_a2a_task"):
    request: RepairRequest


class RetryStale(Request, frozen=True, tag="retry_a2a_stale"):
    policy: RetryPolicy = RetryPolicy()
    cursor: str | None = None
    scheduled: bool = False


class ListCache(Request, frozen=True, tag="list_a2a_cache"):
    limit: int = PAGE
    cursor: str | None = None


class ForgetCached(Request, frozen=True, tag="forget_a2a_cached"):
    entry_id: str
    reason: str


class Compact(Request, frozen=True, tag="compact_a2a"):
    older_than_ms: int | None = None


class EnrollPeer(Request, frozen=True, tag="enroll_peer"):
    display: str
    pubkey: str | None = None
    grants: list[str] = field(default_factory=list)


class ListPeers(Request, frozen=True, tag="list_peers"):
    limit: int = PAGE
    cursor: str | None = None


class RevokePeer(Request, frozen=True, tag="revoke_peer"):
    peer: str
    reason: str = "revoked"


class RotateToken(Request, frozen=True, tag="rotate_token"):
    """Of this peer; of the caller when none is named."""

    peer: str | None = None


class Grant(Request, frozen=True, tag="grant_capability"):
    subject: str
    action: str
    scope: Scope = Scope()
    expires_ms: int | None = None
    delegable: bool = False
    parent: str | None = None


class Revoke(Request, frozen=True, tag="revoke_capability"):
    grant_id: str
    reason: str = "revoked"


class ListGrants(Request, frozen=True, tag="list_capabilities"):
    limit: int = PAGE
    subject: str | None = None
    cursor: str | None = None


class Check(Request, frozen=True, tag="check_capability"):
    """Whether a call would be let in, and by which grant; nothing is used up."""

    action: str
    subject: str | None = None
    counterparty: str | None = None
    task_id: str | None = None
    lease_id: str | None = None
    duplicate_risk: str | None = None


class RecentAudit(Request, frozen=True, tag="recent_audit"):
    limit: int = PAGE
    before: int | None = None
    task_id: str | None = None
    actor: str | None = None
    row: str | None = None


class ListDaemons(Request, frozen=True, tag="list_daemons"):
    pass


class PublishAgent(Request, frozen=True, tag="publish_agent"):
    """Let the A2A protocol reach an agent: the caller, or for the operator the one that is named. Without a card, a
    plain one is made. A member that would not be served as it is written is refused. `supportedInterfaces` names the
    bindings that the card lists, as `[{"protocolBinding": "JSONRPC"}]`; without it, all that are served."""

    name: str | None = None
    card: dict[str, Any] | None = None


class ListAgents(Request, frozen=True, tag="list_agents"):
    limit: int = PAGE
    cursor: str | None = None


class GetAgent(Request, frozen=True, tag="get_agent"):
    name: str


class WithdrawAgent(Request, frozen=True, tag="withdraw_agent"):
    name: str


class Story(Request, frozen=True, tag="a2a_story"):
    task_id: str


class Version(Request, frozen=True, tag="version"):
    pass


class Whoami(Request, frozen=True, tag="whoami"):
    pass


# --- replies -----------------------------------------------------------------------------------------------


class Reply(Struct, frozen=True, tag_field="kind", omit_defaults=True, gc=False, kw_only=True):
    pass


class Beside(Struct, frozen=True, gc=False):
    """What stands beside a result in a list of results, at the same place."""

    task_id: str
    generation: int
    attempt: int
    replayed: bool = False


def beside(answer: Answer) -> Beside:
    return Beside(answer.result.task_id, answer.generation, answer.attempt, answer.replayed)


class Authenticated(Reply, frozen=True, tag="authenticated"):
    display: str
    pubkey: str
    role: str


class TaskQueued(Reply, frozen=True, tag="a2a_task_queued"):
    task_id: str
    generation: int
    duplicate: bool = False
    replayed: bool = False
    follows: str | None = None


class Failure(Struct, frozen=True, gc=False):
    """What became of one item of a batch that was refused."""

    code: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)


class BatchItem(Struct, frozen=True, gc=False, omit_defaults=True):
    sent: TaskQueued | None = None
    error: Failure | None = None


class TasksQueued(Reply, frozen=True, tag="a2a_tasks_queued"):
    items: list[BatchItem]


class TaskOpt(Reply, frozen=True, tag="a2a_task_opt"):
    task: Task | None = field(default_factory=lambda: None)
    lease_id: str | None = None
    attempt: int | None = None
    generation: int | None = None


class Delivered(Struct, frozen=True, gc=False):
    task: Task
    lease_id: str
    attempt: int
    generation: int


class Deliveries(Reply, frozen=True, tag="a2a_deliveries"):
    deliveries: list[Delivered]


class Tasks(Reply, frozen=True, tag="a2a_tasks"):
    tasks: list[Task]


class ResultPosted(Reply, frozen=True, tag="a2a_result_posted"):
    task_id: str
    generation: int
    duplicate: bool = False
    sequence: int | None = None


class ResultOpt(Reply, frozen=True, tag="a2a_result_opt"):
    result: Result | None = field(default_factory=lambda: None)
    generation: int | None = None
    attempt: int | None = None
    replayed: bool = False


class Results(Reply, frozen=True, tag="a2a_results"):
    results: list[Result]
    beside: list[Beside]


class GivenBack(Reply, frozen=True, tag="given_back"):
    receipt: str
    count: int


class QueueReply(Reply, frozen=True, tag="a2a_queue"):
    tasks: list[QueueEntry]
    results: list[Result]
    beside: list[Beside]
    cursor: str | None = None
    revoked: list[str] = []  # keys of revoked peers that these tasks wait for


class TaskReply(Reply, frozen=True, tag="a2a_task"):
    entry: QueueEntry


class TreeReply(Reply, frozen=True, tag="a2a_tree"):
    root: TreeNode
    size: int
    truncated: bool = False


class LeaseBeat(Reply, frozen=True, tag="a2a_lease"):
    task_id: str
    lease_id: str
    attempt: int
    cancel_requested: bool = False
    cancel_reason: str | None = None


class ReleasedReply(Reply, frozen=True, tag="a2a_released"):
    task_id: str
    attempt: int
    generation: int


class MovedReply(Reply, frozen=True, tag="a2a_moved"):
    """The task, and the generation that it has now."""

    task_id: str
    generation: int


class InputsReply(Reply, frozen=True, tag="a2a_inputs"):
    task_id: str
    generation: int
    inputs: list[Input]
    cancel_requested: bool = False
    cancel_reason: str | None = None


class StandingReply(Reply, frozen=True, tag="run_standing"):
    standing: Standing


class RunLoadedReply(Reply, frozen=True, tag="run_loaded"):
    loaded: RunLoaded


class EntryReply(Reply, frozen=True, tag="run_entry"):
    entry: EntryFound | None = field(default_factory=lambda: None)


class Runs(Reply, frozen=True, tag="run_list"):
    runs: list[RunSeen]
    cursor: str | None = None


class RunReply(Reply, frozen=True, tag="run"):
    run: RunSeen


class Entries(Reply, frozen=True, tag="run_entries"):
    """Oldest first; `before` goes on with what lies before them."""

    entries: list[EntrySeen]
    before: int | None = None


class SignaledReply(Reply, frozen=True, tag="run_signaled"):
    """`duplicate`: it had been told before; `started`: the run began with it."""

    task_id: str
    signal_id: str
    generation: int
    duplicate: bool = False
    started: bool = False


class ResumedReply(Reply, frozen=True, tag="run_resumed"):
    """The lease under which the run goes on, unless it waits for a worker; `requeued` are its tasks that were given
    back."""

    task: Task
    attempt: int
    generation: int
    lease_id: str | None = None
    requeued: list[str] = field(default_factory=list)


class CanceledReply(Reply, frozen=True, tag="a2a_canceled"):
    task_id: str
    state: TaskState
    generation: int


class Repaired(Reply, frozen=True, tag="a2a_repaired"):
    outcome: RepairOutcome


class AutoRetried(Reply, frozen=True, tag="a2a_auto_retry"):
    report: RetryReport


class CacheReply(Reply, frozen=True, tag="a2a_cache"):
    entries: list[CachedResult]
    cursor: str | None = None


class Forgotten(Reply, frozen=True, tag="a2a_cache_forgotten"):
    entry_id: str


class Compacted(Reply, frozen=True, tag="a2a_compacted"):
    dropped: int
    tombstones_dropped: int = 0
    segments_dropped: int = 0
    bytes_freed: int = 0


class PeerEnrolled(Reply, frozen=True, tag="peer_enrolled"):
    """The token is shown here and never again."""

    display: str
    pubkey: str
    token: str
    granted: list[str]


class Peers(Reply, frozen=True, tag="peer_list"):
    peers: list[PeerView]
    cursor: str | None = None


class PeerRevoked(Reply, frozen=True, tag="peer_revoked"):
    display: str
    pubkey: str


class TokenRotated(Reply, frozen=True, tag="peer_token_rotated"):
    display: str
    pubkey: str
    token: str


class Granted(Reply, frozen=True, tag="capability_granted"):
    capability: GrantedView


class Revoked(Reply, frozen=True, tag="capability_revoked"):
    capability: GrantedView


class Grants(Reply, frozen=True, tag="capability_list"):
    capabilities: list[GrantedView]
    cursor: str | None = None


class Checked(Reply, frozen=True, tag="capability_check"):
    action: str
    subject: str
    passed: bool
    grant: str | None = None
    reason: str | None = None


class Published(Struct, frozen=True, gc=False):
    """An agent that the A2A protocol reaches, and the card as it was published."""

    agent: AgentId
    card: dict[str, Any]
    published_ms: int


class AgentReply(Reply, frozen=True, tag="agent"):
    published: Published


class Agents(Reply, frozen=True, tag="agent_list"):
    agents: list[Published]
    cursor: str | None = None


class AgentWithdrawn(Reply, frozen=True, tag="agent_withdrawn"):
    display: str
    pubkey: str


class AuditReply(Reply, frozen=True, tag="audit_recent"):
    rows: list[AuditRow]
    cursor: int | None = None


class Daemons(Reply, frozen=True, tag="daemon_list"):
    daemons: list[DaemonView]


class StoryReply(Reply, frozen=True, tag="a2a_story"):
    entry: QueueEntry
    rows: list[AuditRow]
    reason: str
    explanation: str
    command: str | None = None
    complete: bool = True
    run: RunSeen | None = None  # of a durable agent, while it is open
    revoked: list[str] = []  # keys of revoked peers that it is from, for, or held by


class VersionReply(Reply, frozen=True, tag="version"):
    version: str
    realm: str
    limits: Limits


class WhoamiReply(Reply, frozen=True, tag="whoami"):
    agent: AgentId
    role: str


AnyRequest: TypeAlias = (
    Authenticate
    | GiveBack
    | SendTask
    | SendTasks
    | RecvTask
    | RecvTasks
    | RecentTasks
    | PostResult
    | RecvResult
    | RecvResults
    | RecentResults
    | Queue
    | GetTask
    | GetTree
    | GetResult
    | Heartbeat
    | Release
    | AddMessage
    | Update
    | AddArtifact
    | Ask
    | Reject
    | ReplyDirectly
    | ListInputs
    | CommitRun
    | LoadRun
    | LookAround
    | FindEntry
    | ListRuns
    | GetRun
    | RunEntries
    | SignalRun
    | WakeRun
    | ResumeRun
    | JudgeEffect
    | Cancel
    | Repair
    | RetryStale
    | ListCache
    | ForgetCached
    | Compact
    | EnrollPeer
    | ListPeers
    | RevokePeer
    | RotateToken
    | Grant
    | Revoke
    | ListGrants
    | Check
    | PublishAgent
    | ListAgents
    | GetAgent
    | WithdrawAgent
    | RecentAudit
    | ListDaemons
    | Story
    | Version
    | Whoami
)
