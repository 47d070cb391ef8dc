"""The files of certificates, keys and deny lists: their names, atomic writes, locks, and what certificates contain."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import NameOID

from whale_nebula.config.schema import Security
from whale_nebula.errors import CredentialsError, IdentityError, WrongNameError
from whale_nebula.security.allowance import ALLOWANCE_OID, UNLIMITED, Allowance
from whale_nebula.security.identity import Identity, find_cluster, find_run

SECRET = 0o600
PUBLIC = 0o644
REVOKED = "revoked.json"
NO_LIST = "none"
_MOST_BYTES = 4 << 20
MOST_LIST_BYTES = 64 << 20
"""The most bytes of a deny list."""


class Files(NamedTuple):
    """The credential files of a process: the authority's certificate, its own, its key, and the deny list.

    >>> one = Identity("mt", "gpu")
    >>> Files.in_folder("certs", one).cert.as_posix(), Files.in_folder("certs", one).key.as_posix()
    ('certs/gpu-worker-0.pem', 'certs/gpu-worker-0.key')
    """

    ca: Path
    cert: Path
    key: Path
    revoked: Path | None = None

    @classmethod
    def in_folder(cls, folder: str | os.PathLike[str], identity: Identity) -> Files:
        """The file names that `whale-nebula certs issue` uses."""
        home = Path(folder)
        return cls(home / "ca.pem", home / f"{identity.stem}.pem", home / f"{identity.stem}.key", home / REVOKED)

    @classmethod
    def from_config(cls, security: Security, identity: Identity, base: str | os.PathLike[str] = ".") -> Files:
        """The files that a config names; `{cluster}`, `{role}` and `{index}` are replaced by the parts of the identity.

        The default is the name that `certs issue` uses, in the folder `certs` next to the config (`base`). The deny
        list is next to `ca`; with `revoked: none` there is no deny list.

        >>> named = Security(ca="/etc/nebula/ca.pem", cert="/etc/nebula/{cluster}-{index}.pem")
        >>> found = Files.from_config(named, Identity("mt", "gpu", "worker", 3), "/srv")
        >>> found.cert.as_posix(), found.key.as_posix(), found.revoked.as_posix()
        ('/etc/nebula/gpu-3.pem', '/srv/certs/gpu-worker-3.key', '/etc/nebula/revoked.json')
        """
        default = cls.in_folder(Path(base) / "certs", identity)
        configured = [security.ca, security.cert, security.key]
        ca, cert, key = (
            other if text is None else _expand_path(text, identity, base)
            for text, other in zip(configured, default[:3], strict=True)
        )
        if security.revoked is None:
            return cls(ca, cert, key, ca.parent / REVOKED)
        return cls(
            ca, cert, key, None if security.revoked == NO_LIST else _expand_path(security.revoked, identity, base)
        )

    @classmethod
    def from_dict(cls, content: Mapping[str, str | None]) -> Files:
        """The inverse of `as_dict`."""
        paths = {part: content.get(part) for part in cls._fields}
        missing = [part for part in ("ca", "cert", "key") if not paths[part]]
        if missing:
            raise CredentialsError(f"missing file names: {', '.join(missing)}")
        return cls(**{part: Path(path) for part, path in paths.items() if path})

    def as_dict(self) -> dict[str, str | None]:
        """The absolute paths as text, to be passed to another process."""
        return {part: path and os.path.abspath(path) for part, path in self._asdict().items()}


def _expand_path(text: str, identity: Identity, base: str | os.PathLike[str]) -> Path:
    for part in ("cluster", "role", "index"):
        text = text.replace("{" + part + "}", str(getattr(identity, part)))
    return Path(base) / os.path.expanduser(text)


def read(
    path: str | os.PathLike[str],
    what: str,
    *,
    secret: bool = False,
    most: int | None = _MOST_BYTES,
    mend: str | None = None,
) -> bytes:
    """The first `most` bytes of a file; a secret that other users can read is refused, with the command that corrects
    it. `what` names the file in errors, and `mend` is the advice for an unreadable one that `certs` does not create.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if secret and not is_private(status):
                raise CredentialsError(
                    f"{what} can be read by other users",
                    where=str(path),
                    why=f"its mode is {stat.S_IMODE(status.st_mode):04o}, and any user who can read a key can use it",
                    mend=f"chmod 600 {path}, and issue a new one if this host has other users",
                )
            return file.read(most)
    except OSError as error:
        raise CredentialsError(f"cannot read {what}", where=str(path), why=error.strerror, mend=mend) from None


