"""Certificates as they are read: who, until when, signed by whom. What does not read is refused in words."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from whale_nebula.errors import CredentialsError, IdentityError, WrongNameError
from whale_nebula.security.identity import Identity, run_of


class Peer(NamedTuple):
    """Who a certificate says somebody is; `fingerprint` is the SHA-256 of the whole certificate."""

    identity: Identity
    serial: str
    not_before: datetime
    not_after: datetime
    fingerprint: str


def certificates(pem: bytes, where: str) -> list[x509.Certificate]:
    """All certificates in a PEM file."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise CredentialsError("this is no certificate", where=where, mend="whale-nebula certs show") from None


def certificate(pem: bytes | str, where: str) -> x509.Certificate:
    """The first certificate in PEM text: the one of the process itself."""
    return certificates(pem.encode() if isinstance(pem, str) else pem, where)[0]


def private_key(pem: bytes, where: str) -> ec.EllipticCurvePrivateKey:
    """A private key, which must be of the kind that we make."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
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
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return []
    return [str(each) for each in names.get_values_for_type(kind)]


def signed_by(found: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether an authority's key signed a certificate."""
    try:
        found.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
