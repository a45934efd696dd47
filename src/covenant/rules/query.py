"""What a caller may ask: pure functions over the same view that the rules decide on.

A filter is applied before a limit, and visibility before both: a peer's listing goes over what that peer may see and
over nothing else, so neither its pages, nor where they end, nor what they cost tell of others. A page that had to look
past `scan_max` tasks, or past as many as the view holds at once, ends early with a cursor instead of holding everybody
up, and so does one that has all the bytes that an answer carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from typing import Any

from covenant.model.agent import AgentId
from covenant.model.error import Malformed, UnknownPeer, UnknownTask
from covenant.model.peer import GrantPage, Peer, PeerPage, peer_key
from covenant.model.query import (
    CheckGrant,
    DeepQueues,
    FindEntry,
    GetCard,
    GetDialog,
    GetPlace,
    GetPush,
    GetPushed,
    GetResult,
    GetRun,
    GetTask,
    GetTree,
    ListCached,
    ListCards,
    ListDialogs,
    ListEntries,
    ListGrants,
    ListInputs,
    ListPeers,
    ListPushes,
    ListQueue,
    ListRuns,
    LoadRun,
    LookAround,
    Query,
    RecentResults,
    RecentTasks,
)
from covenant.model.record import Part, Record, TaskRecord, TaskState, Tombstone
from covenant.model.task import Task
from covenant.model.view import Answer, CachePage, QueueDepth, QueueEntry, QueuePage, Tree, TreeNode
from covenant.rules.cache import cached
from covenant.rules.card import get_card, list_cards
from covenant.rules.context import Context, Lacks, Spent, View
from covenant.rules.door import living_recipient
from covenant.rules.envelope import check_count, check_cursor, check_id
from covenant.rules.grant import authorize, demand_for, refusal_for
from covenant.rules.grant import shown as shown_grant
from covenant.rules.page import Room, as_far_as_shown
from covenant.rules.peer import shown as shown_peer
from covenant.rules.protocol import get_dialog, get_place, list_dialogs, list_inputs
from covenant.rules.push import get_push, get_pushed, list_pushes
from covenant.rules.retention import is_retained
from covenant.rules.run.load import find_entry, load_run, look_around
from covenant.rules.run.sight import get_run, list_entries, list_runs
from covenant.rules.sight import answer_of, entry_of, is_visible, lent, passes, visible_task

_CHUNK = 256
_AGE_MAX = 2**53
_LIST_GRANTS = "capabilities.list"


def get_task(query: GetTask, view: View, ctx: Context) -> QueueEntry:
    by = query.by
    record = visible_task(check_id(query.task_id, "task_id"), by, view, ctx)
    late = [kept.result for kept in view.late(record.task.id)] if by is None else []
    return entry_of(record, view, ctx, late)


def get_result(query: GetResult, view: View, ctx: Context) -> Answer | None:
    """The final result, drained or not; None while there is none."""
    record = visible_task(check_id(query.task_id, "task_id"), query.by, view, ctx)
    return None if record.result is None else answer_of(record)


def recent_tasks(query: RecentTasks, view: View, ctx: Context) -> list[Task]:
    limit = check_count(query.limit, "limit", ctx.limits.page_max)
    room = Room(ctx.limits)
    tasks = (record.task for record in islice(_recent(query.by, view, ctx), limit))
    return [lent(task) for task in takewhile(room.takes, tasks)]


def recent_results(query: RecentResults, view: View, ctx: Context) -> list[Answer]:
    """Final results, drained or not, those of the newest tasks first."""
    limit = check_count(query.limit, "limit", ctx.limits.page_max)
    finished = (record for record in _recent(query.by, view, ctx) if record.result is not None)
    return _answers(islice(finished, limit), ctx)


def _answers(records: Iterable[Record | Tombstone | None], ctx: Context) -> list[Answer]:
    """As many as an answer carries."""
    room = Room(ctx.limits)
    return list(takewhile(lambda answer: room.takes(answer.result), map(answer_of, records)))


def _recent(by: AgentId | None, view: View, ctx: Context) -> Iterator[TaskRecord]:
    """Newest first, no further back than `scan_max` tasks."""
    return (record for record in as_far_as_shown(_all_recent(by, view, ctx)) if is_retained(record, ctx))


def _all_recent(by: AgentId | None, view: View, ctx: Context) -> Iterator[TaskRecord]:
    before: int | None = None
    for _ in range(0, ctx.limits.scan_max, _CHUNK):
        chunk = view.recent(_scope(by), before, _CHUNK)
        yield from chunk
        if len(chunk) < _CHUNK:
            return
        before = chunk[-1].sent_order


def task_queue(query: ListQueue, view: View, ctx: Context) -> QueuePage:
    """What is queued and in flight, in the order in which it was sent, and the results that wait to be drained.
    Leases alone are listed by their last sign of life, the stalest first; one that gives a sign between two pages may
    be shown again."""
    by, state, cursor = query.by, query.state, query.cursor
    min_lease_age_ms, deadline_within_ms = query.min_lease_age_ms, query.deadline_within_ms
    limit = check_count(query.limit, "limit", ctx.limits.page_max)
    if min_lease_age_ms is not None:
        check_count(min_lease_age_ms, "min_lease_age_ms", _AGE_MAX)
    if deadline_within_ms is not None:
        check_count(deadline_within_ms, "deadline_within_ms", _AGE_MAX)
    _check_effect(state, min_lease_age_ms, deadline_within_ms)
    if state == TaskState.RESULT_PENDING:
        return _pending_page(limit, cursor, by, view, ctx)
    leases_only = state == TaskState.IN_FLIGHT
    after = check_cursor(cursor, "lease" if leases_only else "task")
    found: list[TaskRecord] = []
    room = Room(ctx.limits)
    scanned = 0
    more = limit > 0
    try:
        while more and len(found) < limit and scanned < ctx.limits.scan_max and not room.is_full:
            chunk = view.leases(after, _CHUNK, _scope(by)) if leases_only else view.tasks(_scope(by), after, _CHUNK)
            more = len(chunk) == _CHUNK
            for record in chunk:
                if len(found) >= limit:
                    more = True
                    break
                scanned += 1
                if passes(record, ctx.now, state, min_lease_age_ms, deadline_within_ms):
                    if not room.takes(record.task):
                        more = True
                        break
                    found.append(record)
                after = record.lease.seen_order if leases_only and record.lease else record.sent_order
    except Spent:
        more = True
    keys = view.pending(_scope(by), 0, limit) if cursor is None and state is None else ()
    entries: list[QueueEntry] = []
    lacks = Lacks()
    for record in found:
        with lacks:
            entries.append(entry_of(record, view, ctx))
    lacks.settle()
    return QueuePage(
        tasks=entries,
        results=_answers(map(view.get, keys), ctx),
        cursor=f"{'lease' if leases_only else 'task'}:{after}" if more else None,
    )


def _check_effect(state: TaskState | None, min_lease_age_ms: int | None, deadline_within_ms: int | None) -> None:
    """Raise Malformed for a filter that can have no effect in this state: its sender believes that it has one."""
    if state == TaskState.RESOLVED:
        raise Malformed("what is resolved has left the queue: ask for the task, or for recent results", field="state")
    if min_lease_age_ms is not None and state not in (None, TaskState.IN_FLIGHT):
        raise Malformed(f"min_lease_age_ms is about leases, and what is {state} has none", field="min_lease_age_ms")
    if deadline_within_ms is not None and state == TaskState.RESULT_PENDING:
        raise Malformed("a result that waits has no deadline", field="deadline_within_ms")


def _pending_page(limit: int, cursor: str | None, by: AgentId | None, view: View, ctx: Context) -> QueuePage:
    """Only the results that wait to be drained."""
    keys = view.pending(_scope(by), check_cursor(cursor, "result"), limit)
    answers = _answers(map(view.get, keys), ctx)
    last = view.get(keys[len(answers) - 1]) if answers and (len(keys) == limit or len(answers) < len(keys)) else None
    more = f"result:{last.answer_order}" if isinstance(last, (TaskRecord, Part)) else None
    return QueuePage([], answers, more)


def task_tree(query: GetTree, view: View, ctx: Context) -> Tree:
    """The tree below a task, or below an intent that is no task here. Breadth first, up to two bounds: how many nodes
    it has, and how many tasks were looked at for it."""
    by, root = query.by, check_id(query.root, "root")
    record = view.get(root)
    entry = entry_of(record, view, ctx) if is_visible(record, by, ctx) else None
    room = Room(ctx.limits)
    top = TreeNode(root, entry, [])
    if entry is not None:
        room.takes(entry.task)
    seen = {root}
    level = [top]
    scanned = 0
    truncated = False
    lacks = Lacks()
    try:
        while level and not truncated:
            below: list[TreeNode] = []
            for node in level:
                with lacks:
                    for child in _children(node.id, by, view):
                        if scanned >= ctx.limits.scan_max:
                            truncated = True
                            break
                        scanned += 1
                        if child.task.id in seen or not is_retained(child, ctx):
                            continue  # links may run in a circle
                        if len(seen) >= ctx.limits.tree_nodes_max or not room.takes(child.task):
                            truncated = True
                            break
                        seen.add(child.task.id)
                        with lacks:
                            twig = TreeNode(child.task.id, entry_of(child, view, ctx), [])
                            node.children.append(twig)
                            below.append(twig)
            lacks.settle()
            level = below
    except Spent:
        truncated = True
    lacks.settle()
    if entry is None and not top.children and not truncated:
        raise UnknownTask(f"no task {root} and none below it", task_id=root)
    return Tree(top, len(seen), truncated)


def _children(parent: str, by: AgentId | None, view: View) -> Iterator[TaskRecord]:
    after = 0
    while True:
        chunk = view.children(parent, after, _CHUNK, _scope(by))
        yield from chunk
        if len(chunk) < _CHUNK:
            return
        after = chunk[-1].sent_order


def cached_results(query: ListCached, view: View, ctx: Context) -> CachePage:
    limit = check_count(query.limit, "limit", ctx.limits.page_max)
    slots = view.slots(check_cursor(query.cursor, "slot"), limit + 1, _scope(query.by)) if limit else ()
    room = Room(ctx.limits)
    entries = (cached(key, slot) for key, slot in as_far_as_shown(slots[:limit]))
    found = list(takewhile(lambda entry: room.takes(entry.result), entries))
    more = f"slot:{slots[len(found) - 1][1].order}" if len(found) < len(slots) else None
    return CachePage(found, more)


def list_peers(query: ListPeers, view: View, ctx: Context) -> PeerPage:
    limit = check_count(query.limit, "limit", ctx.limits.page_max)
    found = view.peers(check_cursor(query.cursor, "peer"), limit)
    more = f"peer:{found[-1].order}" if found and len(found) == limit else None
    return PeerPage([shown_peer(peer) for peer in found], more)


def list_grants(query: ListGrants, view: View, ctx: Context) -> GrantPage:
    """Open grants. The operator, and who may list them, sees those of anybody or all; a peer those that it holds."""
    limit = check_count(query.limit, "limit", ctx.limits.page_max)
    subject = query.subject
    if query.by is not None and subject != query.by.pubkey:
        demand = demand_for(_LIST_GRANTS, _LIST_GRANTS)
        _, reason = authorize(query.by.pubkey, demand, view, ctx)
        if reason is not None and subject is not None:
            raise refusal_for(query.by, demand, reason)
        subject = subject if reason is None else query.by.pubkey
    if subject is not None and not isinstance(view.get(peer_key(subject)), Peer):
        raise UnknownPeer(f"no peer {subject}", peer=subject)
    found = view.all_grants(subject, check_cursor(query.cursor, "grant"), limit)
    more = f"grant:{found[-1].order}" if found and len(found) == limit else None
    return GrantPage([shown_grant(grant) for grant in found], more)


def check_grant(query: CheckGrant, view: View, ctx: Context) -> tuple[str | None, str | None]:
    """Return the grant that lets a call in, or the code of its refusal: the answer of `authorize`.

    Raises UnknownPeer for a send that a grant lets in, but that goes to nobody.
    """
    grant, reason = authorize(query.subject, query.demand, view, ctx)
    other = query.demand.counterparty
    if reason is None and other is not None and query.demand.action.startswith("a2a.send."):
        living_recipient(other, view)
    return (None if grant is None else grant.capability.id), reason


def deep_queues(query: DeepQueues, view: View, ctx: Context) -> list[QueueDepth]:
    """An agent sees its own queue, like its own tasks."""
    over = check_count(query.over, "over", _AGE_MAX)
    found = [QueueDepth(oldest.task.recipient, depth) for oldest, depth in view.deep(over)]
    return [queue for queue in found if query.by is None or queue.recipient.pubkey == query.by.pubkey]


def _scope(by: AgentId | None) -> str | None:
    return None if by is None else by.pubkey


ANSWER: dict[type, Callable[[Any, View, Context], Any]] = {
    GetTask: get_task,
    GetResult: get_result,
    GetTree: task_tree,
    RecentTasks: recent_tasks,
    RecentResults: recent_results,
    ListQueue: task_queue,
    DeepQueues: deep_queues,
    ListCached: cached_results,
    ListPeers: list_peers,
    ListGrants: list_grants,
    CheckGrant: check_grant,
    GetDialog: get_dialog,
    GetPlace: get_place,
    ListDialogs: list_dialogs,
    ListInputs: list_inputs,
    LoadRun: load_run,
    LookAround: look_around,
    FindEntry: find_entry,
    ListEntries: list_entries,
    GetRun: get_run,
    ListRuns: list_runs,
    GetPush: get_push,
    ListPushes: list_pushes,
    GetPushed: get_pushed,
    GetCard: get_card,
    ListCards: list_cards,
}


def answer(query: Query, view: View, ctx: Context) -> Any:
    return ANSWER[type(query)](query, view, ctx)
