"""What tests of effort count."""

from __future__ import annotations

from typing import Any

import pytest

from covenant.rules import query as rules
from covenant.store.postgres import reader


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often a question was gone over."""
    gone_over: list[None] = []
    answer = rules.answer

    def noted(*args: Any) -> Any:
        gone_over.append(None)
        return answer(*args)

    monkeypatch.setattr(reader, "answer", noted)
    return gone_over
