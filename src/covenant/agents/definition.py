"""What a user writes: agents, and the tasks that they ask for, as functions with types.

Types are read from the annotations; what cannot be read is said when the function is defined, and not when it is run.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec import Struct

from covenant.agents import values
from covenant.agents.error import WrongInput
from covenant.model.error import Malformed
from covenant.model.task import DuplicateSafety, Task

F = TypeVar("F", bound=Callable[..., Any])


class Agent(Struct, frozen=True):
    """A durable agent: its function, and what goes in and out of it."""

    name: str
    function: Callable[..., Awaitable[Any]]
    input_type: Any = None
    output_type: Any = None
    state_type: Any = None
    description: str = ""
    takes_input: bool = True

    def __call__(self, *args: Any) -> Awaitable[Any]:
        return self.function(*args)


class TaskFunction(Struct, frozen=True):
    """A function that does tasks of one kind."""

    name: str
    function: Callable[..., Any]
    input_type: Any = None
    output_type: Any = None
    safety: DuplicateSafety = "unsafe"
    attempts: int = 1
    backoff_ms: int = 1000
    takes_context: bool = False
    takes_input: bool = True

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def agent(name: str, *, state: Any = None, description: str = "") -> Callable[[F], Agent]:
    """Make a durable agent of `async def function(ctx, input) -> output`."""
    _check_named(name, "agent")

    def define(function: F) -> Agent:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"agent {name}: `async def` is needed")
        parameters, hints = _signature(function)
        if not 1 <= len(parameters) <= 2:
            raise TypeError(f"agent {name}: a function of (ctx) or (ctx, input) is needed")
        takes_input = len(parameters) == 2
        given = hints.get(parameters[1]) if takes_input else None
        doc = description or inspect.getdoc(function) or ""
        return Agent(_checked(name), function, given, _output(hints), state, doc, takes_input)

    return define


def task(
    name: str, *, idempotent: bool = False, attempts: int = 1, backoff_ms: int = 1000
) -> Callable[[F], TaskFunction]:
    """Let a function do the tasks of one kind: `def function(input)` or `(ctx, input)`, plain or async. Attempts beyond
    the first are for what may be done twice."""
    _check_named(name, "task")

    def define(function: F) -> TaskFunction:
        parameters, hints = _signature(function)
        if len(parameters) > 2:
            raise TypeError(f"task {name}: a function of (input) or (ctx, input) is needed")
        if attempts < 1 or backoff_ms < 0:
            raise ValueError(f"task {name}: attempts are at least 1, and backoff_ms 0")
        if attempts > 1 and not idempotent:
            raise ValueError(f"task {name}: what may not be done twice has one attempt; say idempotent=True")
        takes_context = len(parameters) == 2
        given = hints.get(parameters[-1]) if parameters else None
        safety: DuplicateSafety = "idempotent" if idempotent else "unsafe"
        return TaskFunction(
            _checked(name),
            function,
            given,
            _output(hints),
            safety,
            attempts,
            backoff_ms,
            takes_context,
            bool(parameters),
        )

    return define


def _signature(function: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p.name for p in inspect.signature(function).parameters.values() if p.kind in positional]
    try:
        hints = typing.get_type_hints(function)
    except NameError as unknown:
        raise TypeError(f"{function.__name__}: a type in its annotations is not known: {unknown}") from None
    return parameters, hints


def _output(hints: dict[str, Any]) -> Any:
    """The type of what a function returns. One that returns nothing may yet answer by a message."""
    declared = hints.get("return")
    return None if declared in (type(None), typing.NoReturn, typing.Never) else declared


def _check_named(name: object, what: str) -> None:
    """Without parentheses, a decorator is given the function in the place of a name."""
    if not isinstance(name, str):
        raise TypeError(f'it needs a name: @{what}("name")')


def check_defined(one: object) -> None:
    if not isinstance(one, (Agent, TaskFunction)):
        raise Malformed(f"{one!r} is no agent and no task: decorate it", field="agents")


def _checked(name: str) -> str:
    if not name or name != name.strip():
        raise ValueError("a name says something, without blanks around it")
    return name


def input_for(definition: Agent | TaskFunction, task: Task) -> tuple[Any, ...]:
    """What it is called with, beside a context: nothing, or the input of the task as it declares it."""
    if not definition.takes_input:
        return ()
    try:
        return (values.typed(values.input_of(task), definition.input_type),)
    except (ValueError, TypeError) as wrong:
        raise WrongInput(f"{definition.name} does not take this input: {wrong}") from wrong
