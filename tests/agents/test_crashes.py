"""Kill everywhere: random agents, each run in peace and then with a death at every point. (Contract 20-24.)"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from msgspec import structs

from covenant.agents import AgentWorker, own_tasks
from covenant.agents.commits import Commits
from covenant.agents.effects import Effects
from covenant.agents.memory import noted
from covenant.agents.notes import Notes
from covenant.model.run import Memo, RunCommit, Standing
from covenant.rules.run import resume as resume_rules
from covenant.testing import Answer, Pass, Report, Say, Step, Tell, survives_crashes
from covenant.testing import crash as crash_module
from covenant.testing.gate import Gate
from tests.agents.programs import OTHERS, TASKS, phases, program, scripts
from tests.postgres.mirror import SharedWorld

DEATHS, DEATHS_FOR_LONG = 5_000, 100_000
DEATHS_ON_DISK, DEATHS_ON_DISK_FOR_LONG = 40, 2_000
DEATHS_SHARED, DEATHS_SHARED_FOR_LONG = 15, 1_000
EXAMPLES = 17
COLD, WARM = 0, 1000
MAY_FAIL = ("Broken", "TaskFailed", "AllTasksFailed", "EffectFailed", "TimeoutError")


def kill_everywhere(made: list[Any], script: list[Step], **options: Any) -> Report:
    report = asyncio.run(survives_crashes(program, made, tasks=TASKS, others=OTHERS, script=script, **options))
    failed = (report.outcome.get("result") or {}).get("error")
    assert failed is None or failed.partition(":")[0] in MAY_FAIL, failed
    return report


def kill_many(least: int, **options: Any) -> None:
    """Random agents, until there were so many deaths."""
    deaths = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=True,
    )
    @given(made=phases, script=scripts)
    def kill(made: list[Any], script: list[Step]) -> None:
        nonlocal deaths
        if deaths >= least:
            return
        note(f"{made!r}, {script!r}")
        deaths += kill_everywhere(made, script, fresh_chance=True, **options).points

    while deaths < least:
        kill()


WAYS = [
    pytest.param({"warm_max": WARM}, id="warm"),
    pytest.param({"warm_max": COLD}, id="cold"),
    pytest.param({"warm_max": WARM, "deaths": 2}, id="warm-twice"),
    pytest.param({"warm_max": COLD, "deaths": 2}, id="cold-twice"),
]


@pytest.mark.parametrize("way", WAYS)
def test_no_death_of_a_worker_is_noticed(way: dict[str, Any]) -> None:
    """Contract 24: entries, tasks and effects are those of a life without one."""
    kill_many(DEATHS // len(WAYS), max_points=80, **way)


def test_no_death_of_a_process_is_noticed() -> None:
    kill_many(DEATHS_ON_DISK, max_points=5, on_disk=True)


def test_no_death_of_a_daemon_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store is on PostgreSQL, and another daemon goes on there."""
    monkeypatch.setattr(crash_module, "World", SharedWorld)
    kill_many(DEATHS_SHARED, max_points=5, on_disk=True)


