"""Trust in certificates: each rule refuses its case, with its own error; and a sample of hostile ones."""

import json
import logging
import os
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.fuzz import credentials
from tests.unit.security.authorities import DAY, GPU, NPU, RUN, write_self_signed
from whale_nebula.errors import (
    CredentialsError,
    ExpiredError,
    IdentityError,
    RevokedError,
    SelfSignedError,
    WrongAuthorityError,
    WrongNameError,
)
from whale_nebula.security import Identity, Trust, authority, check_live, files
from whale_nebula.security import trust as denied
from whale_nebula.security.authority import Authority
from whale_nebula.security.trust import DenyList, Revocation

AUTHORITY = Authority.create(RUN, {})
TRUST = Trust([AUTHORITY.certificate])


def sign_certificate(
    home: Authority = AUTHORITY, identity: Identity = GPU, days: float = 7, begin=None
) -> x509.Certificate:
    at = begin or files.now()
    return authority.make_process_certificate(
        identity, authority.make_key().public_key(), home.certificate, home.key, at + days * DAY, at
    )


def test_valid_certificate_gives_its_identity() -> None:
    shown = sign_certificate()
    for form in (shown, authority.encode_certificate(shown), authority.encode_certificate(shown).decode()):
        assert TRUST.check(form, GPU).identity == GPU
    found = TRUST.check(shown)
    assert (found.serial, found.not_after) == (files.format_serial(shown), shown.not_valid_after_utc)


def test_certificate_has_expected_names_uses_and_dates() -> None:
    shown = sign_certificate()
    assert files.list_alternative_names(shown) == ["nebula://mt/gpu/worker/0"]
    assert files.list_alternative_names(shown, x509.DNSName) == [GPU.dns]
    uses = shown.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert shown.public_key().curve.name == "secp256r1"
    assert files.now() - shown.not_valid_before_utc >= authority.SKEW


def test_self_signed_certificate_is_refused_as_such(tmp_path: Path) -> None:
    with pytest.raises(SelfSignedError):
        TRUST.check(write_self_signed(tmp_path, GPU).cert.read_bytes())


def test_expired_and_not_yet_valid_certificates_are_refused() -> None:
    now = files.now()
    shown = sign_certificate(begin=now)
    TRUST.check(shown, at=now + 7 * DAY)
    with pytest.raises(ExpiredError, match="has expired") as caught:
        TRUST.check(shown, at=now + 8 * DAY)
    assert "certs renew" in caught.value.mend
    with pytest.raises(ExpiredError, match="not valid yet") as caught:
        TRUST.check(shown, at=now - DAY)
    assert "clock" in caught.value.why
    assert "set the clock" in caught.value.mend


def test_expired_authority_is_reported_as_authority() -> None:
    now = files.now()
    old = Authority.create(RUN, {}, days=2, at=now)
    with pytest.raises(ExpiredError, match="authority") as caught:
        Trust([old.certificate]).check(sign_certificate(old, days=7), at=now + 3 * DAY)
    assert "renew --ca" in caught.value.mend


def test_certificate_of_another_identity_is_refused() -> None:
    with pytest.raises(WrongNameError, match=r"expected npu/0, found gpu/0"):
        TRUST.check(sign_certificate(), NPU)
    with pytest.raises(WrongNameError):
        TRUST.check(sign_certificate(), Identity(RUN, "gpu", "gateway"))


def test_certificate_for_another_run_is_refused() -> None:
    with pytest.raises(WrongNameError, match="a different run"):
        TRUST.check(sign_certificate(identity=Identity("other", "gpu")))


def test_authority_certificate_is_refused_as_process() -> None:
    with pytest.raises(IdentityError):
        TRUST.check(AUTHORITY.certificate)


def sign_with_extensions(*extensions: x509.ExtensionType) -> x509.Certificate:
    """Sign a certificate with these extensions."""
    from cryptography.hazmat.primitives import hashes

    now = files.now()
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(AUTHORITY.certificate.subject)
        .public_key(authority.make_key().public_key())
        .serial_number(7)
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )
    for each in extensions:
        builder = builder.add_extension(each, critical=False)
    return builder.sign(AUTHORITY.key, hashes.SHA256())


USES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
LEAF = x509.BasicConstraints(ca=False, path_length=None)


def make_alternative_names(*uris: str, dns: str = GPU.dns) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([*(x509.UniformResourceIdentifier(uri) for uri in uris), x509.DNSName(dns)])


