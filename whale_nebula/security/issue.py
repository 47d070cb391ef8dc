"""Issue, renew and revoke certificates. Every change is atomic."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric import ec

from whale_nebula.errors import CredentialsError, IdentityError
from whale_nebula.security import files, trust
from whale_nebula.security.allowance import UNLIMITED, Allowance
from whale_nebula.security.authority import (
    AUTHORITY_DAYS,
    CA,
    ISSUED,
    Authority,
    check_current,
    check_lifetime,
    encode_certificate,
    encode_key,
    load_certificates,
    make_authority_certificate,
    make_key,
    make_process_certificate,
)
from whale_nebula.security.authority import (
    load as load_authority,
)
from whale_nebula.security.files import Files, Peer
from whale_nebula.security.identity import Identity, command_options
from whale_nebula.security.trust import Revocation, Revocations, SignedList

DAYS = 7.0
_EPHEMERAL_DAYS = 30.0


class Issued(NamedTuple):
    """An issued certificate. `clipped`: it expires with its authority, before the requested days."""

    peer: Peer
    files: Files
    clipped: bool = False


def issue(
    folder: Path, authority: Authority, identities: Sequence[Identity], days: float = DAYS, at: datetime | None = None
) -> list[Issued]:
    """Issue new keys and certificates for all identities, or raise before any of them is created."""
    moment = at or files.now()
    check_current(authority, moment)
    with files.lock_folder(folder):
        revoked, known = _load_deny_list(folder, authority).revoked, list_issued(folder)
        for identity in identities:
            authority.check(identity)
            _refuse_second_key(identity, known, revoked, moment)
        return [_issue(folder, authority, identity, days, moment) for identity in identities]


def _refuse_second_key(
    identity: Identity, known: Iterable[Peer], revoked: Iterable[str], at: datetime, key: str | None = None
) -> None:
    """Refuse a certificate for a second key while the first is valid: a process on any host may still hold it."""
    for peer in known:
        if peer.identity != identity or peer.serial in revoked or peer.not_after < at or peer.key == key:
            continue
        options = command_options(identity)
        raise CredentialsError(
            f"{identity.worker} already has a certificate",
            where=f"serial {peer.serial[:16]}",
            why=f"it is valid until {peer.not_after:%Y-%m-%d %H:%M} UTC on any host that has it",
            mend=f"whale-nebula certs renew {options}; for a new key, whale-nebula certs revoke {options} first",
        )


def certify(
    folder: Path,
    authority: Authority,
    identity: Identity,
    public: ec.EllipticCurvePublicKey,
    days: float,
    at: datetime,
    where: str,
    account: str = "",
    allowance: Allowance = UNLIMITED,
) -> Issued:
    """Issue a certificate for a key that was created elsewhere; the caller has locked the folder."""
    authority.check(identity)
    if identity.run != authority.run:
        raise CredentialsError(f"the request is for run {identity.run!r}", where=where)
    revoked, known = _load_deny_list(folder, authority).revoked, list_issued(folder)
    key = files.digest_public_key(public)
    if revoked_peers := [peer for peer in known if peer.key == key and peer.serial in revoked]:
        mend = "on the host, delete its .key and .csr, then run whale-nebula certs request to create a new key"
        raise CredentialsError(f"the key of {revoked_peers[0].identity.worker} was revoked", where=where, mend=mend)
    if account and any(peer.key == key and peer.account != account for peer in known):
        why = "a certificate of this key was issued to another account, or by the owner"
        mend = "on the host, delete its .key and .csr, then log in again"
        raise CredentialsError(f"the key requested for {identity.worker} is in use", where=where, why=why, mend=mend)
    _refuse_second_key(identity, known, revoked, at, key)
    return _certify(folder, authority, identity, public, days, at, None, account, allowance)


def discard(folder: Path, serials: Iterable[str]) -> None:
    """Remove certificates that were issued to accounts and delivered to no one; the caller has locked the folder."""
    for each in serials:
        (folder / ISSUED / f"{each}.pem").unlink(missing_ok=True)


def _issue(folder: Path, authority: Authority, identity: Identity, days: float, at: datetime) -> Issued:
    key = make_key()
    return _certify(folder, authority, identity, key.public_key(), days, at, key)


def _certify(
    folder: Path,
    authority: Authority,
    identity: Identity,
    public: ec.EllipticCurvePublicKey,
    days: float,
    at: datetime,
    key: ec.EllipticCurvePrivateKey | None = None,
    account: str = "",
    allowance: Allowance = UNLIMITED,
) -> Issued:
    """Create a certificate for a key, and write both; the certificate of an `account` is written only to the record of
    all issued certificates. The record precedes the delivery, so that the certificate can be revoked.
    """
    end, last_end = at + check_lifetime(days), authority.certificate.not_valid_after_utc
    issuer = authority.certificate, authority.key
    certificate = make_process_certificate(identity, public, *issuer, min(end, last_end), at, account, allowance)
    paths, pem = Files.in_folder(folder, identity), encode_certificate(certificate)
    (folder / ISSUED).mkdir(mode=0o700, exist_ok=True)
    files.write(folder / ISSUED / f"{files.format_serial(certificate)}.pem", pem, files.PUBLIC)
    if key is not None:
        files.write(paths.key, encode_key(key), files.SECRET)
    if not account:
        files.write(paths.cert, pem, files.PUBLIC)
    return Issued(files.read_peer(certificate), paths, clipped=end > last_end)


def renew(
    folder: Path, authority: Authority, identities: Sequence[Identity], days: float = DAYS, at: datetime | None = None
) -> list[Issued]:
    """Issue new certificates for the existing keys: each replaces one file atomically, while processes run.

    The old certificate remains valid until its date.
    """
    moment = at or files.now()
    check_current(authority, moment)
    with files.lock_folder(folder):
        revoked = _load_deny_list(folder, authority).revoked
        renewable = [_find_renewable(folder, authority, identity, revoked) for identity in identities]
        return [_renew(folder, authority, each, days, moment) for each in renewable]


def _find_renewable(folder: Path, authority: Authority, identity: Identity, revoked: Iterable[str]) -> Peer:
    """The certificate of an identity: the one in this folder or, if its files were moved to its host, the newest that
    was issued.
    """
    path = Files.in_folder(folder, identity).cert
    if not path.exists():
        valid = [
            peer
            for peer in list_issued(folder)
            if peer.identity == identity
            and peer.serial not in revoked
            and files.is_signed_by(peer.certificate, authority.certificate)
        ]
        if not valid:
            mend = f"whale-nebula certs issue {command_options(identity)}"
            raise CredentialsError(f"there is no certificate of {identity.worker} here", where=str(path), mend=mend)
        return valid[-1]
    peer = files.read_peer(files.parse_certificate(files.read(path, "a certificate"), str(path)))
    if peer.identity != identity or not files.is_signed_by(peer.certificate, authority.certificate):
        raise CredentialsError(f"not a certificate of {identity.worker}", where=str(path))
    if peer.serial in revoked:
        mend = f"issue a new key and certificate: whale-nebula certs issue {command_options(identity)}"
        raise CredentialsError(f"the certificate of {identity.worker} was revoked", where=str(path), mend=mend)
    return peer


def _renew(folder: Path, authority: Authority, old: Peer, days: float, at: datetime) -> Issued:
    public = old.certificate.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise CredentialsError(
            f"the key of {old.identity.worker} is not a P-256 key", mend="revoke it, and issue a new one"
        )
    return _certify(folder, authority, old.identity, public, days, at)


def renew_authority(folder: Path, days: float = AUTHORITY_DAYS, at: datetime | None = None) -> Authority:
    """Issue a new certificate for the authority's key: certificates that it signed remain valid."""
    moment = at or files.now()
    old = load_authority(folder)
    certificate = make_authority_certificate(old.run, old.key, moment + check_lifetime(days), moment, old.bound)
    others = [each for each in load_certificates(folder) if each.public_key() != certificate.public_key()]
    files.write(folder / CA, b"".join(map(encode_certificate, [certificate, *others])), files.PUBLIC)
    return replace(old, certificate=certificate)


