"""What is asked of a receive: how long it waits, and of which sort what it took must be."""

from __future__ import annotations

from typing import Any, TypeVar

from covenant.model.error import Malformed
from covenant.rules.envelope import check_count

T = TypeVar("T")


def wait_of(wait_ms: int) -> int:
    return check_count(wait_ms, "wait_ms", 2**31)


def of_kind(kind: type[T], taken: list[Any]) -> list[T]:
    """Under a receipt there may be what another sort of receive has taken."""
    if taken and not isinstance(taken[0], kind):
        raise Malformed("this receipt is of another receive", field="receipt")
    return taken
