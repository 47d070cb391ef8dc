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

HOME = Authority.fresh(RUN, {})
TRUST = Trust([HOME.certificate])


def signed(home: Authority = HOME, identity: Identity = GPU, days: float = 7, begin=None) -> x509.Certificate:
    at = begin or files.now()
    return authority.process_certificate(
        identity, authority.make_key().public_key(), home.certificate, home.key, at + days * DAY, at
    )


def test_a_good_certificate_says_who_it_is() -> None:
    shown = signed()
    for form in (shown, authority.certificate_bytes(shown), authority.certificate_bytes(shown).decode()):
        assert TRUST.check(form, GPU).identity == GPU
    found = TRUST.check(shown)
    assert (found.serial, found.not_after) == (files.serial(shown), shown.not_valid_after_utc)


def test_it_holds_what_the_design_says() -> None:
    shown = signed()
    assert files.alternative_names(shown) == ["nebula://mt/gpu/worker/0"]
    assert files.alternative_names(shown, x509.DNSName) == [GPU.dns]
    uses = shown.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert shown.public_key().curve.name == "secp256r1"
    assert files.now() - shown.not_valid_before_utc >= authority.SKEW


def test_one_that_signed_itself_is_told_from_that(tmp_path: Path) -> None:
    with pytest.raises(SelfSignedError):
        TRUST.check(write_self_signed(tmp_path, GPU).cert.read_bytes())


def test_dates() -> None:
    now = files.now()
    shown = signed(begin=now)
    TRUST.check(shown, at=now + 7 * DAY)
    with pytest.raises(ExpiredError, match="has expired") as told:
        TRUST.check(shown, at=now + 8 * DAY)
    assert "certs renew" in told.value.mend
    with pytest.raises(ExpiredError, match="not valid yet") as told:
        TRUST.check(shown, at=now - DAY)
    assert "clock" in told.value.why
    assert "set the clock" in told.value.mend


def test_an_authority_that_has_ended_is_told_from_a_certificate_that_has() -> None:
    now = files.now()
    old = Authority.fresh(RUN, {}, days=2, at=now)
    with pytest.raises(ExpiredError, match="authority") as told:
        Trust([old.certificate]).check(signed(old, days=7), at=now + 3 * DAY)
    assert "renew --ca" in told.value.mend


def test_somebody_else_is_refused() -> None:
    with pytest.raises(WrongNameError, match=r"expected npu/0, found gpu/0"):
        TRUST.check(signed(), NPU)
    with pytest.raises(WrongNameError):
        TRUST.check(signed(), Identity(RUN, "gpu", "gateway"))


def test_an_authority_speaks_for_its_own_run_only() -> None:
    with pytest.raises(WrongNameError, match="a different run"):
        TRUST.check(signed(identity=Identity("other", "gpu")))


def test_an_authority_is_no_process() -> None:
    with pytest.raises(IdentityError):
        TRUST.check(HOME.certificate)


def odd(*extensions: x509.ExtensionType) -> x509.Certificate:
    """A certificate that the authority signed, with other extensions."""
    from cryptography.hazmat.primitives import hashes

    now = files.now()
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(HOME.certificate.subject)
        .public_key(authority.make_key().public_key())
        .serial_number(7)
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )
    for each in extensions:
        builder = builder.add_extension(each, critical=False)
    return builder.sign(HOME.key, hashes.SHA256())


USES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
LEAF = x509.BasicConstraints(ca=False, path_length=None)


def names(*uris: str, dns: str = GPU.dns) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([*(x509.UniformResourceIdentifier(uri) for uri in uris), x509.DNSName(dns)])