def is_private(status: os.stat_result) -> bool:
    """Whether a key file's owner and mode keep it from other users.

    0600 or less; if root owns the file and this process is not root, its group may read it too (0640 or less), as
    Kubernetes projects a secret for a pod with `fsGroup`.
    """
    owned_by_root = status.st_uid == 0 and os.geteuid() != 0
    return not stat.S_IMODE(status.st_mode) & (0o037 if owned_by_root else 0o077)


def find_other_keys(paths: Files) -> list[Path]:
    """Readable private keys of other identities, in the folders of this process's own files."""
    candidates = sorted({*paths.key.parent.glob("*.key"), *paths.ca.parent.glob("*.key")} - {paths.key})
    return [path for path in candidates if os.access(path, os.R_OK)]


def write(path: Path, data: bytes, mode: int, *, replace: bool = True) -> None:
    """Write a file atomically: to a temporary file in its folder, which is synced and then renamed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # regardless of the umask
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        try:
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        sync_folder(path.parent)
    except OSError as error:
        raise CredentialsError(f"cannot write {path}", why=error.strerror, mend=f"ls -ld {path.parent}") from None


def sync_folder(folder: Path) -> None:
    """Sync a folder: only then does a new name in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _hold_descriptor_lock(descriptor: int) -> Iterator[None]:
    """Hold the lock of an open file or folder, and close it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: only one command at a time changes its files."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        mend = "whale-nebula certs init"
        raise CredentialsError(f"cannot open {folder}", why=error.strerror, mend=mend) from None
    with _hold_descriptor_lock(descriptor):
        yield


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file that other processes use, too, in the order of their requests."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, SECRET)
    with _hold_descriptor_lock(descriptor):
        yield


def now() -> datetime:
    """The present time in whole seconds, as in certificates."""
    return datetime.now(UTC).replace(microsecond=0)


TIME = "%Y-%m-%dT%H:%M:%SZ"
"""The format of times in our files."""


def format_time(at: datetime) -> str:
    """A time as text, in whole seconds; the order of the texts is that of the times.

    >>> format_time(datetime(2026, 11, 26, 16, 4, 35))
    '2026-11-26T16:04:35Z'
    """
    return at.strftime(TIME)


SIGNATURE = ec.ECDSA(hashes.SHA256())
"""The algorithm of all our signatures."""


class Peer(NamedTuple):
    """A certificate of a process, and what it contains; `fingerprint` is the SHA-256 of the entire certificate, `key`
    that of its public key. `account` is the account that it was issued to, if the owner has accounts, and `allowance`
    that account's limits.
    """

    certificate: x509.Certificate
    identity: Identity
    serial: str
    not_before: datetime
    not_after: datetime
    fingerprint: str
    key: str
    account: str = ""
    allowance: Allowance = UNLIMITED


UNREADABLE = (
    ValueError,  # also of text that is not UTF-8
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    Warning,  # of deprecated input, where warnings are errors
)
"""The library's exceptions for bytes that are not a certificate, or for an unsupported one."""


@contextlib.contextmanager
def _translate_errors(where: str) -> Iterator[None]:
    """Convert the library's exceptions about a certificate to a `CredentialsError`."""
    try:
        yield
    except UNREADABLE:
        raise CredentialsError("not a valid certificate", where=where, mend="whale-nebula certs show") from None


def parse_certificates(pem: bytes, where: str) -> list[x509.Certificate]:
    """All certificates in a PEM file; an incompletely copied one, which the library skips, is an error."""
    with _translate_errors(where):
        certificates = x509.load_pem_x509_certificates(pem)
        if len(certificates) < pem.count(b"-----BEGIN CERTIFICATE"):
            raise ValueError("incomplete certificate")
        for each in certificates:
            _check_decodable(each)
        return certificates


def parse_certificate(pem: bytes | str, where: str) -> x509.Certificate:
    """The first certificate in PEM text, which is that of the process itself."""
    with _translate_errors(where):
        certificate = x509.load_pem_x509_certificate(pem.encode() if isinstance(pem, str) else pem)
        _check_decodable(certificate)
        return certificate


