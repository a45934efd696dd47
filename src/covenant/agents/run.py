"""What there is of a run while a worker has it: its parts, each made of those before it."""

from __future__ import annotations

from collections.abc import Callable

from covenant.agents.chance import Chance
from covenant.agents.checkpoints import Checkpoints
from covenant.agents.effects import Effects
from covenant.agents.entries import Entries
from covenant.agents.hold import Hold
from covenant.agents.host import Host
from covenant.agents.inbox import Inbox
from covenant.agents.joins import Joins
from covenant.agents.lookout import Lookout
from covenant.agents.notes import Notes
from covenant.agents.own_tasks import OwnTasks
from covenant.agents.signals import Signals
from covenant.agents.tasks import Tasks
from covenant.agents.times import Times
from covenant.agents.waits import Waits
from covenant.model.task import Task


class Run:
    """`drop` puts its function away, when a part finds that the run is no longer held here."""

    def __init__(self, task: Task, host: Host, drop: Callable[[], None]) -> None:
        self.task = task
        self.hold = hold = Hold(task.id, host)
        self.notes = notes = Notes(host.box)
        self.times = times = Times(host.clock, notes)
        self.inbox = inbox = Inbox()
        self.waits = waits = Waits(hold, notes, inbox)
        self.lookout = lookout = Lookout(hold, notes, times, inbox, waits, drop)
        self.entries = entries = Entries(hold, notes, times, waits, lookout)
        self.tasks = tasks = Tasks(task.recipient, hold, notes, times, waits, host.tasks)
        self.own = OwnTasks(host, hold, notes, tasks)
        self.signals = signals = Signals(hold, notes, times, inbox, waits, lookout, entries)
        self.joins = Joins(notes, times, waits, lookout, entries, tasks, signals)
        self.checkpoints = checkpoints = Checkpoints(hold, notes, waits, entries, tasks)
        self.effects = Effects(host, hold, notes, waits, signals, checkpoints)
        self.chance = Chance(host, notes, times, waits, checkpoints)