@pytest.mark.parametrize(
    "extensions",
    [
        (USES, LEAF),
        (USES, LEAF, make_alternative_names()),
        (USES, LEAF, make_alternative_names(GPU.uri, NPU.uri)),
        (USES, LEAF, make_alternative_names("https://gpu")),
        (USES, LEAF, make_alternative_names(GPU.uri + "/")),
        (USES, LEAF, make_alternative_names(GPU.uri, dns=NPU.dns)),
        (LEAF, make_alternative_names(GPU.uri)),
        (USES, make_alternative_names(GPU.uri)),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), LEAF, make_alternative_names(GPU.uri)),
        (USES, x509.BasicConstraints(ca=True, path_length=0), make_alternative_names(GPU.uri)),
    ],
)
def test_certificate_with_unexpected_extensions_is_refused(extensions: tuple[x509.ExtensionType, ...]) -> None:
    with pytest.raises(WrongNameError):
        TRUST.check(sign_with_extensions(*extensions))
    assert TRUST.check(sign_with_extensions(USES, LEAF, make_alternative_names(GPU.uri))).identity == GPU


def test_text_of_certificate_in_error_stays_on_one_line() -> None:
    with pytest.raises(IdentityError) as caught:
        TRUST.check(sign_with_extensions(USES, LEAF, make_alternative_names("nebula://mt/\n2026 allowed gpu/0")))
    assert "\n2026" not in str(caught.value)


def test_two_authorities_can_be_trusted() -> None:
    new = Authority.create(RUN, {})
    both = Trust([AUTHORITY.certificate, new.certificate])
    assert both.check(sign_certificate()).identity == both.check(sign_certificate(new)).identity


def test_renewed_authority_is_valid_in_any_order() -> None:
    at = files.now()
    old = authority.make_authority_certificate(AUTHORITY.run, AUTHORITY.key, at - DAY, at - 9 * DAY)
    for both in ([old, AUTHORITY.certificate], [AUTHORITY.certificate, old]):
        assert Trust(both).check(sign_certificate()).identity == GPU