def _check_decodable(certificate: x509.Certificate) -> None:
    """Force the parsing of parts that the library parses lazily; extensions may be malformed, which their readers
    handle.
    """
    _ = (
        certificate.version,
        certificate.serial_number,
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
    )
    certificate.subject.rfc4514_string()
    certificate.issuer.rfc4514_string()
    certificate.public_key()


def digest_certificate_key(certificate: x509.Certificate) -> str:
    """The SHA-256 of the public key of a certificate: renewed certificates have the same."""
    return digest_public_key(certificate.public_key())


def digest_public_key(key: CertificatePublicKeyTypes) -> str:
    """The SHA-256 of a public key."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))
    return digest.finalize().hex()


def parse_private_key(pem: bytes, where: str) -> ec.EllipticCurvePrivateKey:
    """A private key, which must be of the type of our own keys."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except UNREADABLE:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CredentialsError("not a P-256 private key", where=where, mend="create one with whale-nebula certs issue")
    return key


def read_peer(certificate: x509.Certificate) -> Peer:
    """A certificate with the identity and account that it names; `WrongNameError` if it is not that of a process."""
    uris = list_alternative_names(certificate)
    if len(uris) != 1:
        raise WrongNameError(
            f"the certificate names {len(uris)} identities", why="it must name exactly one: nebula://<run>/..."
        )
    try:
        identity = Identity.parse(uris[0])
    except IdentityError as error:
        raise WrongNameError(error.what, mend=error.mend) from None
    if identity.dns not in list_alternative_names(certificate, x509.DNSName):
        raise WrongNameError(f"the certificate of {identity.worker} lacks the host name {identity.dns}")
    dates = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    accounts = certificate.subject.get_attributes_for_oid(NameOID.USER_ID)
    return Peer(
        certificate,
        identity,
        format_serial(certificate),
        *dates,
        certificate.fingerprint(hashes.SHA256()).hex(),
        digest_certificate_key(certificate),
        str(accounts[0].value) if len(accounts) == 1 else "",
        _read_allowance(certificate, identity),
    )


def _read_allowance(certificate: x509.Certificate, identity: Identity) -> Allowance:
    """The account's limits in a certificate; none without the extension."""
    try:
        value = certificate.extensions.get_extension_for_oid(ALLOWANCE_OID).value
        return Allowance.decode(value.value if isinstance(value, x509.UnrecognizedExtension) else b"")
    except x509.ExtensionNotFound:
        return UNLIMITED
    except UNREADABLE as error:
        mend = "install the same version of whale_nebula as the owner of the cluster"
        what = f"the certificate of {identity.worker} has account limits that this version does not know"
        raise WrongNameError(what, why=str(error), mend=mend) from None


def format_serial(certificate: x509.Certificate) -> str:
    """The serial number as `certs show` prints it."""
    return f"{certificate.serial_number:040x}"


def list_authority_clusters(certificate: x509.Certificate) -> tuple[str, ...]:
    """The clusters that an authority may certify; empty if it may certify all."""
    return tuple(filter(None, map(find_cluster, list_alternative_names(certificate))))


def find_authority_run(certificate: x509.Certificate) -> str | None:
    """The run whose authority a certificate belongs to; None if it does not belong to an authority."""
    names = list_alternative_names(certificate)
    runs = [find_run(uri) for uri in names if find_cluster(uri) is None]
    return runs[0] if len(runs) == 1 else None


Kind = type[x509.UniformResourceIdentifier] | type[x509.DNSName]


def list_alternative_names(certificate: x509.Certificate, kind: Kind = x509.UniformResourceIdentifier) -> list[str]:
    """The names of one kind in a certificate; empty if they are malformed."""
    names = find_extension(certificate, x509.SubjectAlternativeName)
    return [] if names is None else [str(each) for each in names.get_values_for_type(kind)]


Extension = TypeVar("Extension", bound=x509.ExtensionType)


def find_extension(certificate: x509.Certificate, kind: type[Extension]) -> Extension | None:
    """An extension of a certificate; None if it is missing or malformed."""
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, *UNREADABLE):
        return None


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether an authority's key signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, *UNREADABLE):
        return False
    return True


def verify_signature(certificate: x509.Certificate, signature: bytes, message: bytes) -> bool:
    """Whether a signature was created with the key of a certificate."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, message, SIGNATURE)
    except (InvalidSignature, *UNREADABLE):
        return False
    return True
