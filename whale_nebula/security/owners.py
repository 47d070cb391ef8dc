"""Several owners, each with an authority: certificate requests, which contain no private key, and the authorities
that a host trusts.

certs/
  gpu-worker-0.key   created on the worker's host by a request: never copied
  gpu-worker-0.csr   the request, sent to the cluster's owner: the answer is gpu-worker-0.pem
  ca.pem             the certificates of all owners' authorities, each restricted to its clusters
  revoked.json       the deny list of one authority
  revoked-npu.json   the deny list of another
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from whale_nebula.errors import CredentialsError, IdentityError
from whale_nebula.security import files, trust
from whale_nebula.security.authority import (
    CA,
    Authority,
    check_current,
    encode_certificate,
    encode_key,
    load_certificates,
    make_key,
    prepare_folder,
)
from whale_nebula.security.files import UNREADABLE, Files
from whale_nebula.security.identity import Identity
from whale_nebula.security.issue import DAYS, Issued, certify


class CertificateRequest(NamedTuple):
    """A request for a certificate: its file, that of its key, and the first digits of the digest of the public key."""

    identity: Identity
    path: Path
    key: Path
    digest: str


def request(folder: Path, identity: Identity) -> CertificateRequest:
    """Write a request for the certificate of a process; its key is created here, unless it exists."""
    prepare_folder(folder)
    path = Files.in_folder(folder, identity).key
    with files.lock_folder(folder):
        if path.exists():
            key = files.parse_private_key(files.read(path, "the key of this process", secret=True), str(path))
        else:
            key = make_key()
            files.write(path, encode_key(key), files.SECRET, replace=False)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.worker)])
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns)])
        builder = x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(names, critical=False)
        signed = builder.sign(key, hashes.SHA256())
        target = path.with_suffix(".csr")
        files.write(target, signed.public_bytes(serialization.Encoding.PEM), files.PUBLIC)
    return CertificateRequest(identity, target, path, files.digest_public_key(key.public_key())[:32])


def read_request(data: bytes, where: str) -> tuple[Identity, ec.EllipticCurvePublicKey]:
    """The identity and public key in a certificate request, which must be signed with the private key."""
    try:
        signing_request = x509.load_pem_x509_csr(data)
        key, is_signed = signing_request.public_key(), signing_request.is_signature_valid
        names = signing_request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, *UNREADABLE):
        raise CredentialsError("not a certificate request", where=where, mend="whale-nebula certs request") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1) or not is_signed:
        why = "its key is not a P-256 key, or its sender does not have the private key"
        raise CredentialsError("the request is not signed with its own key", where=where, why=why)
    try:
        (uri,) = uris
        return Identity.parse(str(uri)), key
    except (ValueError, IdentityError):
        raise CredentialsError(
            "the request does not name an identity", where=where, mend="whale-nebula certs request"
        ) from None


def sign(
    folder: Path, authority: Authority, paths: Sequence[Path], days: float = DAYS, at: datetime | None = None
) -> list[Issued]:
    """Issue certificates for requests, or raise before any of them is created."""
    moment = at or files.now()
    check_current(authority, moment)
    requests = [(path, *read_request(files.read(path, "a request"), str(path))) for path in paths]
    with files.lock_folder(folder):
        return [certify(folder, authority, identity, key, days, moment, str(path)) for path, identity, key in requests]


def trust_owner(folder: Path, ca: Path, revoked: Path | None) -> list[str]:
    """Trust the authority of another owner, for its clusters only: add it to `ca.pem`, and store its deny list. Returns
    the names of the changed files.
    """
    prepare_folder(folder)
    added = files.parse_certificates(files.read(ca, "the authority's certificate"), str(ca))
    with files.lock_folder(folder):
        ca_path = folder / CA
        trusted = load_certificates(folder) if ca_path.exists() else []
        for each in added:
            _check_authority(each, trusted, ca)
        keys = {files.digest_certificate_key(each) for each in added}
        kept = [each for each in trusted if files.digest_certificate_key(each) not in keys]
        changed = [str(ca_path)]
        if revoked is not None:
            changed += map(str, filter(None, [store_deny_list(folder, files.read(revoked, "the deny list"), added)]))
        files.write(ca_path, b"".join(map(encode_certificate, [*kept, *added])), files.PUBLIC)
    return changed


def store_deny_list(
    folder: Path, data: bytes, authorities: Sequence[x509.Certificate], *, refuse: bool = True
) -> Path | None:
    """Store the deny list of one of these authorities, in the file that has an older list of it; returns the file, or
    None if this list is stored already. An outdated list, or one of another authority, raises; without `refuse` it is
    ignored. The caller has locked the folder.
    """
    try:
        deny_list = trust.parse(data, "the deny list", authorities)
    except CredentialsError:
        if refuse:
            raise
        return None
    signer = next(each for each in authorities if files.digest_certificate_key(each) == deny_list.signer)
    own_path, clusters = folder / files.REVOKED, files.list_authority_clusters(signer)
    target = own_path if not own_path.exists() or not clusters else folder / f"revoked-{clusters[0]}.json"
    stored_number = 0
    for path in [own_path, *sorted(folder.glob("revoked-*.json"))]:
        with contextlib.suppress(CredentialsError):
            stored_number, target = trust.load(path, [signer]).number, path
    is_outdated = deny_list.number < max(stored_number, trust.read_highest_number(target, deny_list.signer))
    if is_outdated and refuse:
        raise CredentialsError("the deny list is outdated", where=str(target), mend="ask its owner for the newest list")
    if is_outdated or deny_list.number == stored_number:
        return None
    files.write(target, data, files.PUBLIC)
    return target


def _check_authority(new: x509.Certificate, known: Sequence[x509.Certificate], where: Path) -> None:
    """Check that an authority may be trusted in addition to those that are already trusted."""
    run, clusters = files.find_authority_run(new), files.list_authority_clusters(new)
    if run is None or not clusters:
        raise CredentialsError(
            "the authority is not restricted to clusters" if run else "not an authority's certificate",
            where=str(where),
            why="it could certify workers of every cluster" if run else None,
            mend="ask its owner for an authority of their clusters only: whale-nebula certs init --cluster NAME",
        )
    for each in known:
        if each.public_key() == new.public_key():
            continue
        other_clusters = files.list_authority_clusters(each)
        if files.find_authority_run(each) != run:
            raise CredentialsError(
                f"the authority is for run {run!r}", where=str(where), why="ca.pem is for a different run"
            )
        shared = sorted({*clusters} & {*other_clusters}) if other_clusters else list(clusters)
        if shared:
            raise CredentialsError(
                f"ca.pem already contains an authority for {', '.join(shared)}",
                where=str(where),
                why="a cluster has exactly one owner",
                mend="remove the old authority from ca.pem, if it is no longer valid",
            )