@pytest.mark.parametrize(
    "extensions",
    [
        (USES, LEAF),
        (USES, LEAF, names()),
        (USES, LEAF, names(GPU.uri, NPU.uri)),
        (USES, LEAF, names("https://gpu")),
        (USES, LEAF, names(GPU.uri + "/")),
        (USES, LEAF, names(GPU.uri, dns=NPU.dns)),
        (LEAF, names(GPU.uri)),
        (USES, names(GPU.uri)),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), LEAF, names(GPU.uri)),
        (USES, x509.BasicConstraints(ca=True, path_length=0), names(GPU.uri)),
    ],
)
def test_even_the_authority_cannot_name_anything_else(extensions: tuple[x509.ExtensionType, ...]) -> None:
    with pytest.raises(WrongNameError):
        TRUST.check(odd(*extensions))
    assert TRUST.check(odd(USES, LEAF, names(GPU.uri))).identity == GPU


def test_a_strangers_text_stays_on_one_line() -> None:
    with pytest.raises(IdentityError) as told:
        TRUST.check(odd(USES, LEAF, names("nebula://mt/\n2026 allowed gpu/0")))
    assert "\n2026" not in str(told.value)


def test_a_new_authority_is_trusted_beside_the_old_one() -> None:
    new = Authority.fresh(RUN, {})
    both = Trust([HOME.certificate, new.certificate])
    assert both.check(signed()).identity == both.check(signed(new)).identity


def test_a_renewed_authority_counts_wherever_it_stands_in_the_file() -> None:
    at = files.now()
    old = authority.authority_certificate(HOME.run, HOME.key, at - DAY, at - 9 * DAY)
    for both in ([old, HOME.certificate], [HOME.certificate, old]):
        assert Trust(both).check(signed()).identity == GPU


