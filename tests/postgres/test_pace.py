"""Who shares an append with whom: by what an append and a command take, and not by how many they are."""

from __future__ import annotations

import pytest

from covenant.store.postgres.pace import Pace


def kept(append_s: float, command_s: float, crowd: int, appends: int = 100) -> Pace:
    pace = Pace()
    for _ in range(appends):
        pace.appended(append_s, command_s * crowd, crowd, crowd)
    return pace


def test_nothing_is_waited_for_before_anything_is_known() -> None:
    assert (Pace().is_halved, Pace().share) == (False, 0)


@pytest.mark.parametrize("crowd", [2, 8, 32, 128])
def test_an_append_that_takes_longer_than_to_decide_for_all_is_shared_by_all(crowd: int) -> None:
    pace = kept(append_s=1.01 * 0.001 * crowd, command_s=0.001, crowd=crowd)
    assert (pace.is_halved, pace.share) == (False, crowd)


@pytest.mark.parametrize("crowd", [2, 8, 32, 128])
def test_a_faster_one_is_shared_by_half_of_them(crowd: int) -> None:
    pace = kept(append_s=0.99 * 0.001 * crowd, command_s=0.001, crowd=crowd)
    assert (pace.is_halved, pace.share) == (True, crowd // 2)


def test_one_alone_is_not_halved() -> None:
    pace = kept(append_s=0.0, command_s=0.001, crowd=1)
    assert (pace.is_halved, pace.share) == (False, 1)


def test_one_slow_append_changes_nothing_and_many_do() -> None:
    pace = kept(append_s=0.008, command_s=0.001, crowd=10)
    pace.appended(10.0, 0.01, 10, 10)
    assert pace.is_halved
    for _ in range(10):
        pace.appended(0.02, 0.01, 10, 10)
    assert not pace.is_halved
    for _ in range(30):
        pace.appended(0.005, 0.01, 10, 10)
    assert pace.is_halved


def test_an_append_in_which_nothing_was_asked_for_tells_nothing_of_commands() -> None:
    pace = kept(append_s=0.004, command_s=0.001, crowd=8)
    pace.appended(0.004, 1.0, 0, 4)
    assert (pace.is_halved, pace.share) == (True, 2)
