"""A run's certificate authority: the certificates that it signs, and the folder with its own certificate and key.

    certs/              0700
      ca.pem            its certificate: copied to every host
      ca.key            its key, 0600: never copied
      authority.json    the clusters, if they are restricted
      revoked.json      the deny list: copied to every host
      issued/           every issued certificate, by its serial number
      gpu-worker-0.pem  a worker's certificate and key: copied to its host
      gpu-worker-0.key

The folder is on one host. The authority has no other state.

Keys are P-256, as gRPC's TLS does not support Ed25519 by default. The validity of a certificate begins five minutes
before it is issued, for hosts whose clocks are slightly behind.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from whale_nebula.config.schema import Config
from whale_nebula.errors import CredentialsError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.security import files, trust
from whale_nebula.security.allowance import ALLOWANCE_OID, UNLIMITED, Allowance
from whale_nebula.security.identity import GATEWAY, WORKER, Identity, check_name, cluster_uri, run_uri
from whale_nebula.security.trust import check_dates

SKEW = timedelta(minutes=5)
_CURVE = ec.SECP256R1()


def make_key() -> ec.EllipticCurvePrivateKey:
    """A new private key."""
    return ec.generate_private_key(_CURVE)


def encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM, without a passphrase: the file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def encode_certificate(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def make_authority_certificate(
    run: str, key: ec.EllipticCurvePrivateKey, until: datetime, at: datetime, bound: Sequence[str] = ()
) -> x509.Certificate:
    """The certificate of a run's authority, or of one that is restricted to the clusters in `bound`. It signs
    certificates of processes only: there are no intermediate authorities.
    """
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, " ".join(["whale_nebula", run, *bound]))])
    names = [run_uri(run), *(cluster_uri(run, cluster) for cluster in bound)]
    uri = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(each) for each in names])
    key_identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return _build_certificate(
        (name, name), key.public_key(), key, (at, until), [uri, key_identifier], signs_certificates=True
    )


def make_process_certificate(
    identity: Identity,
    public: ec.EllipticCurvePublicKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    until: datetime,
    at: datetime,
    account: str = "",
    allowance: Allowance = UNLIMITED,
) -> x509.Certificate:
    """The certificate of one process, valid for client and server, as either peer may dial the other.

    The identity is in the alternative names; the common name is only displayed by other tools. The `account` that it
    was issued to is in the subject, and its limits are in an extension.
    """
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, identity.worker)]
    name = x509.Name([*parts, *[x509.NameAttribute(NameOID.USER_ID, account)] * bool(account)])
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns)])
    key_identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    limits = [x509.UnrecognizedExtension(ALLOWANCE_OID, allowance.encode())] * bool(allowance)
    return _build_certificate(
        (name, authority.subject), public, authority_key, (at, until), [uses, names, key_identifier, signer, *limits]
    )


def _build_certificate(
    names: tuple[x509.Name, x509.Name],
    public: ec.EllipticCurvePublicKey,
    key: ec.EllipticCurvePrivateKey,
    dates: tuple[datetime, datetime],
    extensions: Sequence[x509.ExtensionType],
    *,
    signs_certificates: bool = False,
) -> x509.Certificate:
    """A certificate with the names of its subject and issuer, valid between two dates: from `SKEW` before the first."""
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
    (subject, issuer), (at, until) = names, dates
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


CA, KEY, CLUSTERS_FILE, ISSUED = "ca.pem", "ca.key", "authority.json", "issued"
FORMAT = "whale_nebula authority 1"
AUTHORITY_DAYS = 90.0
MOST_DAYS = 3650.0

Clusters = Mapping[str, int]
"""The number of workers of each cluster."""


@dataclass(frozen=True)
class Authority:
    """A certificate authority: certificate and key. `clusters` is empty if the clusters are not restricted."""

    run: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    clusters: Clusters

    @classmethod
    def create(
        cls,
        run: str,
        clusters: Clusters,
        days: float = AUTHORITY_DAYS,
        at: datetime | None = None,
        bound: Sequence[str] = (),
    ) -> Authority:
        """A new authority, in memory; with `bound`, it issues certificates for these clusters only."""
        moment = at or files.now()
        key = make_key()
        for cluster in (*clusters, *bound):
            check_name(cluster, "cluster")
        return cls(
            run, make_authority_certificate(run, key, moment + check_lifetime(days), moment, bound), key, dict(clusters)
        )

    @property
    def bound(self) -> tuple[str, ...]:
        """The clusters that it may certify; empty if it may certify all."""
        return files.list_authority_clusters(self.certificate)

    def check(self, identity: Identity) -> None:
        """Check that the authority may certify an identity."""
        if identity.run != self.run:
            raise CredentialsError(f"the authority is for run {self.run!r}, not for run {identity.run!r}")
        if self.bound and identity.cluster not in self.bound:
            raise CredentialsError(
                f"the authority may certify {', '.join(self.bound)}, not {identity.cluster}",
                mend=f"ask the owner of {identity.cluster} to sign the request",
            )
        if not self.clusters:
            return
        if identity.cluster not in self.clusters:
            mend = did_you_mean(identity.cluster, self.clusters)
            raise CredentialsError(
                f"unknown cluster {identity.cluster!r}", mend=f"{mend} Otherwise, {_ADD_CLUSTER_FIX}"
            )
        workers = self.clusters[identity.cluster]
        if identity.role == WORKER and workers and identity.index >= workers:
            raise CredentialsError(
                f"cluster {identity.cluster!r} has no worker {identity.index}",
                why=f"its workers are {identity.cluster}/0 to {identity.cluster}/{workers - 1}",
                mend=_ADD_CLUSTER_FIX,
            )


_ADD_CLUSTER_FIX = "add it to clusters.yaml, and pass --config clusters.yaml"


def check_lifetime(days: float) -> timedelta:
    """The lifetime of a certificate of this many days, which must be above 0 and at most `MOST_DAYS`.

    >>> check_lifetime(0.5)
    datetime.timedelta(seconds=43200)
    """
    if not 0 < days <= MOST_DAYS:
        raise CredentialsError(
            f"{days:g} days is not a valid certificate lifetime",
            why=f"it must be above 0 and at most {MOST_DAYS:g} days",
            mend="--days 7",
        )
    return timedelta(seconds=round(days * 86400))


def count_workers(config: Config) -> Clusters:
    """The number of workers of each cluster in a config."""
    return {cluster.name: len(cluster.workers) for cluster in config.clusters.values()}


def list_identities(run: str, config: Config) -> list[Identity]:
    """All processes of a run that need a certificate: its workers and its gateways."""
    identities = []
    for cluster in config.clusters.values():
        identities += [Identity(run, cluster.name, WORKER, index) for index in range(len(cluster.workers))]
        identities += [Identity(run, cluster.name, GATEWAY)] * (cluster.gateway is not None)
    return identities


# ---------------------------------------------------------------------- the folder
def create(folder: Path, authority: Authority) -> None:
    """Write a new authority to a folder; raises if the folder contains one."""
    prepare_folder(folder)
    with files.lock_folder(folder):
        if (folder / CA).exists():
            raise CredentialsError(
                "an authority already exists in this folder",
                where=str(folder / CA),
                why="a new authority would invalidate every certificate that was issued",
                mend="whale-nebula certs renew --ca to extend its validity, or --folder other to create a second one",
            )
        if (folder / KEY).exists():
            raise CredentialsError(
                "the folder has an authority's key, but not its certificate",
                where=str(folder / KEY),
                why="a new key would invalidate every certificate that was issued",
                mend=f"copy {CA} back from any host; if certs init was interrupted: rm {folder / KEY}",
            )
        files.write(folder / KEY, encode_key(authority.key), files.SECRET, replace=False)
        save_clusters(folder, authority)
        trust.save(folder / files.REVOKED, authority.run, authority.key, 1, {})
        files.write(folder / CA, encode_certificate(authority.certificate), files.PUBLIC, replace=False)


def prepare_folder(folder: Path) -> None:
    """Create a folder for keys, unless it exists; a folder that other users can enter is refused."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / ISSUED).mkdir(mode=0o700, exist_ok=True)
        mode = stat.S_IMODE(os.stat(folder).st_mode)
    except OSError as error:
        raise CredentialsError(f"cannot create {folder}", why=error.strerror, mend="--folder certs") from None
    if mode & 0o077:
        raise CredentialsError(
            f"{folder} is accessible to other users",
            why=f"its mode is {mode:04o}, and it will contain keys",
            mend=f"chmod 700 {folder}",
        )


