"""The processes that have a store open, or had it."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class DaemonState(StrEnum):
    ALIVE = "alive"
    ENDED = "ended"  # it said so
    SILENT = "silent"  # it gave no sign of life for long, and is taken for dead


class DaemonView(Struct, frozen=True):
    """`pubkey` is its own key, by which it signs; whoever opens a store without one has none."""

    id: str
    pubkey: str
    label: str
    started_ms: int
    seen_ms: int
    state: DaemonState
    lanes: int
    ended_ms: int | None = None
