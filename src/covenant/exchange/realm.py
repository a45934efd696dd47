"""The realm: one Ed25519 key, in whose name grants and the ends of the audit chain are signed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from covenant.model.agent import AgentId, base58
from covenant.model.error import UnsafeFile
from covenant.model.peer import Capability, Grant
from covenant.rules.signature import capability_bytes, head_bytes, is_signed

OPERATOR_DISPLAY: Final = "operator@local"
_KEY_BYTES: Final = 32
_VERIFIED_MAX: Final = 200_000


class Realm:
    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        raw = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.pubkey = base58(raw)
        self.operator = AgentId(OPERATOR_DISPLAY, self.pubkey)
        self.keys: Callable[[], Collection[str]] = lambda: (self.pubkey,)  # whose signatures are good
        self._verified: dict[str, str] = {}  # grants whose signature was found good, by id

    @classmethod
    def throwaway(cls) -> Realm:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def at(cls, path: Path) -> Realm:
        """The key in this file, made if there is none."""
        if not path.exists():
            made = Ed25519PrivateKey.generate()
            write_secret(path, made.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption()))
        raw = read_secret(path)
        if len(raw) != _KEY_BYTES:
            raise UnsafeFile(f"{path} does not hold a key of {_KEY_BYTES} bytes", file=str(path))
        return cls(Ed25519PrivateKey.from_private_bytes(raw))

    # --- grants -------------------------------------------------------------------------------------------

    def sign_grant(self, capability: Capability) -> Grant:
        return Grant(capability, base58(self._key.sign(capability_bytes(capability))))

    def is_genuine(self, grant: Grant) -> bool:
        """Whether this realm signed it, by the key of any of its daemons. Looked at once for each grant."""
        known = self._verified.get(grant.capability.id)
        if known == grant.signature:
            return True
        signed = capability_bytes(grant.capability)
        if not any(is_signed(key, grant.signature, signed) for key in self.keys()):
            return False
        if len(self._verified) >= _VERIFIED_MAX:
            self._verified.clear()
        self._verified[grant.capability.id] = grant.signature
        return True

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)

    # --- heads --------------------------------------------------------------------------------------------

    def sign_head(self, seq: int, mark: str) -> str:
        return base58(self._key.sign(head_bytes(seq, mark)))


def random_key() -> str:
    """The public half of a key that nobody keeps."""
    return Realm.throwaway().pubkey


def write_secret(path: Path, data: bytes) -> None:
    """A file that only its owner reads, whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    making = path.with_name(f"{path.name}.making")
    making.unlink(missing_ok=True)
    fd = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
    move_secret(making, path)


def move_secret(made: Path, path: Path) -> None:
    os.rename(made, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_secret(path: Path) -> bytes:
    """Refused when others could have read it."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_mode & 0o077:
            raise UnsafeFile(f"{path} can be read by others: chmod 600 {path}", file=str(path))
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
