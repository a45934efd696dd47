"""What the signature of a card covers, and whether somebody one knows has signed it: a JWS over the card's canonical
form, with the payload left out.

Signers do not agree on which members that say nothing belong to that form. None of those changes what a card says, so
the card as it was served is tried as well.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
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
from covenant.model.card import REQUIRED, Description
from covenant.model.error import Malformed

PublicKey: TypeAlias = str | Ed25519PublicKey | EllipticCurvePublicKey | RSAPublicKey
_COORDINATE_BYTES: Final = 32
_NOT_SIGNED: Final = ("signatures", "extended")
_REQUIRED: Final[Mapping[str, frozenset[str]]] = {  # by the member that the object stands in; the card in none
    "": frozenset((*REQUIRED, "capabilities", "supportedInterfaces")),
    "provider": frozenset(("url", "organization")),
    "skills": frozenset(("id", "name", "description", "tags")),
    "supportedInterfaces": frozenset(("url", "protocolBinding", "protocolVersion")),
}
_NONE: Final[Mapping[str, frozenset[str]]] = {}
_SAID_ANYWAY: Final = frozenset(("streaming", "pushNotifications", "extendedAgentCard"))  # `false` says something


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
    if not isinstance(key, str):
        return key
    try:
        return Ed25519PublicKey.from_public_bytes(from_base58(key))
    except ValueError:
        raise Malformed("a key as text is 32 bytes in base58", field="keys") from None


def _is_good(signature: dict[str, Any], form: bytes, key: Any) -> bool:
    protected, signed = signature.get("protected"), signature.get("signature")
    if not isinstance(protected, str) or not isinstance(signed, str):
        return False
    try:
        header = msgspec.json.decode(_from_b64(protected))
        algorithm = header.get("alg") if isinstance(header, dict) else None
        _verify(algorithm, key, _from_b64(signed), f"{protected}.{b64(form)}".encode())
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
    """As the protocol says; the same by a signer that knows more of it than we do; and as it was served."""
    for form in (payloads_of, _told, _served):
        try:
            yield from form(card)
        except msgspec.ValidationError:
            continue  # no card of the protocol that we know
        except (rfc8785.CanonicalizationError, RecursionError):
            raise Fault(BAD_AGENT, "the card has no canonical form") from None


def _served(card: dict[str, Any]) -> list[bytes]:
    return [rfc8785.dumps({name: value for name, value in card.items() if name != "signatures"})]


def _told(card: dict[str, Any]) -> list[bytes]:
    """Return the JSON that verifiers check, the specification's form first; for most cards they are all the same.

    The specification keeps a required member that is empty (8.4.1). The official SDK leaves it out, and also what is
    empty among the parameters of an extension.
    """
    signed = {name: value for name, value in card.items() if name not in _NOT_SIGNED}
    told = _telling("", signed)
    forms = (_telling("", signed, _REQUIRED), told, _swept(told))
    return list(dict.fromkeys(rfc8785.dumps(form) for form in forms))


def payloads_of(card: dict[str, Any]) -> list[bytes]:
    """What a signature covers: what the protocol knows of the card, without its signatures and without members that say
    nothing. A verifier that reads the card by the protocol does not see the rest, wherever in the card it stands.
    Verifiers do not agree on what says nothing, so there may be several."""
    return _told(msgspec.to_builtins(msgspec.convert(card, Description)))


def _swept(value: Any) -> Any:
    """Without anything that is empty; no and zero are not."""
    if isinstance(value, dict):
        return {name: kept for name, held in value.items() if (kept := _swept(held)) is not None} or None
    if isinstance(value, list):
        return [kept for held in value if (kept := _swept(held)) is not None] or None
    return None if value == "" else value


def _telling(name: str, value: Any, required: Mapping[str, frozenset[str]] = _NONE) -> Any:
    """Return the value of the member `name` without empty members that are not required, or None if it is empty."""
    if name == "params":
        return value  # free-form, of an extension: there everything says something
    if isinstance(value, dict):
        stays = required.get(name, frozenset())
        inner = {member: _telling(member, held, required) for member, held in value.items()}
        for member in stays:
            if inner.get(member) is None and value.get(member) is not None:
                inner[member] = type(value[member])()  # of its kind, and empty
        return {member: told for member, told in inner.items() if told is not None} or None
    if isinstance(value, list):
        return [told for held in value if (told := _telling(name, held, required)) is not None] or None
    return value if value or name in _SAID_ANYWAY else None


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_b64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
