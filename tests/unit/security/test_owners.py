"""Owners with an authority each: keys that never leave their host, and no identity in others' clusters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.unit.security.authorities import DAY, GPU, NPU, RUN
from whale_nebula.errors import CredentialsError, IdentityError, RevokedError, WrongNameError
from whale_nebula.security import Credentials, Identity, Trust, authority, files, issue, owners, trust
from whale_nebula.security.authority import Authority
from whale_nebula.security.trust import DenyList, Revocation


class Owner(NamedTuple):
    """An owner: the folder and the authority."""

    folder: Path
    authority: Authority

    @classmethod
    def of(cls, folder: Path, cluster: str, run: str = RUN) -> Owner:
        authority.create(folder, Authority.create(run, {}, bound=[cluster]))
        return cls(folder, authority.load(folder))

    @property
    def ca(self) -> Path:
        return self.folder / authority.CA

    @property
    def revoked(self) -> Path:
        return self.folder / files.REVOKED


@pytest.fixture
def gpu(tmp_path: Path) -> Owner:
    return Owner.of(tmp_path / "gpu", "gpu")


@pytest.fixture
def npu(tmp_path: Path) -> Owner:
    return Owner.of(tmp_path / "npu", "npu")


def exchange_trust(one: Owner, other: Owner) -> None:
    owners.trust_owner(one.folder, other.ca, other.revoked)
    owners.trust_owner(other.folder, one.ca, one.revoked)


def load_trust(folder: Path) -> Trust:
    known = authority.load_certificates(folder)
    return Trust(known, DenyList(folder / files.REVOKED, known))


def sign_certificate(owner: Owner, identity: Identity) -> x509.Certificate:
    """Sign a certificate without the checks of the command."""
    at, key = files.now(), authority.make_key().public_key()
    own = owner.authority
    return authority.make_process_certificate(identity, key, own.certificate, own.key, at + DAY, at)


def test_key_stays_on_the_host_that_requests_a_certificate(gpu: Owner, npu: Owner, tmp_path: Path) -> None:
    exchange_trust(gpu, npu)
    host = tmp_path / "host"
    asked = owners.request(host, GPU)
    assert {each.name for each in host.iterdir()} == {"issued", "gpu-worker-0.key", "gpu-worker-0.csr"}
    assert owners.request(host, GPU).digest == asked.digest  # a second request uses the same key
    [signed] = owners.sign(gpu.folder, gpu.authority, [asked.path])
    assert signed.peer.key.startswith(asked.digest) and not signed.files.key.exists()
    for path in (signed.files.cert, gpu.ca, *gpu.folder.glob("revoked*.json")):
        (host / path.name).write_bytes(path.read_bytes())
    found = Credentials.load(files.Files.in_folder(host, GPU))
    assert found.identity == GPU
    assert load_trust(npu.folder).check(found.cert_pem, GPU).serial == found.serial
    renewed = owners.sign(gpu.folder, gpu.authority, [asked.path], 3)[0]
    assert renewed.peer.key == signed.peer.key and renewed.peer.serial != signed.peer.serial


def test_authority_certifies_only_its_own_clusters(gpu: Owner, npu: Owner) -> None:
    exchange_trust(gpu, npu)
    both = load_trust(gpu.folder)
    assert (
        both.check(sign_certificate(gpu, GPU)).identity == GPU
        and both.check(sign_certificate(npu, NPU)).identity == NPU
    )
    for owner, identity in ((gpu, NPU), (npu, GPU), (npu, Identity(RUN, "gpu", "gateway"))):
        with pytest.raises(WrongNameError, match="in a cluster that its authority may not certify"):
            both.check(sign_certificate(owner, identity))
        with pytest.raises(CredentialsError, match="may certify"):
            issue.issue(owner.folder, owner.authority, [identity])


def test_owner_revokes_only_certificates_of_own_clusters(gpu: Owner, npu: Owner) -> None:
    exchange_trust(gpu, npu)
    [mine], [his] = issue.issue(gpu.folder, gpu.authority, [GPU]), issue.issue(npu.folder, npu.authority, [NPU])
    both, kept = load_trust(gpu.folder), gpu.folder / "revoked-npu.json"
    entries = [Revocation(each.peer.serial, each.peer.identity.uri, "now", "why") for each in (mine, his)]
    trust.save(kept, RUN, npu.authority.key, 2, {each.serial: each for each in entries})
    assert both.check(mine.peer.certificate).identity == GPU
    with pytest.raises(RevokedError, match="npu/0 was revoked"):
        both.check(his.peer.certificate)


def test_deny_lists_of_owners_are_independent(gpu: Owner, npu: Owner, caplog: pytest.LogCaptureFixture) -> None:
    """A missing or outdated list keeps its revocations, and the other list stays in use."""
    exchange_trust(gpu, npu)
    [his], [mine] = issue.issue(npu.folder, npu.authority, [NPU]), issue.issue(gpu.folder, gpu.authority, [GPU])
    both, kept = load_trust(gpu.folder), gpu.folder / "revoked-npu.json"
    old = kept.read_bytes()
    issue.revoke(npu.folder, npu.authority, [his.peer.serial], "sold")
    owners.trust_owner(gpu.folder, npu.ca, npu.revoked)
    for change in (lambda: None, lambda: kept.write_bytes(old), kept.unlink):
        change()
        with pytest.raises(RevokedError):
            both.check(his.peer.certificate)
    assert both.check(mine.peer.certificate).identity == GPU
    issue.revoke(gpu.folder, gpu.authority, [mine.peer.serial], "sold")
    with pytest.raises(RevokedError):
        both.check(mine.peer.certificate)
    with pytest.raises(CredentialsError, match="no deny list of the authority for npu"):
        load_trust(gpu.folder)


def test_renewed_authority_keeps_other_authorities(gpu: Owner, npu: Owner) -> None:
    exchange_trust(gpu, npu)
    issue.renew_authority(gpu.folder)
    known = authority.load_certificates(gpu.folder)
    assert [files.list_authority_clusters(each) for each in known] == [("gpu",), ("npu",)]
    assert authority.load(gpu.folder).bound == ("gpu",)


def write_request(path: Path, uris: list[str], key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> Path:
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(each) for each in uris])
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).add_extension(names, critical=False)
    path.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path


def corrupt_signature(path: Path) -> Path:
    """Write a request with an invalid signature."""
    one = x509.load_pem_x509_csr(write_request(path, [GPU.uri], authority.make_key()).read_bytes())
    data = bytearray(one.public_bytes(serialization.Encoding.DER))
    data[-1] ^= 1
    path.write_bytes(x509.load_der_x509_csr(bytes(data)).public_bytes(serialization.Encoding.PEM))
    return path


REQUESTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no file": (lambda path: path, "cannot read a request"),
    "not a request": (lambda path: (path.write_text("hello"), path)[1], "not a certificate request"),
    "another's signature": (corrupt_signature, "with its own key"),
    "another kind of key": (
        lambda path: write_request(path, [GPU.uri], rsa.generate_private_key(65537, 2048)), "with its own key"
    ),
    "another curve": (
        lambda path: write_request(path, [GPU.uri], ec.generate_private_key(ec.SECP384R1())), "with its own key"
    ),
    "no name": (lambda path: write_request(path, ["https://gpu"], authority.make_key()), "not name an identity"),
    "two names": (lambda path: write_request(path, [GPU.uri, NPU.uri], authority.make_key()), "not name an identity"),
    "another run": (
        lambda path: write_request(path, ["nebula://other/gpu/worker/0"], authority.make_key()), "run 'mt', not for"
    ),
    "another's cluster": (lambda path: write_request(path, [NPU.uri], authority.make_key()), ", not npu"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REQUESTS.values(), ids=REQUESTS)
def test_invalid_certificate_request_is_refused(
    make: Callable[[Path], Path], message: str, gpu: Owner, tmp_path: Path
) -> None:
    good = owners.request(tmp_path / "host", Identity(RUN, "gpu", "worker", 7)).path
    with pytest.raises(CredentialsError, match=message):
        owners.sign(gpu.folder, gpu.authority, [make(tmp_path / "one.csr"), good])


def test_second_or_revoked_key_is_refused(gpu: Owner, tmp_path: Path) -> None:
    first, second = (owners.request(tmp_path / name, GPU).path for name in ("host", "thief"))
    [signed] = owners.sign(gpu.folder, gpu.authority, [first])
    with pytest.raises(CredentialsError, match="gpu/0 already has a certificate"):
        owners.sign(gpu.folder, gpu.authority, [second])
    issue.revoke(gpu.folder, gpu.authority, [signed.peer.serial], "stolen")
    with pytest.raises(CredentialsError, match="the key of gpu/0 was revoked"):
        owners.sign(gpu.folder, gpu.authority, [first])
    assert owners.sign(gpu.folder, gpu.authority, [second])[0].peer.identity == GPU


class Untrusted(NamedTuple):
    """The certificate and deny list of an owner, and the expected error."""

    make: Callable[[Path], tuple[Path, Path | None]]
    said: str


def make_unrestricted_authority(folder: Path) -> tuple[Path, Path | None]:
    authority.create(folder, Authority.create(RUN, {}))
    return folder / authority.CA, None


def make_worker_certificate(folder: Path) -> tuple[Path, Path | None]:
    owner = Owner.of(folder, "npu")
    return issue.issue(owner.folder, owner.authority, [NPU])[0].files.cert, None


def make_foreign_deny_list(folder: Path) -> tuple[Path, Path | None]:
    return Owner.of(folder / "a", "npu").ca, Owner.of(folder / "b", "npu").revoked


UNTRUSTED = {
    "for all clusters": Untrusted(make_unrestricted_authority, "the authority is not restricted to clusters"),
    "a worker certificate": Untrusted(make_worker_certificate, "not an authority's certificate"),
    "for the own cluster": Untrusted(lambda folder: (Owner.of(folder, "gpu").ca, None), "an authority for gpu"),
    "for another run": Untrusted(lambda folder: (Owner.of(folder, "npu", "other").ca, None), "for run 'other'"),
    "with a deny list of another owner": Untrusted(make_foreign_deny_list, "not signed by the run's authority"),
}


@pytest.mark.parametrize("case", UNTRUSTED.values(), ids=UNTRUSTED)
def test_untrustworthy_owner_is_refused(case: Untrusted, gpu: Owner, tmp_path: Path) -> None:
    given, before = case.make(tmp_path / "other"), gpu.ca.read_bytes()
    with pytest.raises(IdentityError, match=case.said):
        owners.trust_owner(gpu.folder, *given)
    assert gpu.ca.read_bytes() == before and not [*gpu.folder.glob("revoked-*")]


def test_older_deny_list_is_refused(gpu: Owner, npu: Owner, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_bytes(npu.revoked.read_bytes())
    issue.revoke(npu.folder, npu.authority, [issue.issue(npu.folder, npu.authority, [NPU])[0].peer.serial], "sold")
    owners.trust_owner(gpu.folder, npu.ca, npu.revoked)
    load_trust(gpu.folder)  # a process reads the newer list
    with pytest.raises(CredentialsError, match="is outdated"):
        owners.trust_owner(gpu.folder, npu.ca, old)
