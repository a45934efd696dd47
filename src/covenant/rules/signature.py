"""What the realm's key signs, and whether it did: grants, and the ends of the chain. (Contract 26, 28.)

What is signed is a domain tag and the thing itself, a grant as canonical JSON (RFC 8785), so that a reader in any
language can check it with the public key alone.
"""

from __future__ import annotations

from typing import Final

import msgspec
import rfc8785
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from covenant.model.agent import from_base58
from covenant.model.peer import Capability

_CAPABILITY: Final = b"covenant.capability.v1\n"
_HEAD: Final = b"covenant.journal-head.v1\n"


def capability_bytes(capability: Capability) -> bytes:
    return _CAPABILITY + rfc8785.dumps(msgspec.to_builtins(capability))


def head_bytes(seq: int, mark: str) -> bytes:
    return _HEAD + f"{seq}\n{mark}".encode()


def is_signed(pubkey: str, signature: str, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(from_base58(pubkey)).verify(from_base58(signature), data)
    except (InvalidSignature, ValueError):
        return False
    return True
