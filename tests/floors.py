"""A floor under an assertion that a test makes only sometimes.

A property whose assertion stands under an `if` proves nothing when the `if` is never true. It says how often it must
get there, and counts:

    @reaches(refused=100)
    @given(...)
    def test_a_wider_grant_is_refused(...) -> None:
        if is_wider(...):
            reached("refused")
            assert ...

`with reaches(refused=100): ...` does the same for a loop, an inner function or an async test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_counts: list[Counter[str]] = []  # of the blocks that are open, the innermost last


def reached(name: str = "it") -> None:
    """Count one arrival at the assertion of this name."""
    _counts[-1][name] += 1


@contextmanager
def reaches(**floors: int) -> Iterator[None]:
    """Fail at the end of the block if an assertion was reached less often than its floor."""
    counts: Counter[str] = Counter()
    _counts.append(counts)
    try:
        yield
    finally:
        _counts.pop()
    assert set(counts) <= set(floors), f"counted without a floor: {sorted(set(counts) - set(floors))}"
    missed = {name: (counts[name], floor) for name, floor in floors.items() if counts[name] < floor}
    assert not missed, f"reached too rarely (name: times, floor): {missed}"
