"""Time, chance and effects inside an agent: remembered, and in doubt when nobody can know."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covenant import Delivery
from covenant.agents import AgentContext, AgentWorker, EffectFailed, agent, own_tasks, task
from covenant.model.error import Malformed, NotInDoubt
from covenant.model.run import RunCommit, RunStatus, Standing
from covenant.testing import survives_crashes
from tests.agents.house import House, pause
from tests.agents.test_reference import Killed, Killer, soon

# --- time and chance ---------------------------------------------------------------------------------------


async def test_a_sleep_lasts_as_long_as_it_says(house: House) -> None:
    @agent("sleeps")
    async def sleeps(ctx: AgentContext) -> list[int]:
        times = [await ctx.now()]
        for ms in (1000, 1000, 0):
            await ctx.sleep(ms)
            times.append(await ctx.now())
        with pytest.raises(Malformed):
            await ctx.sleep(-1)
        return [time - times[0] for time in times]

    async with house.worker(sleeps):
        run_id = await house.begin(sleeps)
        for _ in range(2):
            seen = await house.until(run_id, RunStatus.AWAITING_WORK)
            assert seen.until_ms == house.clock.now_ms() + 1000
            house.clock.advance(999)
            assert (await house.alice.get_run(run_id)).status is RunStatus.AWAITING_WORK
            house.clock.advance(1)
        assert await house.result(run_id) == [0, 1000, 2000, 2000]


async def test_a_sleep_that_was_over_while_nobody_worked_is_over(house: House) -> None:
    @agent("sleeps")
    async def sleeps(ctx: AgentContext) -> str:
        await ctx.sleep(1000)
        return "awake"

    async with house.worker(sleeps):
        run_id = await house.begin(sleeps)
        await house.until(run_id, RunStatus.AWAITING_WORK)
    house.clock.advance(5000)
    async with house.worker(sleeps):
        assert await house.result(run_id) == "awake"


async def test_time_and_chance_are_remembered(house: House) -> None:
    @agent("chance")
    async def chance(ctx: AgentContext) -> list[Any]:
        before = [await ctx.now(), await ctx.random(), await ctx.uuid(), await ctx.random()]
        await ctx.append("assistant", before)
        await pause(ctx)
        house.clock.advance(1)
        after = await ctx.now()
        return [*before, after]

    run_id, result = await house.through(chance)
    assert await house.told(run_id, every=True) == [("assistant", result[:4])]
    assert result[1] != result[3] and 0 <= result[1] < 1
    assert uuid.UUID(result[2]).version == 4
    assert result[4] > result[0]


# --- effects -----------------------------------------------------------------------------------------------


async def test_an_effect_is_done_once_and_remembered(house: House) -> None:
    done = []

    async def write() -> dict[str, int]:
        done.append("write")
        return {"n": len(done)}

    def plain() -> str:
        done.append("plain")
        return "text"

    @agent("acts")
    async def acts(ctx: AgentContext) -> list[Any]:
        results = [await ctx.run("write", write), await ctx.run("write", write)]
        await pause(ctx)
        results.append(await ctx.run("plain", plain))
        await pause(ctx)
        return results

    _, result = await house.through(acts)
    assert result == [{"n": 1}, {"n": 2}, "text"]
    assert done == ["write", "write", "plain"]


async def test_an_effect_that_failed_fails_again_as_it_did(house: House) -> None:
    done = []

    def fails() -> None:
        done.append(1)
        raise ValueError("no")

    @agent("acts")
    async def acts(ctx: AgentContext) -> list[str]:
        caught = []
        for idempotent in (False, True):
            try:
                await ctx.run(f"fails {idempotent}", fails, idempotent=idempotent)
            except EffectFailed as failed:
                caught.append(f"{failed.name}: {failed.message}")
            await pause(ctx)
        return caught

    _, result = await house.through(acts)
    assert result == ["fails False: ValueError: no", "fails True: ValueError: no"]
    assert len(done) == 2


async def test_an_effect_gets_its_key(house: House) -> None:
    keys: list[str] = []

    @agent("acts")
    async def acts(ctx: AgentContext) -> str:
        await ctx.run("pay", keys.append, idempotent=True)
        await ctx.run("pay", keys.append, idempotent=True)
        await ctx.run("pay", lambda key: keys.append(key))
        return ctx.run_id

    _, run_id = await house.through(acts)
    assert len(set(keys)) == 3 and all(str(key).startswith(run_id) for key in keys)


async def test_what_an_effect_returns_is_typed_and_is_json(house: House) -> None:
    @agent("acts")
    async def acts(ctx: AgentContext) -> bool:
        value = await ctx.run("float", lambda: 1, type=float)
        with pytest.raises(EffectFailed, match="JSON"):
            await ctx.run("object", object)
        return isinstance(value, float)

    assert (await house.through(acts))[1] is True


@pytest.mark.parametrize("verdict", ["done", "failed", "retry"])
async def test_an_effect_that_nobody_knows_the_outcome_of_waits_for_a_verdict(
    house: House, tmp_path: Path, verdict: Any
) -> None:
    done = []
    dies = asyncio.Event()

    def pay() -> str:
        done.append("paid")
        if not dies.is_set():
            dies.set()
            raise Killed
        return "receipt"

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        await ctx.append("assistant", "before")
        try:
            receipt = await ctx.run("pay", pay)
        except EffectFailed as failed:
            receipt = f"failed: {failed.message}"
        await ctx.append("assistant", receipt)
        await pause(ctx)
        return str(receipt)

    async with house.worker(pays, home=tmp_path / "home"):
        run_id = await house.begin(pays)
        await soon(dies)
    async with house.worker(pays, home=tmp_path / "home"):
        seen = await house.until(run_id, RunStatus.EFFECT_IN_DOUBT)
        assert list(seen.doubts) == ["pay"]
        with pytest.raises(NotInDoubt):
            await house.bob.judge_effect(run_id, "other", verdict, reason="x")
        value = {"done": "by hand", "failed": "the bank says no", "retry": None}[verdict]
        await house.bob.judge_effect(run_id, "pay", verdict, reason="looked it up", value=value)
        await house.paused(run_id)
        with pytest.raises(NotInDoubt):
            await house.bob.judge_effect(run_id, "pay", verdict, reason="again")
        await house.signal(run_id, "pause")
        expected = {"done": "by hand", "failed": "failed: the bank says no", "retry": "receipt"}[verdict]
        assert await house.result(run_id) == expected
    assert len(done) == (2 if verdict == "retry" else 1)
    assert await house.told(run_id, every=True) == [("assistant", "before"), ("assistant", expected)]


async def test_an_idempotent_effect_is_done_again_under_its_key(house: House, tmp_path: Path) -> None:
    keys: list[Any] = []

    def pay(key: str) -> str:
        keys.append(key)
        if len(keys) == 1:
            raise Killed
        return "receipt"

    killer = Killer(house, 10**6)

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        await ctx.checkpoint()
        assert ctx.state is None
        return str(await ctx.run("pay", pay, idempotent=True))

    @agent("pays")
    async def goes_on(ctx: AgentContext) -> str:
        assert ctx.state is None
        return str(await ctx.run("pay", pay, idempotent=True))

    dead = asyncio.Event()

    def hear(place: str) -> None:
        killer(place)
        if place == "an effect":
            dead.set()

    async with house.worker(pays, home=tmp_path / "home", probe=hear):
        run_id = await house.begin(pays)
        await soon(dead)
    async with house.worker(goes_on, home=tmp_path / "home"):
        assert await house.result(run_id) == "receipt"
    assert len(keys) == 2 and keys[0] == keys[1]


async def test_another_place_of_the_run_may_judge_nothing(house: House) -> None:
    """The names under which verdicts come in are nobody's to send."""

    @agent("waits")
    async def waits(ctx: AgentContext) -> str:
        return str(await ctx.wait_for_signal("go"))

    async with house.worker(waits):
        run_id = await house.begin(waits)
        await house.until(run_id, RunStatus.AWAITING_INPUT)
        with pytest.raises(Malformed):
            await house.signal(run_id, "effect:x", {"verdict": "done"})
        await house.signal(run_id, "go", 1)
        assert await house.result(run_id) == "1"


