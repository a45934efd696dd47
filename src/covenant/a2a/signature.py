"""Whether a card was signed by somebody one knows: a JWS over its canonical form, with the payload left out.

Signers do not agree on which members that say nothing belong to that form. None of them changes what a card says, so
each of the forms is tried.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import rfc8785
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from covenant.a2a.fault import BAD_AGENT, Fault
from covenant.model.agent import from_base58

PublicKey: TypeAlias = str | Ed25519PublicKey | EllipticCurvePublicKey | RSAPublicKey
_REQUIRED: Final = ("name", "description", "version", "defaultInputModes", "defaultOutputModes", "skills")
_COORDINATE_BYTES: Final = 32


def check_signed(card: dict[str, Any], keys: Sequence[PublicKey]) -> None:
    """Raise unless one of these keys has signed the card. A key as text is Ed25519 in base58."""
    known = [_loaded(key) for key in keys]
    found = card.get("signatures")
    forms = list(_forms(card))
    for signature in found if isinstance(found, list) else []:
        if isinstance(signature, dict) and any(_is_good(signature, form, key) for form in forms for key in known):
            return
    raise Fault(BAD_AGENT, "the card is signed by none of the keys that were given")


def _loaded(key: PublicKey) -> Any:
    return Ed25519PublicKey.from_public_bytes(from_base58(key)) if isinstance(key, str) else key


def _is_good(signature: dict[str, Any], form: bytes, key: Any) -> bool:
    protected, signed = signature.get("protected"), signature.get("signature")
    if not isinstance(protected, str) or not isinstance(signed, str):
        return False
    try:
        header = msgspec.json.decode(_from_b64(protected))
        algorithm = header.get("alg") if isinstance(header, dict) else None
        _verify(algorithm, key, _from_b64(signed), f"{protected}.{_b64(form)}".encode())
    except (InvalidSignature, msgspec.MsgspecError, binascii.Error, ValueError):
        return False
    return True


def _verify(algorithm: Any, key: Any, signature: bytes, data: bytes) -> None:
    """The kind of key decides; a header that says otherwise is wrong."""
    if algorithm == "EdDSA" and isinstance(key, Ed25519PublicKey):
        key.verify(signature, data)
    elif algorithm == "ES256" and isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        if len(signature) != 2 * _COORDINATE_BYTES:
            raise InvalidSignature
        r, s = (int.from_bytes(half, "big") for half in (signature[:_COORDINATE_BYTES], signature[_COORDINATE_BYTES:]))
        key.verify(encode_dss_signature(r, s), data, ECDSA(SHA256()))
    elif algorithm == "RS256" and isinstance(key, RSAPublicKey):
        key.verify(signature, data, padding.PKCS1v15(), SHA256())
    else:
        raise InvalidSignature


def _forms(card: dict[str, Any]) -> Iterator[bytes]:
    """As it was served; without what is empty; without what says nothing, except what must be there."""
    plain = {name: value for name, value in card.items() if name != "signatures"}
    said = {name: _pruned(value) for name, value in plain.items() if name in _REQUIRED or _says(value)}
    for form in (plain, _filled(plain), said):
        try:
            yield rfc8785.dumps(form)
        except (rfc8785.CanonicalizationError, RecursionError):
            raise Fault(BAD_AGENT, "the card has no canonical form") from None


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        inner = {name: _filled(member) for name, member in value.items()}
        return {name: member for name, member in inner.items() if _is_filled(member)}
    if isinstance(value, list):
        return [member for member in map(_filled, value) if _is_filled(member)]
    return value


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _pruned(member) for name, member in value.items() if _says(member)}
    return [_pruned(member) for member in value] if isinstance(value, list) else value


def _is_filled(value: Any) -> bool:
    return value is not None and value not in ("", [], {})


def _says(value: Any) -> bool:
    return _is_filled(value) and value not in (False, 0)


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_b64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
