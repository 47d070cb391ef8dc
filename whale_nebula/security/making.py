"""Build certificates: the fields of an authority's and of a process's certificate. No files here.

Keys are P-256: the TLS of gRPC speaks these by default, and Ed25519 it does not. A certificate is valid from five
minutes ago, for hosts whose clocks are a little behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from whale_nebula.security.identity import Identity, run_uri

SKEW = timedelta(minutes=5)
_CURVE = ec.SECP256R1()


def now() -> datetime:
    """The present, to the second, as certificates count."""
    return datetime.now(UTC).replace(microsecond=0)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A fresh private key."""
    return ec.generate_private_key(_CURVE)


def key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM, without a passphrase: its file's mode is what guards it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_bytes(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def authority_certificate(run: str, key: ec.EllipticCurvePrivateKey, until: datetime, at: datetime) -> x509.Certificate:
    """The certificate of a run's authority. It signs processes and nothing else: no authority stands below it."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"whale_nebula {run}")])
    uri = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(run_uri(run))])
    key_identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return _sign((name, name), key.public_key(), key, (until, at), [uri, key_identifier], signs_certificates=True)


def process_certificate(
    identity: Identity,
    public: ec.EllipticCurvePublicKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    until: datetime,
    at: datetime,
) -> x509.Certificate:
    """The certificate of one process: client and server in one, as peers dial each other either way.

    Who it is stands in the alternative names; the common name is for people who look at it with other tools.
    """
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.worker)])
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns)])
    own = x509.SubjectKeyIdentifier.from_public_key(public)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return _sign((name, authority.subject), public, authority_key, (until, at), [uses, names, own, signer])


def _sign(
    names: tuple[x509.Name, x509.Name],
    public: ec.EllipticCurvePublicKey,
    key: ec.EllipticCurvePrivateKey,
    dates: tuple[datetime, datetime],
    extensions: Sequence[x509.ExtensionType],
    *,
    signs_certificates: bool = False,
) -> x509.Certificate:
    """A certificate with the names of its subject and issuer, until a date from a moment on."""
    usage = x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    (subject, issuer), (until, at) = names, dates
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - SKEW)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(signs_certificates, 0 if signs_certificates else None), critical=True)
        .add_extension(usage, critical=True)
    )
    for each in extensions:
        builder = builder.add_extension(each, critical=False)
    return builder.sign(key, hashes.SHA256())
