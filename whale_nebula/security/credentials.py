"""The credentials of a process: its certificate, its key and its trust; and proofs of identity to peers."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from whale_nebula.errors import CredentialsError, IdentityError, WrongNameError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.faults import failpoint
from whale_nebula.security import files
from whale_nebula.security.files import Files, Peer
from whale_nebula.security.identity import Identity, command_options
from whale_nebula.security.trust import DenyList, Stamp, Trust, check_live, expires_soon, make_stamp

_RETRY_SECONDS = 10.0
_WARNING_SECONDS = 60.0
_LOG = logging.getLogger("whale_nebula.security")


@dataclass(frozen=True)
class Credentials:
    """The credential files of a process, read and found consistent. Immutable: `reload` returns a new object for a
    renewed certificate.

    `ca_pem`, `cert_pem` and `key_pem` are passed to gRPC. The `repr` omits the key.
    """

    files: Files
    ca_pem: bytes = field(repr=False)
    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)
    peer: Peer
    trust: Trust = field(repr=False)
    stamps: tuple[Stamp, ...] = field(repr=False, default=())

    @classmethod
    def load(cls, paths: Files) -> Credentials:
        """Read the files, and check that they belong together, that no other user can read the key, and the dates."""
        return _load(paths, None)

    @property
    def identity(self) -> Identity:
        """The identity that the certificate names."""
        return self.peer.identity

    @property
    def serial(self) -> str:
        """The serial number of its certificate."""
        return self.peer.serial

    @property
    def not_after(self) -> datetime:
        """The time at which its certificate expires."""
        return self.peer.not_after

    def check_now(self) -> None:
        """Check that the certificate is valid at present: raises `ExpiredError` or `RevokedError` if it is not."""
        self.trust.check(self.cert_pem, subject=f"{self.identity.worker} (this process)")

    def check_identity(self, identity: Identity) -> None:
        """Raise `WrongNameError` unless the certificate names this identity."""
        if self.identity == identity:
            return
        what = f"this process is {identity.worker}, but its certificate is for {self.identity.worker}"
        mend = f"copy {identity.stem}.pem and {identity.stem}.key from the host that issues certificates"
        if self.identity.run != identity.run:
            what = f"this run is named {identity.run!r}, but the certificate is for run {self.identity.run!r}"
            mend = f"set run: {self.identity.run} in every config, or create an authority for this run: certs init"
        why = f"the certificate names {self.identity.uri}, not {identity.uri}"
        raise WrongNameError(what, where=str(self.files.cert), why=why, mend=mend)

    def reload(self) -> Credentials:
        """The credentials in the present files; raises if they are inconsistent, and changes nothing."""
        found = _load(self.files, self.trust.denied)
        if found.identity != self.identity:
            raise CredentialsError(
                f"{self.files.cert} is now a certificate of {found.identity.worker}",
                why=f"this process is {self.identity.worker}, and a process cannot change its identity",
            )
        return found

    def sign(self, message: bytes) -> bytes:
        """A signature by the key of this process."""
        return files.parse_private_key(self.key_pem, str(self.files.key)).sign(message, files.SIGNATURE)


def _make_stamps(paths: Files) -> tuple[Stamp, ...]:
    return tuple(make_stamp(path) for path in paths[:3])


def _load(paths: Files, denied: DenyList | None) -> Credentials:
    stamps = _make_stamps(paths)  # taken first: files that change while they are read are read again
    key_pem = files.read(paths.key, "the key of this process", secret=True)
    cert_pem = files.read(paths.cert, "the certificate of this process")
    ca_pem = files.read(paths.ca, "the authority's certificate")
    certificate = files.parse_certificate(cert_pem, str(paths.cert))
    key = files.parse_private_key(key_pem, str(paths.key))
    if certificate.public_key() != key.public_key():
        raise CredentialsError(
            f"{paths.key.name} is not the key of {paths.cert.name}",
            where=str(paths.key.parent),
            mend="copy both files of the worker from the host that issued them",
        )
    authorities = files.parse_certificates(ca_pem, str(paths.ca))
    if foreign := [each for each in authorities if files.find_authority_run(each) is None]:
        raise CredentialsError(
            "not an authority's certificate",
            where=str(paths.ca),
            why=f"it is the certificate of {escape_foreign_text(foreign[0].subject.rfc4514_string(), 200)}",
            mend="security: {ca: certs/ca.pem}",
        )
    trust = Trust(authorities, denied)
    peer = trust.check(certificate, subject=f"this process ({paths.cert})")
    if denied is None:
        trust = Trust(trust.authorities, DenyList(paths.revoked, trust.authorities))
        check_live(trust, peer)
    return Credentials(paths, ca_pem, cert_pem, key_pem, peer, trust, stamps)


class CurrentCredentials:
    """The credentials of a process that outlives its certificate: they are reloaded when their files change.

    Thread-safe. Incomplete or invalid files are ignored: the old credentials are kept, and the reason is logged once
    for each change. The files are checked again later, as a certificate may become valid. In the days before the
    certificate or an authority expires, a daily warning contains the command that renews it.
    """

    def __init__(self, first: Credentials) -> None:
        self._lock = threading.Lock()
        self._current = first
        self._refused_stamps: tuple[Stamp, ...] | None = None
        self._retry_time = 0.0
        self._logged_warnings: set[tuple[str, int]] = set()
        self._next_warning_time = 0.0

    def __call__(self) -> Credentials:
        """The current credentials."""
        with self._lock:
            self._warn_of_expiries()
            self._reload_changed()
            return self._current

    def _warn_of_expiries(self) -> None:
        """Warn once a day about certificates that expire soon. If an authority has several certificates, only the last
        to expire counts.
        """
        if time.monotonic() < self._next_warning_time:
            return
        self._next_warning_time = time.monotonic() + _WARNING_SECONDS
        peer, last_by_key = self._current.peer, {}
        for each in sorted(self._current.trust.authorities, key=lambda each: each.not_valid_after_utc):
            last_by_key[files.digest_certificate_key(each)] = each
        renew = f"run whale-nebula certs renew {command_options(peer.identity)}, and copy its .pem to this host"
        self._warn_of_expiry("certificate", peer.fingerprint, peer.not_before, peer.not_after, renew)
        for key, each in last_by_key.items():
            renew = "run whale-nebula certs renew --ca, and copy ca.pem to every host"
            self._warn_of_expiry("authority", key, each.not_valid_before_utc, each.not_valid_after_utc, renew)

    def _warn_of_expiry(self, what: str, key: str, begin: datetime, end: datetime, renew: str) -> None:
        at = files.now()
        warning = key, (end - at).days
        if not expires_soon(begin, end, at) or warning in self._logged_warnings:
            return
        self._logged_warnings.add(warning)
        hours = max(0, round((end - at) / timedelta(hours=1)))
        _LOG.warning(
            "the %s of %s expires at %s, in %s hours: %s; the run does not have to stop for this",
            *(what, self._current.identity.worker, f"{end:%Y-%m-%d %H:%M} UTC", hours, renew),
        )

    def _reload_changed(self) -> None:
        """Load the files again if they have changed; invalid ones are refused, and tried again later."""
        stamps = _make_stamps(self._current.files)
        if stamps == self._current.stamps or (stamps == self._refused_stamps and time.monotonic() < self._retry_time):
            return
        failpoint("certificate.changed")
        try:
            self._current = self._current.reload()
        except IdentityError as error:
            if stamps != self._refused_stamps:
                _LOG.warning("the new credential files are invalid, and the old certificate stays in use: %s", error)
            self._refused_stamps, self._retry_time = stamps, time.monotonic() + _RETRY_SECONDS
            return
        failpoint("certificate.renewed")
        _LOG.info("loaded certificate %s, valid until %s", self._current.serial[:16], self._current.not_after)


class Prover:
    """Authenticates this process to a peer, and verifies the peer, by signatures over both greetings.

    TLS authenticates only the end of the connection, which is not the peer if there is a gateway between the two.
    """

    def __init__(self, credentials: Credentials | CurrentCredentials) -> None:
        self._credentials = credentials

    @property
    def credentials(self) -> Credentials:
        """The current credentials."""
        return self._credentials if isinstance(self._credentials, Credentials) else self._credentials()

    @property
    def certificate(self) -> str:
        """The certificate as text, to be sent."""
        return self.credentials.cert_pem.decode("ascii")

    def sign(self, transcript: bytes) -> bytes:
        """A signature of the transcript of a greeting or of a request for a stream, valid for that one only."""
        return self.credentials.sign(_CONVERSATION + transcript)

    def verify(self, certificate: str, signature: bytes, transcript: bytes, worker: str) -> None:
        """Raise an `IdentityError` unless `worker`, with a certificate that is valid now, signed this transcript."""
        credentials = self.credentials
        parsed = files.parse_certificate(certificate, f"what {worker} sent")
        credentials.trust.check(
            parsed, Identity.of_worker(credentials.identity.run, worker), subject=worker, at=files.now()
        )
        if not files.verify_signature(parsed, signature, _CONVERSATION + transcript):
            raise IdentityError(
                f"the signature of {worker} is invalid",
                why="the sender has the worker's certificate but not its key, or the messages were modified in transit",
                mend="check which hosts run the gateways, and revoke the certificate",
            )

    def check_live(self, certificate: str, worker: str) -> None:
        """Raise an `IdentityError` unless a certificate that `verify` accepted is still within its dates and not on the
        deny list.
        """
        parsed = files.parse_certificate(certificate, f"what {worker} sent")
        check_live(self.credentials.trust, files.read_peer(parsed))


_CONVERSATION = b"whale_nebula conversation 1\0"
