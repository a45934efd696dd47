"""Every verb of the service, once: its request, its reply, and its place in HTTP.

The HTTP routes, the client and the API description are all made from this table, so they cannot differ. `body` says
what the HTTP body is: the named member alone, or with `*` an object of all members that are not in the path.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from covenant.serve import wire as w


class Place(Struct, frozen=True):
    request: type[w.Request]
    reply: type[w.Reply]
    method: str
    path: str
    body: str | None = None
    summary: str = ""
    also: tuple[str, ...] = ()  # other methods that do the same

    @property
    def parameter(self) -> str | None:
        """The name of the one parameter in the path."""
        return next((part[1:-1] for part in self.path.split("/") if part.startswith("{")), None)


PLACES: Final = (
    Place(w.SendTask, w.TaskQueued, "POST", "/a2a/tasks", "task", "Send a task."),
    Place(w.SendTasks, w.TasksQueued, "POST", "/a2a/tasks/batch", "*", "Send many tasks at once."),
    Place(w.RecvTask, w.TaskOpt, "GET", "/a2a/tasks/next", None, "Lease the oldest task.", ("POST",)),
    Place(w.RecvTasks, w.Deliveries, "POST", "/a2a/tasks/next/batch", "*", "Lease several tasks."),
    Place(w.RecentTasks, w.Tasks, "GET", "/a2a/tasks/recent", None, "The newest tasks, in any state."),
    Place(w.GetTask, w.TaskReply, "GET", "/a2a/tasks/{task_id}", None, "One task; waits for a change."),
    Place(w.GetTree, w.TreeReply, "GET", "/a2a/tasks/{task_id}/tree", None, "What hangs below a task."),
    Place(w.Story, w.StoryReply, "GET", "/a2a/tasks/{task_id}/why", None, "The story of a task."),
    Place(w.AddMessage, w.MovedReply, "POST", "/a2a/tasks/{task_id}/message", "*", "Add to an open task."),
    Place(w.Cancel, w.CanceledReply, "POST", "/a2a/tasks/{task_id}/cancel", "*", "Cancel a task."),
    Place(w.PostResult, w.ResultPosted, "POST", "/a2a/results", "result", "Answer a leased task."),
    Place(w.RecvResult, w.ResultOpt, "GET", "/a2a/results/next", None, "Drain a result.", ("POST",)),
    Place(w.RecvResults, w.Results, "POST", "/a2a/results/next/batch", "*", "Drain several results."),
    Place(w.GiveBack, w.GivenBack, "POST", "/a2a/give-back", "*", "Undo a receive whose answer never came."),
    Place(w.RecentResults, w.Results, "GET", "/a2a/results/recent", None, "The newest results."),
    Place(w.GetResult, w.ResultOpt, "GET", "/a2a/results/{task_id}", None, "The result of a task."),
    Place(w.Queue, w.QueueReply, "GET", "/a2a/queue", None, "What is queued, in flight and pending."),
    Place(w.Heartbeat, w.LeaseBeat, "POST", "/a2a/leases/{lease_id}/heartbeat", "*", "A sign of life."),
    Place(w.Release, w.ReleasedReply, "POST", "/a2a/leases/{lease_id}/release", "*", "Give a task back."),
    Place(w.Update, w.MovedReply, "POST", "/a2a/leases/{lease_id}/update", "*", "Say how far the work is."),
    Place(w.AddArtifact, w.MovedReply, "POST", "/a2a/leases/{lease_id}/artifact", "*", "Hand over what is made."),
    Place(w.Ask, w.MovedReply, "POST", "/a2a/leases/{lease_id}/ask", "*", "Ask the sender, and wait for it."),
    Place(w.Reject, w.MovedReply, "POST", "/a2a/leases/{lease_id}/reject", "*", "Refuse the task."),
    Place(w.ReplyDirectly, w.MovedReply, "POST", "/a2a/leases/{lease_id}/reply", "*", "Answer by a message alone."),
    Place(w.ListInputs, w.InputsReply, "GET", "/a2a/leases/{lease_id}/inputs", None, "What the sender has added."),
    Place(w.CommitRun, w.StandingReply, "POST", "/a2a/leases/{lease_id}/commit", "commit", "A step of a run."),
    Place(w.LoadRun, w.RunLoadedReply, "GET", "/a2a/leases/{lease_id}/run", None, "What a run remembers."),
    Place(w.LookAround, w.StandingReply, "POST", "/a2a/leases/{lease_id}/look", "*", "What is there of a wait."),
    Place(w.FindEntry, w.EntryReply, "GET", "/a2a/leases/{lease_id}/entry", None, "The entry under a key."),
    Place(w.ListRuns, w.Runs, "GET", "/runs", None, "Runs of durable agents, the newest first."),
    Place(w.GetRun, w.RunReply, "GET", "/runs/{task_id}", None, "How a run stands."),
    Place(w.RunEntries, w.Entries, "GET", "/runs/{task_id}/entries", None, "What was said and done in a run."),
    Place(w.SignalRun, w.SignaledReply, "POST", "/runs/{task_id}/signal", "*", "Tell a run something."),
    Place(w.WakeRun, w.MovedReply, "POST", "/runs/{task_id}/wake", "*", "Let a run that waits go on."),
    Place(w.ResumeRun, w.ResumedReply, "POST", "/runs/{task_id}/resume", "*", "Take a run from a dead worker."),
    Place(w.JudgeEffect, w.MovedReply, "POST", "/runs/{task_id}/effect", "*", "Say what became of an effect."),
    Place(w.Repair, w.Repaired, "POST", "/a2a/repair", "request", "Requeue a lease or end it."),
    Place(w.RetryStale, w.AutoRetried, "POST", "/a2a/retry-stale", "*", "One pass of the retry gate."),
    Place(w.ListCache, w.CacheReply, "GET", "/a2a/cache", None, "Cached results."),
    Place(w.ForgetCached, w.Forgotten, "DELETE", "/a2a/cache", None, "Forget a cached result."),
    Place(w.Compact, w.Compacted, "POST", "/a2a/compact", "*", "Let go of history."),
    Place(w.PublishAgent, w.AgentReply, "POST", "/a2a/agents", "*", "Let the A2A protocol reach an agent."),
    Place(w.ListAgents, w.Agents, "GET", "/a2a/agents", None, "The agents that are published."),
    Place(w.GetAgent, w.AgentReply, "GET", "/a2a/agents/{name}", None, "One of them, with its card."),
    Place(w.WithdrawAgent, w.AgentWithdrawn, "DELETE", "/a2a/agents/{name}", None, "Take its card away."),
    Place(w.EnrollPeer, w.PeerEnrolled, "POST", "/peers", "*", "Enroll a peer."),
    Place(w.ListPeers, w.Peers, "GET", "/peers", None, "Who is enrolled."),
    Place(w.RevokePeer, w.PeerRevoked, "DELETE", "/peers/{peer}", None, "Throw a peer out."),
    Place(w.RotateToken, w.TokenRotated, "POST", "/peers/rotate", "*", "A new token."),
    Place(w.Grant, w.Granted, "POST", "/capabilities", "*", "Grant an action."),
    Place(w.ListGrants, w.Grants, "GET", "/capabilities", None, "Open grants."),
    Place(w.Check, w.Checked, "GET", "/capabilities/check", None, "Whether a call would be let in."),
    Place(w.Revoke, w.Revoked, "DELETE", "/capabilities/{grant_id}", None, "Revoke a grant."),
    Place(w.RecentAudit, w.AuditReply, "GET", "/audit", None, "Audit rows, the newest first."),
    Place(w.ListDaemons, w.Daemons, "GET", "/daemons", None, "Who has the store open."),
    Place(w.Whoami, w.WhoamiReply, "GET", "/whoami", None, "Who the token says you are."),
    Place(w.Version, w.VersionReply, "GET", "/version", None, "Version, realm and limits."),
)
PLACE_OF: Final[dict[type, Place]] = {place.request: place for place in PLACES}
