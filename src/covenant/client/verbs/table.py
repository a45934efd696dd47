"""Which function does a command or a query: a request to the daemon, and its reply in the words of the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from covenant.client.verbs import agents, dialog, results, runs, tasks, upkeep
from covenant.model import command as c
from covenant.model import query as q

Verb: TypeAlias = Callable[[Any, Any], Awaitable[Any]]

RUN: Final[dict[type, Verb]] = {
    c.SendTask: tasks.send_task,
    c.PostResult: results.post_result,
    c.LeaseTasks: tasks.lease,
    c.DrainResults: results.drain,
    c.BeatLease: tasks.heartbeat,
    c.ReleaseLease: tasks.release,
    c.AddMessage: dialog.add_message,
    c.UpdateTask: dialog.update,
    c.AddArtifact: dialog.add_artifact,
    c.RejectTask: dialog.reject,
    c.ReplyDirectly: dialog.reply_directly,
    c.PublishCard: agents.publish,
    c.WithdrawCard: agents.withdraw,
    c.CancelTask: tasks.cancel,
    c.RepairTask: upkeep.repair,
    c.RetryStale: upkeep.retry_stale,
    c.ForgetCached: upkeep.forget_cached,
    c.CommitRun: runs.commit_run,
    c.SignalRun: runs.signal_run,
    c.WakeRun: runs.wake_run,
    c.ResumeRun: runs.resume_run,
    c.JudgeEffect: runs.judge_effect,
}

ASK: Final[dict[type, Verb]] = {
    q.GetTask: tasks.get_task,
    q.GetResult: results.get_result,
    q.GetTree: tasks.get_tree,
    q.RecentTasks: tasks.recent_tasks,
    q.RecentResults: results.recent_results,
    q.ListQueue: tasks.queue,
    q.ListCached: upkeep.list_cached,
    q.GetCard: agents.get_card,
    q.ListCards: agents.list_cards,
    q.LoadRun: runs.load_run,
    q.LookAround: runs.look_around,
    q.FindEntry: runs.find_entry,
    q.GetRun: runs.get_run,
    q.ListRuns: runs.list_runs,
    q.ListEntries: runs.list_entries,
}
