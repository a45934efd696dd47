"""Every verb, by every caller, on every thing, under every grant: the rules say what the contract says."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio

from tests.authorization.harness import Harness
from tests.authorization.verbs import LET_IN, VERBS, Verb
from tests.authorization.verdict import FEW, Cell, Role, all_cells, cells, verdict
from tests.authorization.world import SAMPLES, State

CELLS_MIN: Final = 23_000
FLOORS: Final = {  # how many cells at least have each verdict
    "let in": 3_400,
    "missing_capability": 950,
    "scope_mismatch": 4_400,
    "there is no such grant": 2_500,
    "not_permitted": 370,
    "unknown_task": 4_900,
    "unknown_lease": 4_500,
    "unknown_grant": 36,
    "unknown_peer": 110,
    "sender_mismatch": 320,
    "recipient_refused": 120,
    "unauthenticated": 1_250,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    await harness.open()
    yield harness
    await harness.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name.replace(" ", "-"))
async def test_each_caller_is_told_what_the_contract_says(harness: Harness, verb: Verb) -> None:
    """Contract 25, 26, 27. Of each sort of difference, the first cell is shown."""
    wrong: dict[str, str] = {}
    done = 0
    for cell in cells(verb):
        expected = verdict(cell, harness.things[cell.state])
        judged = await harness.judged(cell)
        done += judged.is_done
        if judged.verdict != expected:
            wrong.setdefault(f"{expected}, not {judged.verdict}", f"{cell}: {judged.refusal}")
        elif judged.verdict != LET_IN and not judged.is_quiet:
            wrong.setdefault("refused, and something changed or nothing was written down", str(cell))
    assert wrong == {}
    assert done or verb.lets_in != LET_IN, "no call was done: what is asked here does not stand for the verb"


NAMING: Final = tuple(verb for verb in VERBS if verb.on != (State.NOTHING,))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("verb", NAMING, ids=lambda verb: verb.name.replace(" ", "-"))
async def test_what_is_hidden_cannot_be_told_from_what_is_absent(harness: Harness, verb: Verb) -> None:
    """Contract 27: neither the answer nor the audit rows differ, whatever else the caller may do."""
    absent = State.UNKNOWN if State.UNKNOWN in verb.on else State.NOTHING
    compared = 0
    for role in (Role.THIRD, Role.ABOVE):
        for held in FEW if verb.names is not None else (None,):  # a caller that may send learns that an id is taken
            words = {}
            for state in verb.on:
                judged = await harness.judged(Cell(verb, role, state, held))
                words[state] = judged.words(harness.things[state])
                compared += not judged.is_done
            assert set(words.values()) == {words[absent]}
    assert compared >= 4


def test_the_table_is_whole() -> None:
    """The table cannot shrink, or lose a verdict, unnoticed."""
    found = Counter(verdict(cell, SAMPLES[cell.state]) for cell in all_cells())
    assert set(found) == set(FLOORS)
    assert {name: count for name, count in found.items() if count < FLOORS[name]} == {}
    assert found.total() >= CELLS_MIN
