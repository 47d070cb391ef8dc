"""Authorities and certificates for the tests of this folder: valid ones, and every kind of invalid one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

from whale_nebula.security import Credentials, Files, Identity, authority, files, issue
from whale_nebula.security.authority import Authority

RUN = "mt"
GPU = Identity(RUN, "gpu")
NPU = Identity(RUN, "npu")
GATE = Identity(RUN, "gpu", "gateway")
OTHER_GATE = Identity(RUN, "npu", "gateway")
DAY = timedelta(days=1)


@dataclass(frozen=True)
class Home:
    """An authority in a folder."""

    folder: Path
    authority: Authority

    @classmethod
    def at(cls, folder: Path, run: str = RUN, at: datetime | None = None, days: float = 90) -> Home:
        created = Authority.create(run, {}, days, at)
        authority.create(folder, created)
        return cls(folder, created)

    def files(self, identity: Identity, days: float = 7, at: datetime | None = None) -> Files:
        return issue.issue(self.folder, self.authority, [identity], days, at)[0].files

    def credentials(self, identity: Identity) -> Credentials:
        return Credentials.load(self.files(identity))

    def certificate(self, identity: Identity = GPU, days: float = 7, at: datetime | None = None) -> x509.Certificate:
        """A certificate that is not written to a file."""
        moment = at or files.now()
        public = authority.make_key().public_key()
        signer = self.authority
        return authority.make_process_certificate(
            identity, public, signer.certificate, signer.key, moment + timedelta(days=days), moment
        )

    def one_day_files(self, identity: Identity, begin: datetime) -> Files:
        """Files with a certificate that is valid for one day."""
        paths = Files.in_folder(self.folder / "odd", identity)
        signer, key = self.authority, authority.make_key()
        certificate = authority.make_process_certificate(
            identity, key.public_key(), signer.certificate, signer.key, begin + DAY, begin
        )
        return write_credentials(paths, certificate, authority.encode_key(key), self.folder)


def write_self_signed(folder: Path, identity: Identity) -> Files:
    """Files with a self-signed certificate for an identity."""
    key, now = authority.make_key(), files.now()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.worker)])
    names = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns)]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    return write_credentials(Files.in_folder(folder, identity), certificate, authority.encode_key(key), folder)


def write_credentials(paths: Files, certificate: x509.Certificate, key_pem: bytes, ca_folder: Path) -> Files:
    paths.cert.parent.mkdir(parents=True, exist_ok=True)
    files.write(paths.cert, authority.encode_certificate(certificate), files.PUBLIC)
    files.write(paths.key, key_pem, files.SECRET)
    return paths._replace(ca=ca_folder / "ca.pem", revoked=None)
