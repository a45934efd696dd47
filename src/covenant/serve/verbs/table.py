"""Which function does a request: the same for every surface."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

from covenant.exchange.exchange import Exchange
from covenant.model.error import UnknownPeer
from covenant.model.peer import Caller
from covenant.serve import wire as w
from covenant.serve.verbs import about, agents, dialog, history, results, runs, tasks, trust, upkeep

Handler: TypeAlias = Callable[[Exchange, Caller, Any], Coroutine[Any, Any, w.Reply]]
HANDLERS: Final[dict[type, Handler]] = {
    w.SendTask: tasks.send_task,
    w.SendTasks: tasks.send_tasks,
    w.RecvTask: tasks.recv_task,
    w.RecvTasks: tasks.recv_tasks,
    w.RecentTasks: tasks.recent_tasks,
    w.GetTask: tasks.get_task,
    w.GetTree: tasks.get_tree,
    w.Story: history.story,
    w.AddMessage: dialog.add_message,
    w.Cancel: tasks.cancel,
    w.PostResult: results.post_result,
    w.RecvResult: results.recv_result,
    w.RecvResults: results.recv_results,
    w.GiveBack: results.give_back,
    w.RecentResults: results.recent_results,
    w.GetResult: results.get_result,
    w.Queue: tasks.queue,
    w.Heartbeat: tasks.heartbeat,
    w.Release: tasks.release,
    w.Update: dialog.update,
    w.AddArtifact: dialog.add_artifact,
    w.Ask: dialog.ask,
    w.Reject: dialog.reject,
    w.ReplyDirectly: dialog.reply_directly,
    w.ListInputs: dialog.list_inputs,
    w.CommitRun: runs.commit_run,
    w.LoadRun: runs.load_run,
    w.LookAround: runs.look_around,
    w.FindEntry: runs.find_entry,
    w.ListRuns: runs.list_runs,
    w.GetRun: runs.get_run,
    w.RunEntries: runs.run_entries,
    w.SignalRun: runs.signal_run,
    w.WakeRun: runs.wake_run,
    w.ResumeRun: runs.resume_run,
    w.JudgeEffect: runs.judge_effect,
    w.Repair: upkeep.repair,
    w.RetryStale: upkeep.retry_stale,
    w.ListCache: upkeep.list_cache,
    w.ForgetCached: upkeep.forget_cached,
    w.Compact: upkeep.compact,
    w.PublishAgent: agents.publish_agent,
    w.ListAgents: agents.list_agents,
    w.GetAgent: agents.get_agent,
    w.WithdrawAgent: agents.withdraw_agent,
    w.EnrollPeer: trust.enroll_peer,
    w.ListPeers: trust.list_peers,
    w.RevokePeer: trust.revoke_peer,
    w.RotateToken: trust.rotate_token,
    w.Grant: trust.grant,
    w.ListGrants: trust.list_grants,
    w.Check: trust.check,
    w.Revoke: trust.revoke,
    w.RecentAudit: history.recent_audit,
    w.ListDaemons: about.list_daemons,
    w.Whoami: about.whoami,
    w.Version: about.version,
}


async def handled(x: Exchange, caller: Caller, request: Any) -> Any:
    """The reply to a request. A name that nobody has here may belong to somebody whom another daemon has just enrolled:
    where that turns out, it is looked up again."""
    handler = HANDLERS[type(request)]
    if not x.store.is_shared:
        return await handler(x, caller, request)
    mark = x.store.directory_mark()
    try:
        return await handler(x, caller, request)
    except UnknownPeer:
        await x.store.refresh()
        if x.store.directory_mark() is mark:
            raise
        return await handler(x, caller, request)
