"""Types: what is declared is what comes in and goes out."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec
import pytest

from covenant.agents import AgentContext, RunFailed, agent, task
from tests.agents.house import House, pause


class Mood(Enum):
    GOOD = "good"


@dataclass
class Question:
    text: str
    limits: list[int] = field(default_factory=list)
    mood: Mood = Mood.GOOD


class Report(msgspec.Struct):
    title: str
    pages: dict[str, int]


async def test_dataclasses_and_structs_go_in_and_out(house: House) -> None:
    @task("count")
    async def count(question: Question) -> Report:
        assert isinstance(question, Question) and question.mood is Mood.GOOD
        return Report(question.text, {"n": len(question.limits)})

    @agent("typed")
    async def typed(ctx: AgentContext, question: Question) -> Report:
        assert isinstance(question, Question)
        report = await ctx.task("count", question)
        assert isinstance(report, Report)
        await ctx.append("user", question)
        await pause(ctx)
        again = await ctx.task("count", Question("why?", [1, 2]), type=dict)
        assert again == {"title": "why?", "pages": {"n": 2}}
        return report

    run_id, result = await house.through(typed, Question("why?", [1, 2]), tasks=[count])
    assert result == {"title": "why?", "pages": {"n": 2}}
    assert await house.told(run_id) == [("user", {"text": "why?", "limits": [1, 2], "mood": "good"})]


async def test_what_does_not_fit_ends_the_run_and_says_so(house: House) -> None:
    @agent("typed")
    async def typed(ctx: AgentContext, question: Question) -> None: ...

    with pytest.raises(RunFailed, match=r"WrongInput: typed does not take this input: .*text"):
        await house.through(typed, {"limits": []})


async def test_a_result_that_does_not_fit_is_an_error_at_the_place_that_asked(house: House) -> None:
    @task("odd")
    async def odd() -> Any:
        return {"title": 1}

    @agent("asks")
    async def asks(ctx: AgentContext) -> str:
        with pytest.raises(msgspec.ValidationError):
            await ctx.task("odd", type=Report)
        return "caught"

    assert (await house.through(asks, tasks=[odd]))[1] == "caught"


async def test_an_agent_without_input(house: House) -> None:
    @agent("bare")
    async def bare(ctx: AgentContext) -> None:
        await pause(ctx)

    assert (await house.through(bare))[1] is None


@pytest.mark.skipif(importlib.util.find_spec("pydantic") is None, reason="pydantic is not here")
async def test_models_of_pydantic_go_in_and_out(house: House) -> None:
    import pydantic

    class Model(pydantic.BaseModel):
        n: int

    async def modelled(ctx: AgentContext, given: Any) -> Any:
        assert isinstance(given, Model)
        await ctx.append("user", given)
        await ctx.checkpoint(given) if ctx.state is None else None
        return Model(n=given.n + 1)

    modelled.__annotations__ = {"ctx": AgentContext, "given": Model, "return": Model}
    run_id, result = await house.through(agent("modelled")(modelled), Model(n=1))
    assert result == {"n": 2}
    assert await house.told(run_id) == [("user", {"n": 1})]


def test_what_is_no_agent_is_said_where_it_is_defined() -> None:
    with pytest.raises(TypeError, match="async def"):
        agent("x")(lambda ctx: None)

    async def three(ctx: AgentContext, one: int, two: int) -> None: ...

    with pytest.raises(TypeError, match="ctx, input"):
        agent("x")(three)

    async def unknown(ctx: AgentContext, one: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(TypeError, match="Missing"):
        agent("x")(unknown)

    async def fine(ctx: AgentContext) -> None: ...

    for name in ("", " x"):
        with pytest.raises(ValueError, match="name"):
            agent(name)(fine)