async def test_effects_beside_each_other_are_in_doubt_one_by_one(house: House, tmp_path: Path) -> None:
    begun = asyncio.Barrier(2)
    dead = asyncio.Event()
    calls = []

    async def pay() -> str:
        calls.append(1)
        if len(calls) > 2:
            return "again"
        await begun.wait()
        dead.set()
        raise Killed

    @agent("pays")
    async def pays(ctx: AgentContext) -> list[str]:
        return list(await asyncio.gather(ctx.run("rent", pay), ctx.run("tax", pay)))

    async with house.worker(pays, home=tmp_path / "home", grace_ms=0):
        run_id = await house.begin(pays)
        await soon(dead)
    async with house.worker(pays, home=tmp_path / "home"):
        for _ in range(2):
            seen = await house.until(run_id, RunStatus.EFFECT_IN_DOUBT)
            doubt = seen.doubts[0]
            await house.bob.judge_effect(run_id, doubt, "done", reason="seen", value=doubt)
        assert await house.result(run_id) == ["rent", "tax"]


class Panic(BaseException):
    """As extensions raise it that are written in another language."""


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (OSError("no file \udcff"), "OSError: no file ?"),
        (ValueError("x" * 5_000_000), "ValueError: " + "x" * (16 * 1024 - 12)),
        (asyncio.CancelledError("given up"), "CancelledError: given up"),
        (Panic("lost my head"), "Panic: lost my head"),
    ],
    ids=["no unicode", "too long", "canceled", "panic"],
)
async def test_whatever_an_effect_raises_is_remembered(house: House, failure: BaseException, message: str) -> None:
    calls = []

    @agent("tries")
    async def tries(ctx: AgentContext) -> str:
        def fail() -> None:
            calls.append(1)
            raise failure

        with pytest.raises(EffectFailed) as failed:
            await ctx.run("try", fail)
        await pause(ctx)
        return str(failed.value)

    _, told = await house.through(tries)
    assert (told, len(calls)) == (message, 1)


