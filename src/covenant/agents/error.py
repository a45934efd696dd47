"""What an agent's code may meet: failures of what it asked for, and the one thing that is no failure.

`Suspended` is not an Exception: an agent whose function is put away while it waits must not take that for an error.
(Contract 24.)
"""

from __future__ import annotations

from typing import Any


class AgentError(Exception):
    """Something that agent code may catch."""


class TaskFailed(AgentError):
    """A task of the run ended with an error, or was canceled."""

    def __init__(self, task_id: str, kind: str, message: str) -> None:
        super().__init__(message)
        self.task_id = task_id
        self.kind = kind
        self.message = message

    @property
    def is_canceled(self) -> bool:
        return self.message.startswith("canceled:")

    @property
    def is_timeout(self) -> bool:
        return self.message.startswith("deadline_exceeded:")


class TaskRefused(TaskFailed):
    """The store did not take a task of the run: there is no grant for its recipient, say, or it was asked for so long
    ago that its result is gone. `code` is that of the refusal. Whatever else the run did is kept."""

    def __init__(self, task_id: str, kind: str, message: str, code: str) -> None:
        super().__init__(task_id, kind, message)
        self.code = code


class AllTasksFailed(AgentError):
    """None of the tasks of a `select` succeeded; `failures` are in the order of the tasks."""

    def __init__(self, failures: list[TaskFailed]) -> None:
        super().__init__("; ".join(str(failure) for failure in failures))
        self.failures = failures


class EffectFailed(AgentError):
    """An effect of `ctx.run` raised; on resume it is raised again as it was then."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message


class CancelRequested(AgentError):
    """The sender asked for an end while the run waited: clean up, and return or raise."""


class CheckpointUnread(AgentError):
    """The run has a checkpoint, and its function went on without looking at `ctx.state`: it would begin anew."""


class Fatal(AgentError):
    """Raised by a task function: another attempt would not help."""


class WrongInput(Fatal):
    """What came as input is not what the function is declared to take."""


class RunFailed(Exception):
    """To whoever waits for a run: it ended with an error."""

    def __init__(self, run_id: str, message: str, value: Any = None) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.message = message
        self.value = value


class RunInDoubt(Exception):
    """To whoever waits for a run: nobody knows what became of an effect or a task, and somebody has to say."""

    def __init__(self, run_id: str, doubts: list[str]) -> None:
        named = ", ".join(doubts)
        super().__init__(f"run {run_id}: nobody knows what became of {named}; judge it, or repair the task")
        self.run_id = run_id
        self.doubts = doubts


class Suspended(BaseException):
    """The run was put away while its function waited: it will be called again from its first line."""
