"""Three daemons on one database, eight clients over all of them: daemons die, freeze and thaw, lines are cut, the
database stops and starts. What the clients saw keeps every promise. (Contract 1 to 5, 8, 11, 13, 14, 17.)"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.checker import violations
from tests.cluster.daemons import Cluster, alone, clustered
from tests.cluster.history import Outcome, Verb, keep
from tests.cluster.run import Run, Told

PATIENCE_S = 300  # for what has to come to its end
REFUSED = ("lease_superseded", "task_terminal", "result_conflict")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Its path is short, as that of a socket is; the daemons' logs are kept where tests keep things."""
    made = Path(tempfile.mkdtemp(prefix="cov-"))
    yield made
    for log in made.glob("*.log"):
        shutil.copy(log, tmp_path)
    shutil.rmtree(made)


async def played(cluster: Cluster, seed: int, for_s: float, tmp_path: Path, has_time: bool = False) -> Told:
    run = Run(cluster, seed)
    try:
        async with asyncio.timeout(for_s + PATIENCE_S):
            told = await run.play(for_s, has_time)
    finally:
        keep(run.steps, tmp_path / "history.jsonl")
    print(f"seed {seed}: {len(told.steps)} steps, {dict(told.counts)}")
    assert violations(told.steps) == [], f"the history is in {tmp_path}"
    assert told.standing == []
    assert set(told.exits) == {0}
    assert told.faults == []
    return told


@pytest.mark.parametrize(
    ("seed", "for_s", "has_time"),
    [
        pytest.param(6, 1, False, id="each-fault-once"),
        pytest.param(6, 40, False, id="a-minute", marks=pytest.mark.soak),
        pytest.param(60, 580, True, id="ten-minutes", marks=pytest.mark.soak),
    ],
)
async def test_a_cluster_keeps_every_promise_whatever_happens_to_it(
    seed: int, for_s: float, has_time: bool, folder: Path, tmp_path: Path
) -> None:
    async with clustered(folder) as cluster:
        told = await played(cluster, seed, for_s, tmp_path, has_time)
    late = [step for step in told.steps if step.verb is Verb.POST and step.text.startswith("late")]
    assert any(step.code in REFUSED for step in late)
    assert all(step.outcome is not Outcome.DONE for step in late)


@pytest.mark.parametrize(
    "for_s", [pytest.param(1, id="each-fault-once"), pytest.param(40, id="a-minute", marks=pytest.mark.soak)]
)
async def test_one_daemon_on_a_folder_keeps_the_same_promises(for_s: float, folder: Path, tmp_path: Path) -> None:
    async with alone(folder) as cluster:
        await played(cluster, 1, for_s, tmp_path)
