"""Durable agents: write a loop, kill it anywhere, lose and repeat nothing. See docs/agents.md."""

from covenant.agents.context import AgentContext
from covenant.agents.definition import Agent, TaskFunction, agent, task
from covenant.agents.entries import AgentEntry
from covenant.agents.error import (
    AgentError,
    AllTasksFailed,
    CancelRequested,
    CheckpointUnread,
    EffectFailed,
    Fatal,
    RunFailed,
    RunInDoubt,
    Suspended,
    TaskFailed,
    TaskRefused,
    WrongInput,
)
from covenant.agents.local import Local, RunHandle, run_local
from covenant.agents.pending import PendingTask, Selected, Settled, SignalWait, Timer
from covenant.agents.worker import AgentWorker
from covenant.model.run import EntryRole, EntryType

__all__ = [
    "Agent",
    "AgentContext",
    "AgentEntry",
    "AgentError",
    "AgentWorker",
    "AllTasksFailed",
    "CancelRequested",
    "CheckpointUnread",
    "EffectFailed",
    "EntryRole",
    "EntryType",
    "Fatal",
    "Local",
    "PendingTask",
    "RunFailed",
    "RunHandle",
    "RunInDoubt",
    "Selected",
    "Settled",
    "SignalWait",
    "Suspended",
    "TaskFailed",
    "TaskFunction",
    "TaskRefused",
    "Timer",
    "WrongInput",
    "agent",
    "run_local",
    "task",
]
