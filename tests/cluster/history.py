"""What a client did and what it was told: one step for each call, written by the client itself.

A checker that knows nothing but these steps decides whether the mailbox kept its promises. All clients of a run read
the same clock.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from msgspec import Struct


class Verb(StrEnum):
    SEND = "send"
    LEASE = "lease"
    BEAT = "beat"
    WRITE = "write"  # an artifact or a word on the way; `key` is its receipt
    PART = "part"
    POST = "post"
    RELEASE = "release"
    REQUEUE = "requeue"  # by the operator
    DRAIN = "drain"
    READ = "read"  # a result by its task
    EVENT = "event"  # of a stream; `stream` says which
    STANDING = "standing"  # still in the mailbox when all is over


class Outcome(StrEnum):
    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"  # it may have been done, or be done yet


class Step(Struct, frozen=True, kw_only=True, omit_defaults=True):
    client: str
    verb: Verb
    began: float
    ended: float
    outcome: Outcome = Outcome.DONE
    daemon: int = 0
    task: str = ""
    lease: str = ""
    attempt: int = 0
    generation: int = 0
    text: str = ""
    key: str = ""  # of a send: what makes it the same work; of a write: its receipt
    stream: str = ""
    code: str = ""
    duplicate: bool = False  # it was said before, and the answer may be that to the first time
    is_last: bool = False  # a final result, or the end of a stream


class History:
    """Of one client."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.steps: list[Step] = []

    def note(self, verb: Verb, began: float, **facts: Any) -> None:
        self.steps.append(Step(client=self.client, verb=verb, began=began, ended=monotonic(), **facts))


def keep(steps: list[Step], file: Path) -> None:
    """For whoever wants to know what went before."""
    encoder = msgspec.json.Encoder()
    file.write_bytes(b"".join(encoder.encode(step) + b"\n" for step in steps))
