"""Certificates as they are read: who, until when, signed by whom. What does not read is refused in words.

Certificates come from strangers, and the library that parses them raises many kinds of errors, some of them only when
a part is looked at. So `certificate` looks at every part that is used later, and whatever is wrong with one of them
is a `CredentialsError`: a certificate that was read can be compared, shown and verified without further care.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from whale_nebula.errors import CredentialsError, IdentityError, WrongNameError
from whale_nebula.security.identity import Identity, run_of

SIGNATURE = ec.ECDSA(hashes.SHA256())
"""How all signatures of ours are made."""


class Peer(NamedTuple):
    """Who a certificate says somebody is; `fingerprint` is the SHA-256 of the whole certificate, `key` of its key."""

    identity: Identity
    serial: str
    not_before: datetime
    not_after: datetime
    fingerprint: str
    key: str


UNREADABLE = (
    ValueError,  # of text that is not UTF-8, too
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    Warning,  # of what the library takes for now, where warnings are errors
)
"""What the library raises for bytes that are no certificate, or one that it does not understand."""


@contextlib.contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Turn what the library raises about a certificate into a `CredentialsError`."""
    try:
        yield
    except UNREADABLE:
        raise CredentialsError("this is no certificate", where=where, mend="whale-nebula certs show") from None


def certificates(pem: bytes, where: str) -> list[x509.Certificate]:
    """All certificates in a PEM file."""
    with _refusing(where):
        found = x509.load_pem_x509_certificates(pem)
        for each in found:
            _look_at_all(each)
        return found


def certificate(pem: bytes | str, where: str) -> x509.Certificate:
    """The first certificate in PEM text: the one of the process itself."""
    with _refusing(where):
        found = x509.load_pem_x509_certificate(pem.encode() if isinstance(pem, str) else pem)
        _look_at_all(found)
        return found


def _look_at_all(found: x509.Certificate) -> None:
    """Parse the parts that the library parses only when they are asked for. Extensions may be malformed: see there."""
    _ = found.version, found.serial_number, found.not_valid_before_utc, found.not_valid_after_utc
    found.subject.rfc4514_string()
    found.issuer.rfc4514_string()
    found.public_key()


def public_key_digest(found: x509.Certificate) -> str:
    """The SHA-256 of the public key of a certificate: renewed certificates have the same."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(
        found.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return digest.finalize().hex()


def plain(text: str) -> str:
    r"""A stranger's text on one line of ASCII.

    >>> plain("a\nb")
    'a\\nb'
    """
    return ascii(text[:200])[1:-1]


def private_key(pem: bytes, where: str) -> ec.EllipticCurvePrivateKey:
    """A private key, which must be of the kind that we make."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except UNREADABLE:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CredentialsError("this is no P-256 private key", where=where, mend="whale-nebula certs issue makes one")
    return key


def peer(found: x509.Certificate) -> Peer:
    """Who a certificate says somebody is."""
    return Peer(
        _identity(found),
        serial(found),
        found.not_valid_before_utc,
        found.not_valid_after_utc,
        found.fingerprint(hashes.SHA256()).hex(),
        public_key_digest(found),
    )


def serial(found: x509.Certificate) -> str:
    """The serial number as `certs show` writes it."""
    return f"{found.serial_number:040x}"


def _identity(found: x509.Certificate) -> Identity:
    uris = alternative_names(found)
    if len(uris) != 1:
        raise WrongNameError(
            f"a certificate that names {len(uris)} identities", why="one of ours names one: nebula://<run>/..."
        )
    try:
        identity = Identity.parse(uris[0])
    except IdentityError as error:
        raise WrongNameError(error.what, mend=error.mend) from None
    if identity.dns not in alternative_names(found, x509.DNSName):
        raise WrongNameError(f"the certificate of {identity.worker} lacks the host name {identity.dns}")
    return identity


def authority_run(found: x509.Certificate) -> str | None:
    """The run of an authority's certificate."""
    runs = [run_of(uri) for uri in alternative_names(found)]
    return runs[0] if len(runs) == 1 else None


Kind = type[x509.UniformResourceIdentifier] | type[x509.DNSName]


def alternative_names(found: x509.Certificate, kind: Kind = x509.UniformResourceIdentifier) -> list[str]:
    """The names of one kind in a certificate; one that is malformed has none."""
    names = extension(found, x509.SubjectAlternativeName)
    return [] if names is None else [str(each) for each in names.get_values_for_type(kind)]


Extension = TypeVar("Extension", bound=x509.ExtensionType)


def extension(found: x509.Certificate, kind: type[Extension]) -> Extension | None:
    """An extension of a certificate; None where there is none, or one that is malformed."""
    try:
        return found.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, *UNREADABLE):
        return None


def signed_by(found: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether an authority's key signed a certificate."""
    try:
        found.verify_directly_issued_by(authority)
    except (InvalidSignature, *UNREADABLE):
        return False
    return True


def verify_signature(shown: x509.Certificate, signature: bytes, message: bytes) -> bool:
    """Whether the key of a certificate made a signature."""
    key = shown.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, message, SIGNATURE)
    except (InvalidSignature, *UNREADABLE):
        return False
    return True
