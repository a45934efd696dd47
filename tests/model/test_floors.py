"""The floor under assertions that a test makes only sometimes: see tests/floors.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.floors import reached, reaches


def test_a_floor_that_is_reached_is_no_failure() -> None:
    with reaches(even=5, odd=5):
        for number in range(10):
            reached("odd" if number % 2 else "even")


def test_an_assertion_that_is_reached_too_rarely_is_a_failure() -> None:
    with pytest.raises(AssertionError, match=r"'rare': \(1, 2\)"), reaches(rare=2):
        reached("rare")


def test_what_is_counted_has_a_floor() -> None:
    with pytest.raises(AssertionError, match="without a floor"), reaches():
        reached("nobody asked")


def test_a_failure_inside_is_told_and_not_the_floor() -> None:
    with pytest.raises(ZeroDivisionError), reaches(never=1):
        raise ZeroDivisionError


def test_a_property_is_counted_over_all_its_examples_in_each_run() -> None:
    @reaches(any=20)
    @given(st.integers())
    def prop(number: int) -> None:
        reached("any")

    @reaches(zero=2)
    @given(st.just(0))
    def once(number: int) -> None:
        reached("zero")

    for _ in range(2):
        prop()
        with pytest.raises(AssertionError, match="too rarely"):
            once()
