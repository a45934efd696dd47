"""Random agents: programs of a small language, which one agent interprets. A program is JSON: phases of statements.

What the outside does is deterministic here as far as a program can see it: tasks of others are answered one by one, in
the order in which they were sent, and only when the run has come to rest. So two runs of a program agree in everything,
unless something was lost or done twice.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from hypothesis import strategies as st

from covenant.agents import AgentContext, EntryRole, PendingTask, agent, task
from covenant.testing import Answer, Pass, Say, Step, Tell

Statement = list[Any]
OTHER = "other@lab"


class Broken(Exception):
    """Raised by programs."""


@task("safe", idempotent=True)
async def safe(n: int) -> str:
    return f"safe {n} {uuid4()}"  # done again, it comes to something else


@task("unsafe")
async def unsafe(n: int) -> str:
    return f"unsafe {n} {uuid4()}"


@task("safe_fails", idempotent=True)
async def safe_fails(n: int) -> int:
    raise Broken(f"safe {n}")


@task("unsafe_fails")
def unsafe_fails(n: int) -> int:
    raise Broken(f"unsafe {n}")


@task("again", idempotent=True, attempts=2, backoff_ms=0)
async def again(n: int) -> int:
    raise Broken(f"again {n}")


@task("remote")
async def remote(n: int) -> int:
    return n * 1000


@task("remote_fails")
async def remote_fails(n: int) -> int:
    raise Broken(f"remote {n}")


TASKS = [safe, unsafe, safe_fails, unsafe_fails, again]
OTHERS = [remote, remote_fails]


@agent("program", state=dict[str, Any])
async def program(ctx: AgentContext, phases: list[list[Statement]]) -> list[Any]:
    state = ctx.state or {"phase": 0, "found": []}
    found = list(state["found"])
    await ctx.append("system", "instructions", key="first")
    for phase in range(state["phase"], len(phases)):
        await block(ctx, phases[phase], found)
        if phase + 1 < len(phases):
            await ctx.checkpoint({"phase": phase + 1, "found": found})
    return found


async def block(ctx: AgentContext, statements: list[Statement], found: list[Any]) -> None:
    for statement in statements:
        await do(ctx, statement, found)


async def do(ctx: AgentContext, statement: Statement, found: list[Any]) -> None:
    match statement:
        case ["append", role, content]:
            await ctx.append(role, content)
        case ["once", key, content]:
            await ctx.append("system", content, key=key)
        case ["say", text]:
            await ctx.say(text)
        case ["try", inner]:
            try:
                await block(ctx, inner, found)
            except Exception as caught:
                await ctx.append("tool_result", f"{type(caught).__name__}: {caught}")
        case ["loop", times, inner]:
            for _ in range(times):
                await block(ctx, inner, found)
        case ["raise", text]:
            raise Broken(text)
        case ["branch", at]:
            if way := await ctx.load_messages():
                await ctx.branch(way[at % len(way)])
        case ["lazy", asked]:
            pending(ctx, asked)
        case ["checkpoint"]:
            await ctx.checkpoint(ctx.state)
        case _:
            value = await evaluate(ctx, statement)
            found.append(value)
            await ctx.append("assistant", [statement[0], value])


async def evaluate(ctx: AgentContext, statement: Statement) -> Any:
    match statement:
        case ["now"]:
            return await ctx.now()
        case ["random"]:
            return await ctx.random()
        case ["uuid"]:
            return f"it is {await ctx.uuid()}"
        case ["load", limit]:
            return [entry.content for entry in await ctx.load_messages(limit)]
        case ["task", asked]:
            return await pending(ctx, asked)
        case ["join", asked]:
            return await ctx.join_all([pending(ctx, one) for one in asked])
        case ["settled", asked]:
            return [
                [settled.status, settled.value, str(settled.error)]
                for settled in await ctx.join_all_settled([pending(ctx, one) for one in asked])
            ]
        case ["select", asked]:
            selected = await ctx.select([pending(ctx, one) for one in asked])
            return [selected.index, selected.value]
        case ["any", things]:
            first = await ctx.any_of(*(thing(ctx, one) for one in things))
            return [first.index, first.value]
        case ["cancel", asked]:
            canceled = pending(ctx, asked)
            await canceled.cancel()
            return [settled.status for settled in await ctx.join_all_settled([canceled])]
        case ["sleep", ms]:
            return await ctx.sleep(ms)
        case ["signal", name, timeout_ms]:
            return await ctx.wait_for_signal(name, timeout_ms=timeout_ms)
        case ["message", timeout_ms]:
            return await ctx.wait_for_message(timeout_ms=timeout_ms)
        case ["peek", name]:
            return await ctx.has_signal(name)
        case ["drain", pattern]:
            return await ctx.drain_signals(pattern)
        case ["effect", name, is_safe, fails]:
            return await ctx.run(name, lambda: effect(name, fails), idempotent=is_safe)
    raise AssertionError(statement)


async def effect(name: str, fails: bool) -> str:
    if fails:
        raise Broken(name)
    return f"did {name} {uuid4()}"


def pending(ctx: AgentContext, asked: list[Any]) -> PendingTask:
    kind, n, instance = asked
    return ctx.task(kind, n, instance=instance, recipient=OTHER if kind.startswith("remote") else None)


def thing(ctx: AgentContext, one: list[Any]) -> Any:
    match one:
        case ["signal", name]:
            return ctx.signal(name)
        case ["timer", ms]:
            return ctx.timer(ms)
    return pending(ctx, one)


# --- how they are made up ----------------------------------------------------------------------------------

few = st.integers(0, 2)
names = st.sampled_from(["a", "b.c", "b.d"])
patterns = st.sampled_from(["a", "b.*", "**"])
times_ms = st.sampled_from([0, 10, 50])
timeouts = st.none() | times_ms
instances = st.none() | st.none() | few


def asked(*kinds: str) -> st.SearchStrategy[list[Any]]:
    return st.tuples(st.sampled_from(kinds), few, instances).map(list)


working = asked("safe", "unsafe", "remote")
failing = asked("safe_fails", "unsafe_fails", "remote_fails", "again")
local = asked("safe", "unsafe", "safe_fails", "unsafe_fails")
theirs = asked("remote", "remote_fails")


def distinct(items: st.SearchStrategy[list[Any]], least: int = 1, most: int = 3) -> st.SearchStrategy[list[Any]]:
    return st.lists(items, min_size=least, max_size=most, unique_by=str)


@st.composite
def joined(draw: st.DrawFn) -> list[Any]:
    """At most one fails: which of two failures comes first is for nobody to promise."""
    tasks = draw(distinct(working, 0))
    if not tasks or draw(st.booleans()):
        tasks.insert(draw(st.integers(0, len(tasks))), draw(failing))
    return tasks


@st.composite
def selected(draw: st.DrawFn) -> list[Any]:
    """Likewise at most one that succeeds is done here; others come one by one."""
    tasks = draw(distinct(asked("remote", "remote_fails", "safe_fails"), 0))
    if not tasks or draw(st.booleans()):
        tasks.insert(draw(st.integers(0, len(tasks))), draw(asked("remote")))
    return tasks


things = st.one_of(
    theirs,
    st.tuples(st.just("signal"), patterns).map(list),
    st.tuples(st.just("timer"), times_ms).map(list),
)
roles = st.sampled_from([role.value for role in EntryRole])


def statement(op: str, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Statement]:
    return st.tuples(st.just(op), *parts).map(list)


plain = st.one_of(
    statement("append", roles, few),
    statement("append", st.just("user"), st.just("same")),
    statement("once", st.sampled_from("xy"), st.just("once")),
    statement("say", st.sampled_from(["hello", "well"])),
    statement("now"),
    statement("random"),
    statement("uuid"),
    statement("load", st.none() | few),
    statement("task", working | failing),
    statement("task", local),
    statement("join", joined()),
    statement("settled", distinct(working | failing)),
    statement("select", selected()),
    statement("any", distinct(things)),
    statement("cancel", asked("remote")),
    statement("lazy", working | failing),
    statement("sleep", times_ms),
    statement("signal", patterns, timeouts),
    statement("message", timeouts),
    statement("peek", patterns),
    statement("drain", patterns),
    statement("effect", st.sampled_from("ef"), st.booleans(), st.booleans()),
    statement("branch", few),
)
raising = statement("raise", st.just("on purpose"))
statements = st.recursive(
    plain,
    lambda inner: st.one_of(
        statement("try", st.lists(inner | raising, min_size=1, max_size=3)),
        statement("loop", st.just(2), st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=4,
)
caught = st.lists(statements, min_size=1, max_size=4).map(lambda inner: ["try", inner])
phases = st.lists(st.lists(caught | caught | statements, min_size=1, max_size=4), min_size=1, max_size=3)
steps: st.SearchStrategy[Step] = st.one_of(
    st.builds(Tell, names, few),
    st.builds(Say, st.sampled_from(["yes", "no"])),
    st.builds(Pass, times_ms),
    st.builds(Answer),
)
scripts = st.lists(steps, max_size=6)
