"""Who acts: an agent is its key, `display` is its label.

Two agents are the same when their keys are the same; nothing else is compared anywhere. An agent named only by its
label gets a key derived from that label: in a folder or in memory, where nobody is enrolled, that is its key; a daemon
takes it for whoever was enrolled under the label.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Final

from msgspec import Struct
from msgspec.structs import force_setattr

from covenant.model.error import BadAgent

_DISPLAY: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}@[A-Za-z0-9_.-]{1,128}")
_CHARS_MAX: Final = 257  # of a label; a key has fewer
_SHOWN_MAX: Final = 64  # of a label that is none
_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58: Final = re.compile(f"[{_ALPHABET}]{{32,44}}")
_LABEL_KEY_DOMAIN: Final = b"covenant.label-key.v1:"
_DEFAULT_HOST: Final = "local"


class AgentId(Struct, frozen=True, gc=False, eq=False):
    """`{"display": "<local>@<host>", "pubkey": "<base58 of 32 bytes>"}`; without a key, the agent of the label."""

    display: str
    pubkey: str = ""

    def __post_init__(self) -> None:
        if type(self.display) is not str:
            return
        if "@" not in self.display:
            force_setattr(self, "display", _full(self.display))
        if self.pubkey == "" and _DISPLAY.fullmatch(self.display):
            force_setattr(self, "pubkey", _named(self.display).pubkey)

    @classmethod
    def named(cls, label: str) -> AgentId:
        """The agent of a label, with the key that the label stands for where nobody is enrolled."""
        if type(label) is not str:
            raise BadAgent("an agent is named by text", label=repr(label))
        return _named(label)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AgentId) and self.pubkey == other.pubkey

    def __ne__(self, other: object) -> bool:
        return not self == other  # a Struct's own would compare identities

    def __hash__(self) -> int:
        return hash(self.pubkey)

    def __str__(self) -> str:
        return self.display


def _full(label: str) -> str:
    return label if "@" in label else f"{label}@{_DEFAULT_HOST}"


def full_label(label: str) -> str:
    """Return the label with its host: `bob` is `bob@local`. Raises BadAgent if it is no label.

    Nothing is cached, so that the time of a call does not show which labels are in use.
    """
    display = _full(label)
    if not _DISPLAY.fullmatch(display):
        shown = repr(label if len(label) <= _SHOWN_MAX else f"{label[:_SHOWN_MAX]}…")
        why = f"{shown} is no name of an agent: bob, or bob@lab, of letters, digits, `_`, `.` and `-`"
        raise BadAgent(why, label=repr(label))
    return display


@lru_cache(maxsize=4096)
def _named(label: str) -> AgentId:
    display = full_label(label)
    agent = AgentId(display, base58(hashlib.sha256(_LABEL_KEY_DOMAIN + display.encode()).digest()))
    check_agent(agent)
    return agent


@lru_cache(maxsize=65536)
def _is_sound(display: str, pubkey: str) -> bool:
    return bool(_DISPLAY.fullmatch(display) and is_key(pubkey))


def check_agent(agent: object, field: str = "agent") -> None:
    """Raise unless `agent` is an AgentId with a well-formed label and a key of 32 bytes."""
    if type(agent) is not AgentId or type(agent.display) is not str or type(agent.pubkey) is not str:
        raise BadAgent(f"{field} is not an AgentId, such as AgentId('bob@lab')", field=field)
    is_long = len(agent.display) > _CHARS_MAX or len(agent.pubkey) > _CHARS_MAX  # that is not worth to be remembered
    if is_long or not _is_sound(agent.display, agent.pubkey):
        raise BadAgent(f"{field} needs a display like name@host and a base58 key of 32 bytes", field=field)


def is_key(text: str) -> bool:
    return bool(_BASE58.fullmatch(text)) and len(from_base58(text)) == 32


def base58(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    digits = ""
    while number:
        number, rest = divmod(number, 58)
        digits = _ALPHABET[rest] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits


def from_base58(text: str) -> bytes:
    """Raises ValueError for what is no base58."""
    number = 0
    for char in text:
        number = number * 58 + _ALPHABET.index(char)
    return b"\0" * (len(text) - len(text.lstrip("1"))) + number.to_bytes((number.bit_length() + 7) // 8, "big")