# --- starts that came to nothing ---------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before a commit", "after a commit"])
async def test_an_effect_that_was_called_off_before_it_began_is_not_in_doubt(house: House, moment: str) -> None:
    done: list[str] = []
    starting: list[asyncio.Future[Any]] = []

    def call_off(now: str) -> None:
        house.hear(now)
        if now == moment and starting:
            starting.pop().cancel()

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        await ctx.checkpoint("begun")
        paying = asyncio.ensure_future(ctx.run("pay", lambda: done.append("paid")))
        starting.append(paying)
        with pytest.raises(asyncio.CancelledError):
            await paying
        await pause(ctx)
        return "never"

    @agent("pays")
    async def goes_on(ctx: AgentContext) -> str:
        assert ctx.state == "begun"
        await ctx.run("pay", lambda: done.append("paid"))
        await pause(ctx)
        return "paid"

    async with house.worker(pays, probe=call_off):
        run_id = await house.begin(pays)
        await house.paused(run_id)
    assert not done
    async with house.worker(goes_on):
        await house.signal(run_id, "pause")
        seen = await house.until(run_id, RunStatus.ENDED, RunStatus.EFFECT_IN_DOUBT)
        assert seen.status is RunStatus.ENDED
    assert done == ["paid"]


async def test_an_effect_that_was_called_off_and_then_done_is_done_once(house: House) -> None:
    """Called again after a crash, nobody calls it off: it finds what the second call came to."""
    keys: list[str] = []
    starting: list[asyncio.Future[Any]] = []

    def call_off(now: str) -> None:
        house.hear(now)
        if now == "before a commit" and starting:
            starting.pop().cancel()

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        if not keys:
            paying = asyncio.ensure_future(ctx.run("pay", keys.append))
            starting.append(paying)
            with pytest.raises(asyncio.CancelledError):
                await paying
        await ctx.run("pay", keys.append)
        await pause(ctx)
        return "paid"

    async with house.worker(pays, probe=call_off):
        run_id = await house.begin(pays)
        await house.paused(run_id)
    async with house.worker(pays):
        await house.signal(run_id, "pause")
        seen = await house.until(run_id, RunStatus.ENDED, RunStatus.EFFECT_IN_DOUBT)
        assert seen.status is RunStatus.ENDED
    assert len(keys) == 1


async def test_a_crash_around_a_start_that_is_called_off_repeats_nothing() -> None:
    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        paying = asyncio.ensure_future(ctx.run("pay", lambda: "receipt"))
        await asyncio.sleep(0)
        paying.cancel()
        await asyncio.wait([paying])
        return str(await ctx.run("pay", lambda: "receipt") if paying.cancelled() else paying.result())

    report = await survives_crashes(pays)
    assert report.outcome["result"]["value"] == "receipt"


