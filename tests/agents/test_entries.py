"""Entries: added once, in a tree, and read as they were, whenever the function is called from its first line."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from msgspec import structs

from covenant.agents import AgentContext, AgentEntry, EntryRole, EntryType, agent
from covenant.model.error import KeyReused, Malformed
from covenant.model.message import Message, Part
from covenant.model.run import RunStatus
from tests.agents.house import House, content_of, pause


def texts(entries: list[AgentEntry]) -> list[Any]:
    return [entry.content for entry in entries]


async def test_an_entry_is_added_once_and_has_one_id(house: House) -> None:
    @agent("writes")
    async def writes(ctx: AgentContext) -> list[str]:
        ids = [await ctx.append(role, {"n": 1}) for role in EntryRole]
        await pause(ctx)
        return [*ids, await ctx.append("user", [1, None, "x"], type="injection")]

    run_id, ids = await house.through(writes)
    entries = await house.entries(run_id, every=True)
    assert [entry.id for entry in entries] == ids
    assert all(uuid.UUID(one).version == 4 for one in ids)
    assert [entry.role for entry in entries] == [*EntryRole, EntryRole.USER]
    assert [entry.parent for entry in entries] == [0, 1, 2, 3, 4]
    assert (content_of(entries[-1]), entries[-1].type) == ([1, None, "x"], EntryType.INJECTION)


async def test_equal_entries_are_as_many_as_were_added(house: House) -> None:
    @agent("repeats")
    async def repeats(ctx: AgentContext) -> int:
        for _ in range(3):
            await ctx.append("assistant", "again")
            await pause(ctx)
        return len(await ctx.load_messages())

    run_id, count = await house.through(repeats)
    assert count == 3
    assert await house.told(run_id, every=True) == [("assistant", "again")] * 3


async def test_a_path_that_is_taken_later_moves_no_entry(house: House) -> None:
    """Contract 20: other content cannot shift a key."""

    @agent("conditional")
    async def conditional(ctx: AgentContext) -> list[Any]:
        if ctx.resuming:
            await ctx.append("system", "only on the second call")
        await ctx.append("user", "question")
        await ctx.append("assistant", "question")
        await pause(ctx)
        await ctx.append("assistant", "the end")
        return texts(await ctx.load_messages())

    run_id, _ = await house.through(conditional)
    told = await house.told(run_id, every=True)
    assert told.count(("user", "question")) == told.count(("assistant", "question")) == 1
    assert told[:2] == [("user", "question"), ("assistant", "question")]


async def test_under_a_key_an_entry_is_there_once_in_the_life_of_the_run(house: House) -> None:
    @agent("keyed")
    async def keyed(ctx: AgentContext) -> list[str]:
        if ctx.state is None:
            first = await ctx.append("user", "hello", key="greeting")
            again = await ctx.append("user", "hello", key="greeting")
            assert first == again
            await pause(ctx)
            await ctx.checkpoint({"first": first})
        late = await ctx.append("user", "hello", key="greeting")
        await pause(ctx)
        return [ctx.state["first"], late, await ctx.append("user", "hello", key="other")]

    run_id, (first, late, other) = await house.through(keyed)
    assert first == late != other
    assert await house.told(run_id, every=True) == [("user", "hello")] * 2


@pytest.mark.parametrize("after_checkpoint", [False, True])
async def test_under_a_key_other_content_is_an_error(house: House, after_checkpoint: bool) -> None:
    @agent("careless")
    async def careless(ctx: AgentContext) -> str:
        if ctx.state is None:
            await ctx.append("user", "hello", key="greeting")
            await pause(ctx)
            if after_checkpoint:
                await ctx.checkpoint({})
        for role, content in (("user", "goodbye"), ("assistant", "hello")):
            with pytest.raises(KeyReused):
                await ctx.append(role, content, key="greeting")
        await pause(ctx)
        await ctx.append("assistant", "so what")
        return "caught"

    run_id, result = await house.through(careless)
    assert result == "caught"
    assert await house.told(run_id, every=True) == [("user", "hello"), ("assistant", "so what")]


async def test_under_a_key_other_content_is_an_error_before_anything_is_committed(house: House) -> None:
    @agent("quick")
    async def quick(ctx: AgentContext) -> str:
        await ctx.append("user", "hello", key="greeting")
        with pytest.raises(KeyReused):
            await ctx.append("user", "goodbye", key="greeting")
        return "caught"

    run_id, result = await house.through(quick)
    assert result == "caught"
    assert await house.told(run_id, every=True) == [("user", "hello")]


async def test_tool_calls_and_results_are_entries(house: House) -> None:
    @agent("tools")
    async def tools(ctx: AgentContext) -> None:
        await ctx.append_tool_call("search", {"q": 1}, call_id="c-1")
        await pause(ctx)
        await ctx.append_tool_result("search", ["x"], call_id="c-1")
        await ctx.append_tool_call("search", {"q": 2})

    run_id, _ = await house.through(tools)
    assert await house.told(run_id) == [
        ("assistant", {"tool_name": "search", "input": {"q": 1}, "toolCallId": "c-1"}),
        ("tool_result", {"tool_name": "search", "output": ["x"], "toolCallId": "c-1"}),
        ("assistant", {"tool_name": "search", "input": {"q": 2}}),
    ]


async def test_a_turn_marks_the_entries_that_belong_together(house: House) -> None:
    @agent("turns")
    async def turns(ctx: AgentContext) -> list[str | None]:
        ctx.set_turn("one")
        await ctx.append("user", "a")
        await pause(ctx)
        ctx.set_turn("two")
        await ctx.append("user", "b")
        ctx.set_turn(None)
        await ctx.append("user", "c")
        return [entry.turn for entry in await ctx.load_messages()]

    run_id, result = await house.through(turns)
    assert result == ["one", "two", None]
    assert [entry.turn for entry in await house.entries(run_id)] == result


# --- saying ------------------------------------------------------------------------------------------------


async def test_what_is_said_is_an_entry_and_is_seen_by_the_sender(house: House) -> None:
    @agent("talks")
    async def talks(ctx: AgentContext) -> list[str]:
        first = await ctx.say("hello")
        await pause(ctx)
        second = await ctx.say(Message(message_id="mine", role="ROLE_AGENT", parts=(Part(text="there"),)))
        third = await ctx.say("hello")
        return [first, second, third]

    async with house.worker(talks):
        run_id = await house.begin(talks)
        seen = await house.until(run_id, RunStatus.AWAITING_INPUT)
        shown = await house.shown(run_id)
        assert shown.status.state == "TASK_STATE_INPUT_REQUIRED"
        assert shown.status.message is not None and shown.status.message.parts[0].text == "hello"
        assert seen.generation == 4  # sent, leased, said, asked
        await house.signal(run_id, "pause")
        ids = await house.result(run_id)
        entry = await house.alice.get_task(run_id)
    assert ids[1] == "mine"
    entries = await house.entries(run_id)
    assert [one.id for one in entries] == ids
    assert [content_of(one)["text"] for one in entries] == ["hello", "there", "hello"]
    agent_said = [m for m in (await house.shown(run_id)).history if m.role == "ROLE_AGENT"]
    assert [m.message_id for m in agent_said] == ids
    assert entry.generation == 9  # working again, said twice, artifact, completed


async def test_what_is_said_under_a_key_is_said_once(house: House) -> None:
    @agent("talks")
    async def talks(ctx: AgentContext) -> bool:
        if ctx.state is None:
            await ctx.say("hello", key="greeting")
            await pause(ctx)
            await ctx.checkpoint({})
        first = await ctx.say("hello", key="greeting")
        with pytest.raises(KeyReused):
            await ctx.say("goodbye", key="greeting")
        return first == await ctx.say("hello", key="greeting")

    run_id, result = await house.through(talks)
    assert result is True
    assert await house.told(run_id, every=True) == [("assistant", {"text": "hello"})]
    assert [m.parts[0].text for m in (await house.shown(run_id)).history if m.role == "ROLE_AGENT"] == ["hello"]


# --- the tree ----------------------------------------------------------------------------------------------


async def test_a_compaction_stands_for_what_came_before_it(house: House) -> None:
    @agent("compacts")
    async def compacts(ctx: AgentContext) -> list[Any]:
        for n in range(5):
            await ctx.append("user", n)
        await pause(ctx)
        await ctx.compact({"summary": "0 to 4"})
        await ctx.append("user", 5)
        await pause(ctx)
        return [[entry.content, entry.type.value] for entry in await ctx.load_messages()]

    run_id, result = await house.through(compacts)
    assert result == [[{"summary": "0 to 4"}, "compaction"], [5, "message"]]
    assert len(await house.entries(run_id)) == 2
    assert len(await house.entries(run_id, every=True)) == 7


async def test_messages_are_loaded_as_they_were_at_that_place(house: House) -> None:
    @agent("reads")
    async def reads(ctx: AgentContext) -> list[Any]:
        before = texts(await ctx.load_messages())
        await ctx.append("user", "a")
        middle = texts(await ctx.load_messages())
        await ctx.append("user", "b")
        await pause(ctx)
        await ctx.append("user", "c")
        return [before, middle, texts(await ctx.load_messages(2)), texts(await ctx.load_messages())]

    _, result = await house.through(reads)
    assert result == [[], ["a"], ["b", "c"], ["a", "b", "c"]]


async def test_loaded_messages_tell_everything_and_the_same_each_time(house: House) -> None:
    """What is hashed into the input of a task must not change by being stored."""
    seen: list[list[AgentEntry]] = []

    @agent("reads")
    async def reads(ctx: AgentContext) -> None:
        await ctx.append("user", {"b": 1, "a": [1.5, None]})
        await ctx.say("here")
        await ctx.append_tool_result("x", {"y": 2})
        house.clock.advance(7)
        seen.append(await ctx.load_messages())
        await pause(ctx)
        seen.append(await ctx.load_messages())

    await house.through(reads)
    assert [list(entry.content) for entry in seen[0]] == [list(entry.content) for entry in seen[-1]]
    first = [(e.id, e.role, e.content, e.type, e.number, e.parent, e.turn) for e in seen[0]]
    for later in seen[1:]:
        assert [(e.id, e.role, e.content, e.type, e.number, e.parent, e.turn) for e in later] == first


async def test_a_branch_goes_on_from_an_earlier_entry(house: House) -> None:
    @agent("branches")
    async def branches(ctx: AgentContext) -> list[Any]:
        await ctx.append("user", "root")
        fork = await ctx.append("user", "fork")
        await ctx.append("assistant", "left")
        await pause(ctx)
        left = texts(await ctx.load_messages())
        await ctx.branch(fork)
        at_fork = texts(await ctx.load_messages())
        await ctx.append("assistant", "right")
        await pause(ctx)
        right = await ctx.load_messages()
        await ctx.branch(right[0])
        await ctx.append("assistant", "third")
        return [left, at_fork, texts(right), texts(await ctx.load_messages())]

    run_id, result = await house.through(branches)
    assert result == [
        ["root", "fork", "left"],
        ["root", "fork"],
        ["root", "fork", "right"],
        ["root", "third"],
    ]
    every = await house.entries(run_id, every=True)
    assert [(content_of(entry), entry.parent) for entry in every] == [
        ("root", 0),
        ("fork", 1),
        ("left", 2),
        ("right", 2),
        ("third", 1),
    ]
    assert [content for _, content in await house.told(run_id)] == ["root", "third"]


async def test_a_branch_to_an_entry_behind_a_checkpoint(house: House) -> None:
    @agent("branches")
    async def branches(ctx: AgentContext) -> list[Any]:
        if ctx.state is None:
            fork = await ctx.append("user", "root")
            await ctx.append("assistant", "left")
            await ctx.checkpoint({"fork": fork})
            await pause(ctx)
        await ctx.branch(ctx.state["fork"])
        await ctx.append("assistant", "right")
        await pause(ctx)
        return texts(await ctx.load_messages())

    _, result = await house.through(branches)
    assert result == ["root", "right"]


async def test_a_branch_to_the_other_branch(house: House) -> None:
    """Its entries are not on the way to where the run is, and it may have been put away since it made them."""

    @agent("branches")
    async def branches(ctx: AgentContext) -> list[Any]:
        if ctx.state is None:
            root = await ctx.append("user", "root")
            left = await ctx.append("assistant", "left")
            await ctx.branch(root)
            await ctx.append("assistant", "right")
            await ctx.checkpoint({"left": left})
            await pause(ctx)
        await ctx.branch(ctx.state["left"])
        await pause(ctx)
        return texts(await ctx.load_messages())

    _, result = await house.through(branches)
    assert result == ["root", "left"]


def named(message_id: str, text: str) -> Message:
    return Message(message_id=message_id, role="ROLE_AGENT", parts=(Part(text=text),))


@pytest.mark.parametrize("has_checkpoint", [False, True])
async def test_of_entries_with_one_id_a_branch_goes_on_from_the_first(house: House, has_checkpoint: bool) -> None:
    """Whoever sends messages chooses their ids, and can so move nobody to another entry."""

    @agent("branches")
    async def branches(ctx: AgentContext) -> list[Any]:
        if ctx.state is None:
            await ctx.say(named("m", "one"))
            await ctx.append("assistant", "between")
            if has_checkpoint:
                await ctx.checkpoint("half")
        await ctx.say(named("m", "two"))
        await ctx.branch("m")
        await ctx.append("assistant", "below")
        await pause(ctx)
        await ctx.say(named("m", "three"))
        await ctx.branch("m")
        return texts(await ctx.load_messages())

    run_id, result = await house.through(branches)
    assert result == [{"text": "one"}]
    entries = {str(content_of(entry)): entry for entry in await house.entries(run_id, every=True)}
    assert entries["below"].parent == 1


async def test_an_entry_that_is_found_under_its_key_takes_no_id_from_the_first_that_had_it(house: House) -> None:
    @agent("branches")
    async def branches(ctx: AgentContext) -> list[Any]:
        await ctx.say(named("m", "one"))
        await ctx.say(named("m", "two"), key="k")
        assert await ctx.say("two", key="k") == "m"
        await ctx.branch("m")
        await pause(ctx)
        return texts(await ctx.load_messages())

    assert (await house.through(branches))[1] == [{"text": "one"}]


async def test_a_branch_to_an_entry_itself_is_to_that_one_whatever_its_id(house: House) -> None:
    @agent("branches")
    async def branches(ctx: AgentContext) -> list[Any]:
        for text in ("one", "two", "three"):
            await ctx.say(named("m", text))
        _, second, _ = await ctx.load_messages()
        await pause(ctx)
        await ctx.branch(second)
        await ctx.append("assistant", "below")
        with pytest.raises(Malformed):
            await ctx.branch(structs.replace(second, id="of another run"))
        with pytest.raises(Malformed):
            await ctx.branch(structs.replace(second, number=99))
        return texts(await ctx.load_messages())

    _, result = await house.through(branches)
    assert result == [{"text": "one"}, {"text": "two"}, "below"]


async def test_a_branch_to_nowhere_is_refused_again_though_the_entry_has_come(house: House) -> None:
    @agent("branches")
    async def branches(ctx: AgentContext) -> str:
        told = "found"
        try:
            await ctx.branch("m")
        except Malformed:
            told = "no such entry"
        await ctx.say(named("m", "here"))
        await pause(ctx)
        return told

    assert (await house.through(branches))[1] == "no such entry"


async def test_a_branch_to_nowhere_is_refused(house: House) -> None:
    @agent("lost")
    async def lost(ctx: AgentContext) -> str:
        await ctx.append("user", "root")
        with pytest.raises(Malformed):
            await ctx.branch("no such entry")
        return "caught"

    assert (await house.through(lost))[1] == "caught"


async def test_a_limit_of_messages_counts_from_the_leaf(house: House) -> None:
    @agent("reads")
    async def reads(ctx: AgentContext) -> list[Any]:
        for n in range(6):
            await ctx.append("user", n)
        await pause(ctx)
        return [texts(await ctx.load_messages(limit)) for limit in (0, 1, 4, 6, 100)]

    _, result = await house.through(reads)
    assert result == [[], [5], [2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


async def test_a_long_history_is_read_whole(house: House) -> None:
    @agent("long")
    async def long(ctx: AgentContext) -> list[int]:
        state = ctx.state or {"from": 0}
        for start in range(state["from"], 2700, 900):
            for n in range(start, start + 900):
                await ctx.append("user", n)
            await ctx.checkpoint({"from": start + 900})
        await pause(ctx)
        return [entry.content for entry in await ctx.load_messages()]

    assert (await house.through(long))[1] == list(range(2700))


async def test_an_entry_that_is_there_already_does_not_move_the_run(house: House) -> None:
    @agent("prompted")
    async def prompted(ctx: AgentContext) -> list[Any]:
        turn = ctx.state or 0
        await ctx.append("system", "be kind", key="prompt")
        while turn < 3:
            await ctx.append("user", turn)
            await ctx.append("system", "be kind", key="prompt")
            await ctx.append("assistant", turn)
            await pause(ctx)
            turn += 1
            await ctx.checkpoint(turn)
        return texts(await ctx.load_messages())

    assert (await house.through(prompted))[1] == ["be kind", 0, 0, 1, 1, 2, 2]