def revoke(
    folder: Path, authority: Authority, serials: Sequence[str], why: str, at: datetime | None = None
) -> list[Revocation]:
    """Add certificates, and all others of the same keys, to the deny list; returns those that were not on it yet."""
    with files.lock_folder(folder):
        return revoke_locked(folder, authority, serials, why, at or files.now())


def revoke_locked(
    folder: Path, authority: Authority, serials: Sequence[str], why: str, at: datetime
) -> list[Revocation]:
    """Like `revoke`, for a caller that has locked the folder."""
    deny_list = _load_deny_list(folder, authority)
    revoked = deny_list.revoked
    issued_peers = {peer.serial: peer for peer in list_issued(folder)}
    if unknown := [each for each in serials if each not in issued_peers]:
        raise CredentialsError(f"no certificate has the serial {unknown[0]!r}", mend="whale-nebula certs show")
    keys = {issued_peers[each].key for each in serials}
    same = [peer for peer in issued_peers.values() if peer.key in keys and peer.serial not in revoked]
    new = [Revocation(peer.serial, peer.identity.uri, files.format_time(at), why) for peer in same]
    if new:
        _sign_list(folder, authority, deny_list.number + 1, {**revoked, **{each.serial: each for each in new}})
    return new


def withdraw(folder: Path, authority: Authority, serial: str, what: str, why: str, at: datetime | None = None) -> int:
    """Add an approval of this authority to its deny list, by its serial number; returns the number of the list."""
    revocation = Revocation(serial, what, files.format_time(at or files.now()), why)
    with files.lock_folder(folder):
        deny_list = _load_deny_list(folder, authority)
        _sign_list(folder, authority, deny_list.number + 1, {**deny_list.revoked, serial: revocation})
        return trust.load(folder / files.REVOKED, [authority.certificate]).number