async def test_an_effect_in_doubt_that_is_not_waited_for_is_in_doubt_when_it_is_asked_for_again(
    house: House, tmp_path: Path
) -> None:
    """Not another one, that would be done at once."""
    done: list[str] = []
    dies = asyncio.Event()

    def pay() -> None:
        done.append("paid")
        dies.set()
        raise Killed

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        if dies.is_set():
            paying = asyncio.ensure_future(ctx.run("pay", pay))
            await asyncio.sleep(0)
            paying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await paying
        return str(await ctx.run("pay", pay))

    async with house.worker(pays, home=tmp_path / "home"):
        run_id = await house.begin(pays)
        await soon(dies)
    async with house.worker(pays, home=tmp_path / "home"):
        seen = await house.until(run_id, RunStatus.EFFECT_IN_DOUBT, RunStatus.ENDED)
        assert list(seen.doubts) == ["pay"]
        await house.bob.judge_effect(run_id, "pay", "done", reason="seen", value="by hand")
        assert await house.result(run_id) == "by hand"
    assert len(done) == 1


# --- a worker that stops ------------------------------------------------------------------------------------


async def _stopped_in_a_commit(
    house: House,
    worker: AgentWorker,
    agent_name: str,
    is_it: Callable[[RunCommit], bool],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_made: bool = True,
) -> str:
    """A run whose worker has stopped before it heard of such a commit, which was made or not."""
    made = asyncio.Event()
    async with worker:
        commit_run = worker.box.commit_run

        async def unheard(lease: Delivery | str, commit: RunCommit) -> Standing:
            is_lost = is_it(commit) and not made.is_set()
            standing = await commit_run(lease, commit) if is_made or not is_lost else None
            if is_lost:
                made.set()
                await asyncio.get_running_loop().create_future()
            assert standing is not None
            return standing

        monkeypatch.setattr(worker.box, "commit_run", unheard)
        run_id = await house.begin(agent_name)
        await soon(made)
    return run_id