def save_clusters(folder: Path, authority: Authority) -> None:
    """Store the authority's clusters."""
    content = {"format": FORMAT, "run": authority.run, "clusters": dict(authority.clusters)}
    files.write(folder / CLUSTERS_FILE, f"{json.dumps(content, indent=1)}\n".encode(), files.PUBLIC)


def load(folder: Path) -> Authority:
    """The authority in a folder, with its key, which exists only on the host that created it."""
    certificates = load_certificates(folder)
    if not (folder / KEY).exists():
        raise CredentialsError(
            "the authority's key is not on this host",
            where=str(folder / KEY),
            why="certificates are issued on the host that created the authority, and copied from there",
            mend="run this command on that host",
        )
    key = files.parse_private_key(files.read(folder / KEY, "the authority's key", secret=True), str(folder / KEY))
    own_certificates = [each for each in certificates if each.public_key() == key.public_key()]
    if not own_certificates:
        raise CredentialsError(f"{KEY} is not the key of {CA}", where=str(folder))
    certificate = max(own_certificates, key=lambda each: each.not_valid_after_utc)
    run = files.find_authority_run(certificate)
    if run is None:
        raise CredentialsError(
            "not the certificate of a run's authority", where=str(folder / CA), mend="whale-nebula certs init"
        )
    path, clusters = folder / CLUSTERS_FILE, {}
    if path.exists():
        try:
            content = json.loads(files.read(path, "the list of clusters"))
            clusters = {str(cluster): int(workers) for cluster, workers in content["clusters"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise CredentialsError(
                "cannot parse the list of clusters", where=str(path), mend=f"rm {path}, and pass --config"
            ) from None
    return Authority(run, certificate, key, clusters)


def load_certificates(folder: Path) -> list[x509.Certificate]:
    """All certificates in `ca.pem`: several, if each cluster has its own authority."""
    load_certificate(folder)
    return files.parse_certificates(files.read(folder / CA, "the authority's certificate"), str(folder / CA))


def load_certificate(folder: Path) -> x509.Certificate:
    """The authority's certificate, which every host has."""
    if not (folder / CA).exists():
        raise CredentialsError(
            "there is no authority in this folder",
            where=str(folder / CA),
            mend=f"whale-nebula certs init --run NAME --folder {folder}; or pass the folder of the existing authority",
        )
    return files.parse_certificate(files.read(folder / CA, "the authority's certificate"), str(folder / CA))


def check_current(authority: Authority, at: datetime | None = None) -> None:
    """Raise unless the authority's certificate is within its dates, so that it may sign."""
    check_dates(authority.certificate, at or files.now(), "the authority", authority=True)
