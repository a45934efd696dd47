"""Negotiation of the version of the A2A protocol. (Specification 3.6.)"""

from __future__ import annotations

from typing import Final

import pytest
from tests.a2a.stage import ADA, Stage

from covenant.model import command as c
from covenant.model.error import CovenantError
from covenant.model.push import PushConfig
from covenant.rules.dialect import VERSIONS, negotiated

SPOKEN: Final = {"1.0": "1.0", "1.0.0": "1.0", "1.0.1": "1.0", "1.0.27": "1.0", "1.1": "1.1", "1.1.0": "1.1"}
REFUSED: Final = (
    *("0.3", "0.3.0", "0.5", "1.2", "2.0", "10.0", "99.0"),
    *("1", "1.", ".1", "1.0.", "1.0.x", "1.0.1.1", "v1.0", "1,0", "1.0-beta", "01.0", "1.00", "+1.0", "1.0 1.0"),
    *("\uff11.\uff10", "1.0\n", " 1.0", "one", "1.0.1234567890", "9" * 5_000),
)


@pytest.mark.parametrize("said", SPOKEN)
def test_a_patch_number_does_not_count(said: str) -> None:
    assert negotiated(said) == SPOKEN[said]
    assert SPOKEN[said] in VERSIONS


@pytest.mark.parametrize("said", [*REFUSED, "", None], ids=ascii)
def test_another_version_and_what_is_none_are_not_spoken(said: str | None) -> None:
    assert negotiated(said) is None


@pytest.mark.parametrize(("said", "told_in"), [("1.0", "1.0"), ("1.0.1", "1.0"), ("1.1.0", "1.1"), (None, None)])
def test_a_webhook_is_told_in_the_version_whatever_its_patch_number(said: str | None, told_in: str | None) -> None:
    stage = Stage()
    task_id = stage.send()
    hook = PushConfig(id="h-1", url="https://example.com/hook", protocol_version=said)
    stage.run(c.SetPush(ADA, task_id, hook))
    (push,) = stage.state.pushes(task_id)
    assert push.config.protocol_version == told_in


@pytest.mark.parametrize("said", ["0.3", "1.0.x", "2.0", ""])
def test_a_webhook_is_not_told_in_a_version_that_is_not_spoken(said: str) -> None:
    stage = Stage()
    task_id = stage.send()
    hook = PushConfig(id="h-1", url="https://example.com/hook", protocol_version=said)
    with pytest.raises(CovenantError) as refusal:
        stage.run(c.SetPush(ADA, task_id, hook))
    assert refusal.value.details["field"] == "protocolVersion"