async def test_an_effect_that_a_worker_did_not_begin_before_it_stopped_is_not_in_doubt(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        await ctx.run("pay", lambda: done.append("paid"))
        return "paid"

    worker = house.worker(pays, grace_ms=0)
    run_id = await _stopped_in_a_commit(
        house, worker, "pays", lambda made: any(memo.begun is not None for memo in made.memos), monkeypatch
    )
    assert not done and "stays in flight" not in caplog.text
    async with house.worker(pays):
        seen = await house.until(run_id, RunStatus.ENDED, RunStatus.EFFECT_IN_DOUBT)
        assert seen.status is RunStatus.ENDED
    assert done == ["paid"]


async def test_a_task_that_a_worker_did_not_begin_before_it_stopped_is_not_in_doubt(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    @task("pay")
    def pay() -> str:
        done.append("paid")
        return "receipt"

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        return str(await ctx.task("pay"))

    worker = house.worker(pays, tasks=[pay], grace_ms=0)
    run_id = await _stopped_in_a_commit(house, worker, "pays", lambda made: bool(made.begins), monkeypatch)
    assert not done
    async with house.worker(pays, tasks=[pay]):
        assert await house.result(run_id) == "receipt"
    assert done == ["paid"]


@pytest.mark.parametrize("is_made", [True, False])
async def test_an_effect_that_was_done_before_its_worker_stopped_is_not_in_doubt(
    house: House, is_made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        await ctx.run("pay", lambda: done.append("paid"))
        return "paid"

    worker = house.worker(pays, grace_ms=0)
    run_id = await _stopped_in_a_commit(house, worker, "pays", lambda made: bool(done), monkeypatch, is_made=is_made)
    async with house.worker(pays):
        seen = await house.until(run_id, RunStatus.ENDED, RunStatus.EFFECT_IN_DOUBT)
        assert seen.status is RunStatus.ENDED
    assert done == ["paid"]


@pytest.mark.parametrize("is_made", [True, False])
async def test_a_run_whose_worker_stopped_while_it_was_being_parked_goes_on(
    house: House, is_made: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    @agent("waits")
    async def waits(ctx: AgentContext) -> str:
        await pause(ctx)
        return "went on"

    worker = house.worker(waits, grace_ms=0)
    run_id = await _stopped_in_a_commit(
        house, worker, "waits", lambda made: made.wait is not None, monkeypatch, is_made=is_made
    )
    assert "given back" not in caplog.text
    async with house.worker(waits):
        await house.signal(run_id, "pause")
        assert await house.result(run_id) == "went on"


async def test_what_was_done_and_not_committed_when_a_worker_stops_is_committed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that may not be done twice, of which nobody would know what became of it."""
    monkeypatch.setattr(own_tasks, "LINGER_S", 60)
    done: list[str] = []
    is_done = asyncio.Event()

    @task("pay")
    async def pay() -> str:
        done.append("paid")
        return "receipt"

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        receipt = str(await ctx.task("pay"))
        await ctx.append("assistant", receipt)
        if not is_done.is_set():
            is_done.set()
            await asyncio.get_running_loop().create_future()
        return receipt

    async with house.worker(pays, tasks=[pay], grace_ms=0):
        run_id = await house.begin(pays)
        await soon(is_done)
    assert await house.told(run_id) == [("assistant", "receipt")]
    async with house.worker(pays, tasks=[pay]):
        assert await house.result(run_id) == "receipt"
    assert done == ["paid"]
    assert await house.told(run_id) == [("assistant", "receipt")]


async def test_an_effect_that_outlasts_its_worker_waits_for_no_commit(house: House) -> None:
    """In a task that nobody cancels: it would wait for ever, and wake a run that is somebody else's by now."""
    began, may_end = asyncio.Event(), asyncio.Event()
    beside: list[asyncio.Task[Any]] = []

    async def pay() -> str:
        began.set()
        await may_end.wait()
        return "receipt"

    @agent("pays")
    async def pays(ctx: AgentContext) -> None:
        beside.append(asyncio.create_task(ctx.run("pay", pay)))
        await asyncio.get_running_loop().create_future()

    async with house.worker(pays, grace_ms=0):
        await house.begin(pays)
        await soon(began)
    may_end.set()
    _, left = await asyncio.wait(beside, timeout=5)
    assert not left
    assert beside[0].cancelled()


async def test_a_checkpoint_beside_an_effect_waits_for_it(house: House) -> None:
    """Else the start of the effect is forgotten, and whoever goes on does it again without a question."""
    began, hangs = asyncio.Event(), asyncio.Event()
    paid: list[str] = []

    async def pay() -> str:
        paid.append("paid")
        began.set()
        await hangs.wait()
        return "receipt"

    @agent("pays")
    async def pays(ctx: AgentContext) -> None:
        if ctx.state is None:

            async def keeps() -> None:
                await began.wait()
                await ctx.checkpoint("kept")

            await asyncio.gather(ctx.run("pay", pay), keeps())
        else:
            await ctx.run("pay", pay)

    async with house.worker(pays, grace_ms=0):
        run_id = await house.begin(pays)
        await soon(began)
    hangs.set()
    async with house.worker(pays):
        seen = await house.until(run_id, RunStatus.EFFECT_IN_DOUBT)
        assert list(seen.doubts) == ["pay"]
    assert paid == ["paid"]


async def test_a_checkpoint_comes_after_the_effects_that_are_under_way(house: House) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()
    told: list[str] = []

    async def pay() -> str:
        began.set()
        await may_end.wait()
        told.append("paid")
        return "receipt"

    @agent("pays")
    async def pays(ctx: AgentContext) -> str:
        async def keeps() -> None:
            await began.wait()
            asyncio.get_running_loop().call_soon(may_end.set)
            await ctx.checkpoint("kept")
            told.append("kept")

        receipt, _ = await asyncio.gather(ctx.run("pay", pay), keeps())
        return str(receipt)

    async with house.worker(pays):
        assert await house.result(await house.begin(pays)) == "receipt"
    assert told == ["paid", "kept"]


async def test_a_checkpoint_has_its_turn_among_effects_without_an_end(house: House) -> None:
    @agent("busy")
    async def busy(ctx: AgentContext) -> int:
        count, is_kept = 0, False

        async def acts() -> None:
            nonlocal count
            while not is_kept:
                await ctx.run(f"act {count}", lambda: None)
                count += 1

        async def keeps() -> None:
            nonlocal is_kept
            await ctx.checkpoint("kept")
            is_kept = True

        await asyncio.gather(acts(), acts(), keeps())
        return count

    async with house.worker(busy):
        assert await house.result(await house.begin(busy)) < 20


async def test_no_checkpoint_is_made_inside_an_effect(house: House) -> None:
    @agent("keeps")
    async def keeps(ctx: AgentContext) -> None:
        await ctx.run("keep", lambda: ctx.checkpoint("kept"))

    async with house.worker(keeps):
        assert "no checkpoint inside an effect" in await house.failure(await house.begin(keeps))
