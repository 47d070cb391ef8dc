"""Credentials of a process: consistent or refused, renewed without interruption, and proved to a peer."""

import logging
import os
import shutil
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from tests.unit.security.authorities import DAY, GPU, NPU, Home
from whale_nebula.config.schema import Security
from whale_nebula.errors import CredentialsError, IdentityError, WrongAuthorityError, WrongNameError
from whale_nebula.security import Credentials, CurrentCredentials, Files, Prover, authority, files, issue


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path / "certs")


def test_credentials_need_a_deny_list_unless_configured_as_none(home: Home) -> None:
    """A missing list may have been lost; only `revoked: none` disables it."""
    paths = home.files(GPU)
    (home.folder / "revoked.json").unlink()
    with pytest.raises(CredentialsError, match="the deny list is missing"):
        Credentials.load(paths)
    none = Files.from_config(Security(ca=str(paths.ca), cert=str(paths.cert), key=str(paths.key), revoked="none"), GPU)
    assert Credentials.load(none).identity == GPU
    issue.renew_deny_list(home.folder, home.authority, forget=True)
    assert Credentials.load(paths).trust.denied.number == 1


class TestLoading:
    def test_matching_files_are_loaded(self, home: Home) -> None:
        paths = home.files(GPU)
        credentials = Credentials.load(paths._replace(revoked=None))
        assert (credentials.identity, credentials.key_pem) == (GPU, paths.key.read_bytes())
        assert credentials.not_after - files.now() <= 7 * DAY
        assert len(credentials.serial) == 40

    def test_repr_does_not_contain_the_key(self, home: Home) -> None:
        credentials = home.credentials(GPU)
        assert "PRIVATE" not in repr(credentials) + str(credentials)
        assert credentials.key_pem.decode().splitlines()[1] not in repr(credentials)

    def test_key_of_another_certificate_is_refused(self, home: Home) -> None:
        paths, other = home.files(GPU), home.files(NPU)
        with pytest.raises(CredentialsError, match="is not the key of"):
            Credentials.load(paths._replace(key=other.key))

    def test_certificate_of_another_authority_is_refused(self, home: Home, tmp_path: Path) -> None:
        other = Home.at(tmp_path / "other")
        with pytest.raises(WrongAuthorityError, match="this process"):
            Credentials.load(home.files(GPU)._replace(ca=other.folder / "ca.pem"))

    def test_worker_certificate_as_authority_is_refused(self, home: Home) -> None:
        paths = home.files(GPU)
        with pytest.raises(CredentialsError, match="not an authority's certificate"):
            Credentials.load(paths._replace(ca=paths.cert))

    @pytest.mark.parametrize("part", ["ca", "cert", "key"])
    @pytest.mark.parametrize("content", [None, b"", b"half", b"\x30\x82"])
    def test_missing_or_malformed_file_is_reported_by_path(self, home: Home, part: str, content: bytes | None) -> None:
        paths = home.files(GPU)
        path: Path = getattr(paths, part)
        path.unlink()
        if content is not None:
            path.write_bytes(content)
            path.chmod(0o600)
        with pytest.raises(CredentialsError) as caught:
            Credentials.load(paths)
        assert str(path) in caught.value.where

    def test_key_that_is_not_p256_is_refused(self, home: Home) -> None:
        from cryptography.hazmat.primitives.asymmetric import ed25519

        paths = home.files(GPU)
        pem = ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        paths.key.write_bytes(pem)
        with pytest.raises(CredentialsError, match="not a P-256"):
            Credentials.load(paths)