class TestTheDenyList:
    """A file that the authority signs and numbers, and that every process reads again when it changes."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "revoked.json"

    def put(self, path: Path, number: int, *shown: x509.Certificate, by: Authority = HOME) -> None:
        entries = [Revocation(files.serial(each), GPU.uri, "2026-11-21T22:00:00Z", "stolen") for each in shown]
        denied.save(path, by.run, by.key, number, {each.serial: each for each in entries})

    def held(self, path: Path) -> DenyList:
        return DenyList(path, TRUST.authorities)

    def denies(self, found: DenyList, shown: x509.Certificate) -> bool:
        return found.find(files.serial(shown), TRUST.authorities) is not None

    def test_it_is_read_again_on_a_live_channel(self, path: Path) -> None:
        shown = signed()
        self.put(path, 1)
        trust = Trust([HOME.certificate], self.held(path))
        peer = trust.check(shown)
        check_live(trust, peer)
        self.put(path, 2, shown)
        with pytest.raises(RevokedError):
            check_live(trust, peer)
        with pytest.raises(ExpiredError):
            check_live(trust, peer, files.now() + 8 * DAY)
        assert trust.denied.number == 2

    def test_an_authority_that_is_taken_out_ends_those_whom_it_has_signed(self) -> None:
        other = Authority.fresh("mt", {})
        peer = Trust([HOME.certificate, other.certificate]).check(signed())
        check_live(Trust([HOME.certificate]), peer)
        with pytest.raises(WrongAuthorityError):
            check_live(Trust([other.certificate]), peer)

    @pytest.mark.parametrize(
        "text", [b"", b"{", b"[]", b'{"format": "x", "revoked": {}}', b'{"revoked": 3}', b"[" * 9999]
    )
    def test_one_that_does_not_read_is_refused_at_the_start(self, path: Path, text: bytes) -> None:
        path.write_bytes(text)
        with pytest.raises(CredentialsError, match="deny list"):
            self.held(path)

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
    def test_one_that_somebody_changed_is_refused(self, path: Path, change: dict) -> None:
        self.put(path, 7, signed())
        self.held(path)
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
        with pytest.raises(CredentialsError, match="deny list"):
            self.held(path)

    def test_one_that_somebody_else_signed_is_refused(self, path: Path) -> None:
        for other in (Authority.fresh(RUN, {}), Authority.fresh("other", {})):
            self.put(path, 9, by=other)
            with pytest.raises(CredentialsError, match="not signed by the run's authority"):
                self.held(path)

    @pytest.mark.parametrize("how", ["spoilt", "deleted", "older", "forged"])
    def test_later_it_takes_nothing_back(self, path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
        shown = signed()
        self.put(path, 2, shown)
        found = self.held(path)
        match how:
            case "spoilt":
                path.write_text("{")
            case "deleted":
                path.unlink()
            case "older":
                self.put(path, 1)
            case "forged":
                self.put(path, 3, by=Authority.fresh(RUN, {}))
        with caplog.at_level(logging.WARNING, "whale_nebula.security"):
            assert [self.denies(found, shown) for _ in range(3)] == [True] * 3
        assert len(caplog.records) == 1

    def test_one_that_could_not_be_read_once_is_read_again(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shown, clock = signed(), [0.0]
        self.put(path, 1)
        found = DenyList(path, TRUST.authorities, now=lambda: clock[0])
        self.put(path, 2, shown)

        def fail(*_: object, **__: object) -> bytes:
            raise CredentialsError("the deny list cannot be read", why="Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(files, "read", fail)
            assert not self.denies(found, shown)
        clock[0] = 1.0
        assert self.denies(found, shown)

    def test_an_older_copy_is_refused_after_a_restart_too(self, path: Path) -> None:
        self.put(path, 1)
        old = path.read_bytes()
        self.put(path, 2, signed())
        self.held(path)
        path.write_bytes(old)
        with pytest.raises(CredentialsError, match="is outdated") as told:
            self.held(path)
        assert "number is 1, but this host has used number 2" in told.value.why

    def test_where_nothing_may_be_written_the_process_remembers_alone(self, tmp_path: Path) -> None:
        """As in a secret that Kubernetes mounts."""
        path = tmp_path / "mounted" / "revoked.json"
        path.parent.mkdir()
        self.put(path, 2, shown := signed())
        denied._record(path).mkdir()  # root may write everywhere, but not into a folder as if it were a file
        found = self.held(path)
        self.put(path, 1)
        assert self.denies(found, shown)
        assert self.held(path).number == 1

    def test_what_the_authority_takes_off_is_off(self, path: Path) -> None:
        shown = signed()
        self.put(path, 1, shown)
        found = self.held(path)
        assert self.denies(found, shown)
        self.put(path, 2)
        assert not self.denies(found, shown)

    def test_a_renewed_authority_has_the_same_key_and_its_lists_stay_good(self, path: Path) -> None:
        moment = files.now()
        renewed = authority.authority_certificate(RUN, HOME.key, moment + 90 * DAY, moment)
        self.put(path, 1, shown := signed())
        assert DenyList(path, [renewed]).find(files.serial(shown), [renewed]) is not None

    def test_a_list_of_a_new_authority_is_taken_once_that_is_trusted(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[object] = []
        monkeypatch.setattr(denied._LOG, "warning", lambda *about: said.append(about))
        new, shown, serial = Authority.fresh(RUN, {}), signed(), ""
        self.put(path, 5, shown)
        found, serial = self.held(path), files.serial(theirs := signed(new))
        self.put(path, 1, theirs, by=new)
        assert found.find(serial, TRUST.authorities) is None
        both = [HOME.certificate, new.certificate]
        assert found.find(serial, both) is not None
        assert found.find(files.serial(shown), both) is not None  # that list is still the newest of its authority
        assert len(said) == 1, said

    def test_asking_reads_the_file_only_when_it_changed(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.put(path, 1)
        found = self.held(path)
        before = os.stat(path)
        path.write_text("{" + " " * (before.st_size - 1))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with caplog.at_level(logging.WARNING, "whale_nebula.security"):
            assert found.find("00", TRUST.authorities) is None
        assert caplog.records == []  # the same size, time and place: had it been read, it would not have read


SAMPLES = {"certificates": 1500, "heads": 750, "lists": 250, "logs": 125}


def test_every_target_has_a_sample() -> None:
    assert SAMPLES.keys() == credentials.TARGETS.keys()


@pytest.mark.parametrize("target", SAMPLES)
def test_no_error_of_another_kind_leaves_a_decoder(target: str) -> None:
    report = credentials.run(target, 1, SAMPLES[target])
    assert report["failure"] is None, report["failure"]
    assert report["mutations"] == SAMPLES[target]