@pytest.mark.soak
def test_no_death_of_a_daemon_is_noticed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_module, "World", SharedWorld)
    kill_many(DEATHS_SHARED_FOR_LONG, max_points=50, on_disk=True)


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_no_death_of_a_worker_is_noticed_for_long(way: dict[str, Any]) -> None:
    kill_many(DEATHS_FOR_LONG // len(WAYS), **way)


@pytest.mark.soak
def test_no_death_of_a_process_is_noticed_for_long() -> None:
    kill_many(DEATHS_ON_DISK_FOR_LONG, max_points=50, on_disk=True)


# --- that it would be noticed ------------------------------------------------------------------------------


def no_memos(notes: Notes, memo: Memo) -> None:
    """What an operation came to is not written down."""
    notes.memory.keep(memo)


async def signals_first(commits: Commits, commit: RunCommit) -> Standing:
    """A signal is consumed in a commit of its own, before what came of it."""
    if commit.takes:
        await SEND(commits, RunCommit(number=commit.number, takes=commit.takes))
        commit = structs.replace(commit, number=commit.number + 1, takes=())
    return await SEND(commits, commit)


async def entries_first(commits: Commits, commit: RunCommit) -> Standing:
    """A batch is two commits."""
    if commit.entries:
        first = RunCommit(number=commit.number, entries=commit.entries, leaf=commit.leaf)
        await SEND(commits, first)
        commit = structs.replace(commit, number=commit.number + 1, entries=())
    return await SEND(commits, commit)


async def unsafe_at_once(effects: Effects, key: str, shown: str, idempotent: bool) -> None:
    """An effect is done, and its start was not written down."""


def no_winner(notes: Notes, key: str, value: Any) -> Memo:
    """Which task came first, and until when is waited, is only kept in mind."""
    memo = noted(key, value)
    notes.memory.keep(memo)
    return memo


async def nobody(worker: AgentWorker) -> None:
    """The runs of the dead are left where they are."""


SEND = Commits._send
MUTANTS = [
    pytest.param(Notes, "remember", no_memos, [[["append", "user", 1], ["signal", "a", None]]], id="no-memos"),
    pytest.param(Commits, "_send", signals_first, [[["signal", "a", None], ["say", "x"]]], id="signals-first"),
    pytest.param(Commits, "_send", entries_first, [[["say", "x"], ["sleep", 10]]], id="entries-first"),
    pytest.param(Effects, "_start", unsafe_at_once, [[["effect", "e", False, False]]], id="unsafe-at-once"),
    pytest.param(
        Notes,
        "note",
        no_winner,
        [[["lazy", ["remote", 1, None]], ["select", [["remote", 0, None], ["remote", 1, None]]], ["sleep", 50]]],
        id="no-winner",
    ),
    pytest.param(Notes, "note", no_winner, [[["sleep", 10], ["now"]]], id="no-time"),
    pytest.param(Notes, "note", no_winner, [[["random"], ["signal", "a", None]]], id="no-chance"),
    pytest.param(AgentWorker, "take_all_over", nobody, [[["say", "x"]]], id="nobody-resumes"),
]


@pytest.mark.parametrize(("whose", "name", "mutant", "made"), MUTANTS)
def test_a_driver_that_loses_something_is_found_out(
    whose: Any, name: str, mutant: Any, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    script: list[Step] = [Answer(), Answer(), Pass(5), Tell("a", 1)]
    kill_everywhere(made, script, fresh_chance=True)
    monkeypatch.setattr(whose, name, mutant)
    with pytest.raises(AssertionError, match="died at point"):
        kill_everywhere(made, script, fresh_chance=True)


def test_that_an_unsafe_task_is_done_again_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes everything up is refused by the rule; without that, it is noticed."""
    made = [[["task", ["unsafe", 1, None]]]]
    monkeypatch.setattr(AgentWorker, "_is_ours_to_resume", lambda worker, entry: True)
    kill_everywhere(made, [], fresh_chance=True)
    monkeypatch.setattr(resume_rules, "declared_safety", lambda record: "idempotent")
    with pytest.raises(AssertionError, match="died at point"):
        kill_everywhere(made, [], fresh_chance=True)


# --- what was found ----------------------------------------------------------------------------------------

FOUND = [
    pytest.param([[["settled", [["safe", 1, None], ["remote", 1, None]]]]], id="a-safe-task-of-a-parked-run"),
    pytest.param([[["effect", "e", True, False]], [["effect", "e", True, False]]], id="an-effect-in-two-phases"),
    pytest.param([[["append", "user", 1]]], id="before-the-first-commit"),
    pytest.param([[["append", "user", 1]], [["sleep", 10], ["load", None]]], id="an-entry-that-is-there-once"),
    pytest.param(
        [[["loop", 2, [["any", [["remote", 0, None], ["timer", 0]]], ["select", [["remote", 1, None]]]]]]],
        id="a-task-that-ended-before-the-time",
    ),
    pytest.param(
        [
            [
                ["lazy", ["remote", 0, None]],
                ["task", ["remote", 1, None]],
                ["any", [["remote", 0, None], ["remote", 1, None]]],
            ]
        ],
        id="a-task-that-ended-unheard-before-another",
    ),
]
LEFT = [["message", None], ["any", [["signal", "a"], ["signal", "**"]]], ["sleep", 10], ["try", [["signal", "a", 0]]]]


@pytest.mark.parametrize("made", FOUND)
@pytest.mark.parametrize("warm_max", [WARM, COLD], ids=["warm", "cold"])
def test_no_death_of_a_worker_is_noticed_in(made: list[Any], warm_max: int) -> None:
    kill_everywhere(made, [], fresh_chance=True, warm_max=warm_max)


@pytest.mark.parametrize("warm_max", [WARM, COLD], ids=["warm", "cold"])
def test_a_signal_that_was_seen_and_left_is_heard_whoever_died(warm_max: int) -> None:
    script: list[Step] = [Tell("b.c", 1), Tell("a", 2), Say("yes")]
    report = kill_everywhere([LEFT], script, fresh_chance=True, warm_max=warm_max)
    assert report.outcome["entries"][-1]["content"] == ["signal", 2]


def test_an_entry_under_a_key_is_there_once() -> None:
    report = kill_everywhere([[["once", "x", 1], ["append", "user", 2], ["once", "x", 1], ["append", "user", 3]]], [])
    shown = [(entry["parent"], entry["content"]) for entry in report.outcome["entries"]]
    assert shown == [(0, "instructions"), (1, 1), (2, 2), (3, 3)]


def test_other_content_under_the_key_of_an_entry_is_refused_before_it_is_committed() -> None:
    report = kill_everywhere([[["once", "x", 1], ["try", [["once", "x", 2]]], ["sleep", 10]]], [])
    assert report.outcome["entries"][2]["content"].startswith("KeyReused")


def test_what_follows_from_a_result_is_not_committed_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that are told beside the commits of a run may be slow."""
    change = Gate._change

    async def slow(gate: Gate, name: str, act: Callable[[], Awaitable[Any]]) -> Any:
        for _ in range(10 if name == "PostResult" else 0):
            await asyncio.sleep(0)
        return await change(gate, name, act)

    monkeypatch.setattr(Gate, "_change", slow)
    monkeypatch.setattr(own_tasks, "LINGER_S", 0)
    report = kill_everywhere([[["task", ["safe", 1, None]], ["effect", "e", False, False]]], [])
    assert report.places["after PostResult"]