class TestRenewal:
    def test_renewed_certificate_is_loaded(self, home: Home) -> None:
        first = home.credentials(GPU)
        current = CurrentCredentials(first)
        assert current() is first
        issue.renew(home.folder, home.authority, [GPU])
        assert current().serial != first.serial
        assert current() is current()

    def test_partly_copied_files_keep_old_credentials(self, home: Home, caplog: pytest.LogCaptureFixture) -> None:
        first = home.credentials(GPU)
        current = CurrentCredentials(first)
        good = first.files.cert.read_bytes()
        with caplog.at_level(logging.WARNING, "whale_nebula.security"):
            for partial in (good[:-40], b""):
                first.files.cert.write_bytes(partial)
                assert [current() is first for _ in range(3)] == [True] * 3
            first.files.cert.unlink()
            assert current() is first
        assert len(caplog.records) == 3
        issue.revoke(home.folder, home.authority, [first.serial], "")
        issue.issue(home.folder, home.authority, [GPU])  # a new key, too
        assert current().serial != first.serial
        assert current().key_pem != first.key_pem

    def test_certificate_is_loaded_once_it_becomes_valid(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        first = home.credentials(GPU)
        current = CurrentCredentials(first)
        monkeypatch.setattr(files, "now", lambda: datetime.now(UTC) + 2 * DAY)  # the clock of the authority is ahead
        issue.renew(home.folder, home.authority, [GPU])
        monkeypatch.undo()
        assert current() is first
        monkeypatch.setattr(files, "now", lambda: datetime.now(UTC) + 3 * DAY)
        assert current() is first
        monkeypatch.setattr(current, "_retry_time", 0.0)
        assert current().serial != first.serial

    def test_reload_with_another_identity_is_refused(self, home: Home) -> None:
        first, other = home.credentials(GPU), home.files(NPU)
        shutil.copy(other.cert, first.files.cert)
        shutil.copy(other.key, first.files.key)
        with pytest.raises(CredentialsError, match="this process is gpu/0"):
            first.reload()
        assert CurrentCredentials(first)() is first


class TestExpiryWarnings:
    """A running process warns daily before an expiry, with the command that renews the certificate."""

    def warnings_on(
        self,
        days: float,
        current: CurrentCredentials,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> list[str]:
        caplog.clear()
        monkeypatch.setattr(files, "now", lambda: datetime.now(UTC) + days * DAY)
        monkeypatch.setattr(current, "_next_warning_time", 0.0)
        with caplog.at_level(logging.WARNING, "whale_nebula.security"):
            current(), current()
        return caplog.messages

    def test_expiring_certificate_is_warned_of_once_a_day(
        self, home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        current = CurrentCredentials(home.credentials(GPU))
        warnings = [self.warnings_on(days, current, monkeypatch, caplog) for days in (0, 5, 5.5, 5.6, 6.1, 6.2, 7.5)]
        assert [len(each) for each in warnings] == [0, 0, 1, 0, 1, 0, 1]
        assert "the certificate of gpu/0 expires at" in warnings[2][0] and "in 36 hours" in warnings[2][0]
        assert (
            "whale-nebula certs renew --cluster gpu, and copy its .pem to this host; the run does not have to stop"
            in warnings[2][0]
        )
        monkeypatch.undo()
        issue.renew(home.folder, home.authority, [GPU], 14)
        assert self.warnings_on(6.3, current, monkeypatch, caplog) == []

    def test_expiring_authority_is_warned_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        home = Home.at(tmp_path / "certs", days=30)
        current = CurrentCredentials(Credentials.load(home.files(GPU, days=29)))
        assert self.warnings_on(20, current, monkeypatch, caplog) == []
        warnings = self.warnings_on(24, current, monkeypatch, caplog)
        assert ["the certificate" in each for each in warnings] == [True, False]
        assert "the authority of gpu/0 expires at" in warnings[1] and "whale-nebula certs renew --ca" in warnings[1]
        monkeypatch.undo()
        renewed = issue.renew_authority(home.folder)
        with open(home.folder / "ca.pem", "ab") as file:  # both are trusted: the later one counts
            file.write(authority.encode_certificate(home.authority.certificate))
        assert current().trust.authorities[0] == renewed.certificate
        assert all("authority" not in each for each in self.warnings_on(25, current, monkeypatch, caplog))


class TestProof:
    @pytest.fixture
    def provers(self, home: Home) -> tuple[Prover, Prover]:
        return Prover(home.credentials(GPU)), Prover(home.credentials(NPU))

    @pytest.mark.parametrize("wrong", ["transcript", "signature", "key", "empty"])
    def test_invalid_signature_is_refused(self, provers: tuple[Prover, Prover], wrong: str) -> None:
        gpu, npu = provers
        signature = {"signature": b"0" * 70, "key": npu.sign(b"said"), "empty": b""}.get(wrong, gpu.sign(b"said"))
        with pytest.raises(IdentityError, match="signature of gpu/0 is invalid"):
            npu.verify(gpu.certificate, signature, b"other" if wrong == "transcript" else b"said", "gpu/0")

    def test_proof_of_another_worker_is_refused(self, provers: tuple[Prover, Prover]) -> None:
        gpu, npu = provers
        with pytest.raises(WrongNameError):
            npu.verify(gpu.certificate, gpu.sign(b"said"), b"said", "gpu/1")

    def test_signature_without_conversation_prefix_is_refused(self, home: Home, provers: tuple[Prover, Prover]) -> None:
        gpu, npu = provers
        with pytest.raises(IdentityError, match="signature"):
            npu.verify(gpu.certificate, gpu.credentials.sign(b"said"), b"said", "gpu/0")

    @pytest.mark.parametrize("odd", ["nonsense", "é", "\ud800", "version", "key", "name", "two"])
    def test_malformed_certificate_is_refused(self, provers: tuple[Prover, Prover], odd: str) -> None:
        """Any exception of the parser becomes an `IdentityError`."""
        pem = provers[1].certificate
        der = files.parse_certificate(pem, "").public_bytes(serialization.Encoding.DER)
        changed = {
            "version": der.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x3c"),
            "key": der.replace(b"\x03\x42\x00\x04", b"\x03\x42\x00\x07"),  # not a point of the curve
            "name": der.replace(b"\x0c\x05npu/0", b"\x0c\x05np\xff/0"),
        }.get(odd)
        if changed is not None:
            assert changed != der
            odd = f"-----BEGIN CERTIFICATE-----\n{b64encode(changed).decode()}\n-----END CERTIFICATE-----\n"
        with pytest.raises(IdentityError):
            provers[0].verify(pem[:-60] if odd == "two" else odd, b"", b"", "npu/0")


def test_credential_files_may_be_symbolic_links(home: Home, tmp_path: Path) -> None:
    paths = home.files(GPU)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for path in filter(None, paths):
        os.symlink(path, mounted / path.name)
    assert Credentials.load(Files.in_folder(mounted, GPU)).identity == GPU
