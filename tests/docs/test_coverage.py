"""The table of coverage names tests that exist, and every point of the contract has some."""

from __future__ import annotations

import re
from collections import Counter

from tests.docs.support import ROOT, names_in, names_of_tests, page, prose, rows

POINTS = (*range(1, 30), 32, 34)  # 30, 31 and 33 are not built yet
DELIVERY = range(1, 14)  # what the suite that runs on every engine is about


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", prose(page("coverage.md"))))
    assert named
    assert named - names_of_tests() == set()


def test_every_point_of_the_contract_has_a_test() -> None:
    told = {row[0]: names_in(row[2]) for row in rows(page("coverage.md")) if row[0].isdigit()}
    assert list(told) == [str(point) for point in POINTS]
    assert [point for point, names in told.items() if not names] == []


def test_every_weakness_has_a_test() -> None:
    weaknesses = [row for row in rows(page("coverage.md")) if len(row) == 3 and not row[0].isdigit()]
    bare = [row[0] for row in weaknesses if not any(name.startswith("test_") for name in names_in(row[2]))]
    assert bare == ["point", "---", "weakness", "---"]


def test_the_conformance_suite_names_every_point() -> None:
    suite = (ROOT / "tests" / "conformance").glob("test_*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in suite)
    covered = {int(number) for number in re.findall(r'"""Contract (\d+):', text)}
    assert covered >= set(DELIVERY)


def test_each_point_is_named_by_some_of_its_tests() -> None:
    """The tests of a rule are found by the number of its point."""
    files = (ROOT / "tests").rglob("test_*.py")
    told = re.findall(r'"""Contract ([0-9, -]+)', "\n".join(path.read_text(encoding="utf-8") for path in files))
    named = Counter(int(number) for numbers in told for number in re.findall(r"\d+", numbers))
    assert [point for point in POINTS if named[point] < 4] == []