class TestDenyList:
    """The deny list: signed, numbered, and read again when it changes."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "revoked.json"

    def write_list(self, path: Path, number: int, *shown: x509.Certificate, by: Authority = AUTHORITY) -> None:
        entries = [Revocation(files.format_serial(each), GPU.uri, "2026-11-21T22:00:00Z", "stolen") for each in shown]
        denied.save(path, by.run, by.key, number, {each.serial: each for each in entries})

    def open_list(self, path: Path) -> DenyList:
        return DenyList(path, TRUST.authorities)

    def denies(self, found: DenyList, shown: x509.Certificate) -> bool:
        return found.find(files.format_serial(shown), TRUST.authorities) is not None

    def test_changed_list_is_read_for_a_live_peer(self, path: Path) -> None:
        shown = sign_certificate()
        self.write_list(path, 1)
        trust = Trust([AUTHORITY.certificate], self.open_list(path))
        peer = trust.check(shown)
        check_live(trust, peer)
        self.write_list(path, 2, shown)
        with pytest.raises(RevokedError):
            check_live(trust, peer)
        with pytest.raises(ExpiredError):
            check_live(trust, peer, files.now() + 8 * DAY)
        assert trust.denied.number == 2

    def test_peer_of_removed_authority_is_refused(self) -> None:
        other = Authority.create("mt", {})
        peer = Trust([AUTHORITY.certificate, other.certificate]).check(sign_certificate())
        check_live(Trust([AUTHORITY.certificate]), peer)
        with pytest.raises(WrongAuthorityError):
            check_live(Trust([other.certificate]), peer)

    @pytest.mark.parametrize(
        "text", [b"", b"{", b"[]", b'{"format": "x", "revoked": {}}', b'{"revoked": 3}', b"[" * 9999]
    )
    def test_malformed_list_is_refused_at_start(self, path: Path, text: bytes) -> None:
        path.write_bytes(text)
        with pytest.raises(CredentialsError, match="deny list"):
            self.open_list(path)

    @pytest.mark.parametrize(
        "change",
        [
            {"revoked": {}},
            {"number": 8},
            {"number": True},
            {"number": 0},
            {"run": "other"},
            {"signature": None},
            {"signature": "é"},
            {"signature": "MAA="},
            {"more": 1},
            {"revoked": {"../x": {"who": "", "when": "", "why": ""}}},
        ],
    )
    def test_modified_list_is_refused(self, path: Path, change: dict) -> None:
        self.write_list(path, 7, sign_certificate())
        self.open_list(path)
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
        with pytest.raises(CredentialsError, match="deny list"):
            self.open_list(path)

    def test_list_of_another_signer_is_refused(self, path: Path) -> None:
        for other in (Authority.create(RUN, {}), Authority.create("other", {})):
            self.write_list(path, 9, by=other)
            with pytest.raises(CredentialsError, match="not signed by the run's authority"):
                self.open_list(path)

    @pytest.mark.parametrize("how", ["spoilt", "deleted", "older", "forged"])
    def test_invalid_new_list_keeps_revocations(self, path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
        shown = sign_certificate()
        self.write_list(path, 2, shown)
        found = self.open_list(path)
        match how:
            case "spoilt":
                path.write_text("{")
            case "deleted":
                path.unlink()
            case "older":
                self.write_list(path, 1)
            case "forged":
                self.write_list(path, 3, by=Authority.create(RUN, {}))
        with caplog.at_level(logging.WARNING, "whale_nebula.security"):
            assert [self.denies(found, shown) for _ in range(3)] == [True] * 3
        assert len(caplog.records) == 1

    def test_unreadable_list_is_read_again_later(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shown, clock = sign_certificate(), [0.0]
        self.write_list(path, 1)
        found = DenyList(path, TRUST.authorities, now=lambda: clock[0])
        self.write_list(path, 2, shown)

        def fail(*_: object, **__: object) -> bytes:
            raise CredentialsError("the deny list cannot be read", why="Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(files, "read", fail)
            assert not self.denies(found, shown)
        clock[0] = 1.0
        assert self.denies(found, shown)

    def test_older_list_is_refused_after_restart(self, path: Path) -> None:
        self.write_list(path, 1)
        old = path.read_bytes()
        self.write_list(path, 2, sign_certificate())
        self.open_list(path)
        path.write_bytes(old)
        with pytest.raises(CredentialsError, match="is outdated") as caught:
            self.open_list(path)
        assert "number is 1, but this host has used number 2" in caught.value.why

    def test_highest_number_is_kept_in_memory_on_read_only_folder(self, tmp_path: Path) -> None:
        """Kubernetes mounts secrets read-only."""
        path = tmp_path / "mounted" / "revoked.json"
        path.parent.mkdir()
        self.write_list(path, 2, shown := sign_certificate())
        denied._highest_file(path).mkdir()  # root may write everywhere, but not to a folder
        found = self.open_list(path)
        self.write_list(path, 1)
        assert self.denies(found, shown)
        assert self.open_list(path).number == 1

    def test_removed_entry_is_no_longer_denied(self, path: Path) -> None:
        shown = sign_certificate()
        self.write_list(path, 1, shown)
        found = self.open_list(path)
        assert self.denies(found, shown)
        self.write_list(path, 2)
        assert not self.denies(found, shown)

    def test_list_stays_valid_after_authority_renewal(self, path: Path) -> None:
        moment = files.now()
        renewed = authority.make_authority_certificate(RUN, AUTHORITY.key, moment + 90 * DAY, moment)
        self.write_list(path, 1, shown := sign_certificate())
        assert DenyList(path, [renewed]).find(files.format_serial(shown), [renewed]) is not None

    def test_list_of_new_authority_is_used_once_trusted(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[object] = []
        monkeypatch.setattr(denied._LOG, "warning", lambda *about: said.append(about))
        new, shown, serial = Authority.create(RUN, {}), sign_certificate(), ""
        self.write_list(path, 5, shown)
        found, serial = self.open_list(path), files.format_serial(theirs := sign_certificate(new))
        self.write_list(path, 1, theirs, by=new)
        assert found.find(serial, TRUST.authorities) is None
        both = [AUTHORITY.certificate, new.certificate]
        assert found.find(serial, both) is not None
        assert (
            found.find(files.format_serial(shown), both) is not None
        )  # that list is still the newest of its authority
        assert len(said) == 1, said

    def test_unchanged_list_is_not_read_again(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.write_list(path, 1)
        found = self.open_list(path)
        before = os.stat(path)
        path.write_text("{" + " " * (before.st_size - 1))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with caplog.at_level(logging.WARNING, "whale_nebula.security"):
            assert found.find("00", TRUST.authorities) is None
        assert caplog.records == []  # same size, time and inode: the invalid content was not read


SAMPLES = {"certificates": 1500, "heads": 750, "lists": 250, "logs": 125}


def test_sample_sizes_cover_all_fuzz_targets() -> None:
    assert SAMPLES.keys() == credentials.TARGETS.keys()


@pytest.mark.parametrize("target", SAMPLES)
def test_mutated_credentials_raise_only_expected_errors(target: str) -> None:
    report = credentials.run(target, 1, SAMPLES[target])
    assert report["failure"] is None, report["failure"]
    assert report["mutations"] == SAMPLES[target]
