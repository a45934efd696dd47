"""The work of the agent behind every replica: so many pieces, one after the other. A piece says whose run made it."""

from __future__ import annotations

from typing import Final

PIECES: Final = 6
PACE_S: Final = 0.4
RUN_S: Final = PIECES * PACE_S


def piece(replica: str, number: int) -> str:
    return f"{replica}{number}"


def heard(replica: str, said: str) -> str:
    return f"{replica} heard: {said}"
