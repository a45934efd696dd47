"""Which versions of the A2A protocol are spoken. (Specification 3.6.)"""

from __future__ import annotations

from typing import Final

import pytest

from covenant.rules.dialect import VERSIONS, spoken

SPOKEN: Final = {"1.0": "1.0", "1.0.0": "1.0", "1.0.1": "1.0", "1.0.27": "1.0", "1.1": "1.1", "1.1.0": "1.1"}
REFUSED: Final = (
    *("0.3", "0.3.0", "0.5", "1.2", "2.0", "10.0", "99.0"),
    *("1", "1.", ".1", "1.0.", "1.0.x", "1.0.1.1", "v1.0", "1,0", "1.0-beta", "01.0", "1.00", "+1.0", "1.0 1.0"),
    *("\uff11.\uff10", "1.0\n", " 1.0", "one", "1.0.1234567890", "9" * 5_000),
)


@pytest.mark.parametrize("said", SPOKEN)
def test_a_patch_number_does_not_count(said: str) -> None:
    assert spoken(said) == SPOKEN[said]
    assert SPOKEN[said] in VERSIONS


@pytest.mark.parametrize("said", [*REFUSED, "", None], ids=ascii)
def test_another_version_and_what_is_none_are_not_spoken(said: str | None) -> None:
    assert spoken(said) is None