def _load_deny_list(folder: Path, authority: Authority) -> SignedList:
    """The deny list of an authority. Before any certificate exists, an empty list is created, so that every host gets
    one. Later, a list that is missing or older than the last one signed here is refused, as it would undo revocations.
    """
    path = folder / files.REVOKED
    highest = trust.read_highest_number(path, files.digest_certificate_key(authority.certificate))
    if not path.exists():
        if highest or list_issued(folder):
            raise CredentialsError(
                "the deny list is missing",
                where=str(path),
                why="a new, empty list would be accepted everywhere, and would un-revoke every certificate",
                mend=f"copy {files.REVOKED} from the host with the highest number (whale-nebula certs show) or, if no "
                "certificate was ever revoked, run whale-nebula certs renew --revoked --forget-revocations",
            )
        _sign_list(folder, authority, 1, {})
    deny_list = trust.load(path, [authority.certificate])
    if deny_list.number < highest:
        raise CredentialsError(
            "the deny list is outdated",
            where=str(path),
            why=f"its number is {deny_list.number}, but number {highest} was signed here",
            mend=f"copy {files.REVOKED} from the host with the highest number: whale-nebula certs show",
        )
    return deny_list


def _sign_list(folder: Path, authority: Authority, number: int, revoked: Revocations) -> None:
    """Write a deny list with this number, or the number after the highest on this host if that is higher."""
    path, signer = folder / files.REVOKED, files.digest_certificate_key(authority.certificate)
    trust.save(path, authority.run, authority.key, max(number, trust.read_highest_number(path, signer) + 1), revoked)
    trust.remember_number(path, trust.load(path, [authority.certificate]))


def renew_deny_list(folder: Path, authority: Authority, *, forget: bool = False) -> SignedList:
    """Sign the deny list again with the next number; with `forget` it is emptied."""
    path = folder / files.REVOKED
    with files.lock_folder(folder):
        if forget:
            _sign_list(folder, authority, 1, {})
        else:
            deny_list = _load_deny_list(folder, authority)
            _sign_list(folder, authority, deny_list.number + 1, deny_list.revoked)
        return trust.load(path, [authority.certificate])


def list_issued(folder: Path) -> list[Peer]:
    """All readable certificates that were issued or copied here, the newest of each identity last."""
    peer_by_serial = {}
    for path in (*folder.glob(f"{ISSUED}/*.pem"), *folder.glob("*.pem")):
        if path.name == CA or path.name.startswith("."):
            continue
        with contextlib.suppress(IdentityError):
            peer = files.read_peer(files.parse_certificate(files.read(path, "a certificate"), str(path)))
            peer_by_serial[peer.serial] = peer
    return sorted(peer_by_serial.values(), key=lambda peer: (peer.identity, peer.not_before, peer.not_after))


def issue_ephemeral(run: str, workers: Iterable[str], folder: str | Path | None = None) -> dict[str, Files]:
    """Issue keys and certificates for a run on this machine only, in a new folder that only its user can enter; returns
    the files of each worker.

    The authority's key is never written: no certificate can be issued later. The new folder, the parent of every file,
    is created in `folder`; the caller deletes it.

    >>> import shutil
    >>> made = issue_ephemeral("demo", ["gpu/0", "npu/0"])
    >>> made["gpu/0"].cert.name, made["npu/0"].key.name
    ('gpu-worker-0.pem', 'npu-worker-0.key')
    >>> shutil.rmtree(made["gpu/0"].cert.parent)
    """
    moment = files.now()
    names = {worker: Identity.of_worker(run, worker) for worker in workers}
    authority = Authority.create(run, {}, _EPHEMERAL_DAYS, moment)
    fresh = Path(tempfile.mkdtemp(prefix="whale-nebula-", dir=folder))
    files.write(fresh / CA, encode_certificate(authority.certificate), files.PUBLIC)
    trust.save(fresh / files.REVOKED, run, authority.key, 1, {})
    return {
        worker: _issue(fresh, authority, identity, _EPHEMERAL_DAYS, moment).files for worker, identity in names.items()
    }
