"""Issuing of certificates: nothing is lost on invalid input, and nobody gets a second key."""

import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from tests.unit.security.authorities import DAY, GATE, GPU, NPU, RUN, Home
from whale_nebula.config import load
from whale_nebula.errors import CredentialsError, ExpiredError, IdentityError, RevokedError
from whale_nebula.security import Credentials, Files, Identity, authority, files, issue, issue_ephemeral, trust
from whale_nebula.security.authority import Authority


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path / "certs", at=files.now() - 10 * DAY)


def deny_list(home: Home) -> trust.SignedList:
    return trust.load(home.folder / "revoked.json", [home.authority.certificate])


def read_all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestAuthority:
    def test_folder_and_key_are_private(self, home: Home) -> None:
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (home.folder, *home.folder.iterdir())}
        assert (modes["certs"], modes["ca.key"], modes["ca.pem"]) == (0o700, 0o600, 0o644)

    def test_second_authority_in_folder_is_refused(self, home: Home) -> None:
        before = read_all_files(home.folder)
        with pytest.raises(CredentialsError, match="an authority already exists in this folder"):
            Home.at(home.folder)
        assert read_all_files(home.folder) == before

    def test_key_without_certificate_is_not_overwritten(self, home: Home) -> None:
        (home.folder / "ca.pem").unlink()
        before = read_all_files(home.folder)
        with pytest.raises(CredentialsError, match="has an authority's key, but not its certificate") as caught:
            Home.at(home.folder)
        assert read_all_files(home.folder) == before
        assert f"rm {home.folder / 'ca.key'}" in caught.value.mend
        (home.folder / "ca.key").unlink()
        assert authority.load(Home.at(home.folder).folder).run == RUN

    def test_folder_accessible_to_others_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "open").mkdir(mode=0o755)
        os.chmod(tmp_path / "open", 0o755)
        with pytest.raises(CredentialsError, match="chmod 700"):
            Home.at(tmp_path / "open")
        assert not (tmp_path / "open" / "ca.key").exists()

    def test_concurrent_creation_leaves_one_authority(self, tmp_path: Path) -> None:
        folder, ended = tmp_path / "certs", []

        def make() -> None:
            try:
                Home.at(folder)
                ended.append("made")
            except CredentialsError:
                ended.append("refused")

        threads = [threading.Thread(target=make) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(20)
        assert sorted(ended) == ["made", "refused", "refused", "refused"]
        assert authority.load(folder).run == RUN  # the key is that of the certificate

    def test_missing_authority_key_is_reported(self, home: Home) -> None:
        (home.folder / "ca.key").unlink()
        with pytest.raises(CredentialsError, match="authority's key is not on this host"):
            authority.load(home.folder)

    def test_key_of_another_authority_is_refused(self, home: Home, tmp_path: Path) -> None:
        shutil.copy(Home.at(tmp_path / "other").folder / "ca.key", home.folder / "ca.key")
        with pytest.raises(CredentialsError, match="is not the key of"):
            authority.load(home.folder)

    def test_worker_certificate_is_refused_as_authority(self, home: Home) -> None:
        paths = home.files(GPU)
        shutil.copy(paths.cert, home.folder / "ca.pem")
        shutil.copy(paths.key, home.folder / "ca.key")
        with pytest.raises(CredentialsError, match="not the certificate of a run's authority"):
            authority.load(home.folder)

    def test_authority_checks_identities_against_its_clusters(self, tmp_path: Path) -> None:
        config = load({"run": RUN, "clusters": {"gpu": {"workers": ["h:1", "h:2"], "gateway": "h:3"}, "npu": {}}})
        made = Authority.create(RUN, authority.count_workers(config))
        authority.create(tmp_path / "certs", made)
        found = authority.load(tmp_path / "certs")
        for good in (Identity(RUN, "gpu", "worker", 1), NPU, GATE, Identity(RUN, "gpu", "operator", 7)):
            found.check(good)
        with pytest.raises(CredentialsError, match="did you mean 'gpu'"):
            found.check(Identity(RUN, "gpuu"))
        with pytest.raises(CredentialsError, match="has no worker 2"):
            found.check(Identity(RUN, "gpu", "worker", 2))
        with pytest.raises(CredentialsError, match="not for run 'other'"):
            found.check(Identity("other", "gpu"))
        with pytest.raises(CredentialsError, match="may certify npu, tpu, not gpu"):
            Authority.create(RUN, {}, bound=["npu", "tpu"]).check(Identity(RUN, "gpu"))
        assert [each.worker for each in authority.list_identities(RUN, config)] == ["gpu/0", "gpu/1", "gpu/gateway"]

    def test_invalid_cluster_name_is_refused_at_creation(self) -> None:
        with pytest.raises(IdentityError):
            Authority.create(RUN, {"gpu/a": 1})


class TestIssuing:
    def test_second_key_is_refused_while_first_is_valid(self, home: Home) -> None:
        home.files(GPU)
        before = read_all_files(home.folder)
        with pytest.raises(CredentialsError, match="already has a certificate"):
            issue.issue(home.folder, home.authority, [NPU, GPU])
        assert read_all_files(home.folder) == before  # nothing was issued to npu/0 either

    def test_second_key_is_refused_after_files_were_moved(self, home: Home, tmp_path: Path) -> None:
        """Files are moved to the worker's host after they are issued."""
        for path in home.files(GPU)[1:3]:
            shutil.move(path, tmp_path)
        with pytest.raises(CredentialsError, match="already has a certificate") as caught:
            home.files(GPU)
        assert "certs renew --cluster gpu" in caught.value.mend and "certs revoke --cluster gpu" in caught.value.mend
        assert list(home.folder.glob("gpu-*")) == []

    def test_new_key_is_issued_after_expiry_or_revocation(self, home: Home) -> None:
        now = files.now()
        first = home.files(GPU, days=1, at=now - 3 * DAY).key.read_bytes()
        second = home.files(GPU).key.read_bytes()
        issue.revoke(home.folder, home.authority, [Credentials.load(Files.in_folder(home.folder, GPU)).serial], "lost")
        third = home.files(GPU).key.read_bytes()
        assert len({first, second, third}) == 3

    def test_certificate_is_valid_until_its_last_moment(self, home: Home) -> None:
        end = issue.issue(home.folder, home.authority, [GPU], 1, files.now() - 3 * DAY)[0].peer.not_after
        with pytest.raises(CredentialsError, match="already has a certificate"):
            home.files(GPU, at=end)
        assert home.files(GPU, at=end + DAY)

    def test_certificate_expires_no_later_than_its_authority(self, tmp_path: Path) -> None:
        home = Home.at(tmp_path / "certs", days=2)
        made = issue.issue(home.folder, home.authority, [GPU], 7)[0]
        assert made.clipped
        assert made.peer.not_after == home.authority.certificate.not_valid_after_utc

    def test_expired_authority_refuses_to_sign(self, tmp_path: Path) -> None:
        home = Home.at(tmp_path / "certs", at=files.now() - 5 * DAY, days=2)
        for act in (issue.issue, issue.renew):
            with pytest.raises(ExpiredError, match="renew --ca"):
                act(home.folder, home.authority, [GPU])

    @pytest.mark.parametrize("days", [0, -1, 4000, float("nan")])
    def test_invalid_lifetime_is_refused(self, home: Home, days: float) -> None:
        with pytest.raises(CredentialsError):
            home.files(GPU, days=days)
        assert issue.list_issued(home.folder) == []

    def test_unreadable_certificate_file_is_replaced(self, home: Home) -> None:
        Files.in_folder(home.folder, GPU).cert.write_text("half")
        assert Credentials.load(home.files(GPU)).identity == GPU


class TestRenewing:
    def test_renewal_keeps_key_and_old_certificate_valid(self, home: Home) -> None:
        paths = home.files(GPU)
        key, old = paths.key.read_bytes(), Credentials.load(paths)
        made = issue.renew(home.folder, home.authority, [GPU], 14)[0]
        assert paths.key.read_bytes() == key
        assert made.peer.serial != old.serial
        assert made.peer.not_after > old.not_after
        old.check_now()

    def test_expired_certificate_can_be_renewed(self, home: Home) -> None:
        paths = home.files(GPU, days=1, at=files.now() - 3 * DAY)
        issue.renew(home.folder, home.authority, [GPU])
        assert Credentials.load(paths).identity == GPU

    def test_moved_certificate_can_be_renewed(self, home: Home, tmp_path: Path) -> None:
        paths = home.files(GPU)
        for path in paths[1:3]:
            shutil.move(path, tmp_path)
        renewed = issue.renew(home.folder, home.authority, [GPU])[0]
        shutil.copy(paths.cert, tmp_path)
        there = Credentials.load(paths._replace(cert=tmp_path / paths.cert.name, key=tmp_path / paths.key.name))
        assert there.serial == renewed.peer.serial

    def test_revoked_certificate_cannot_be_renewed(self, home: Home) -> None:
        paths = home.files(GPU)
        issue.revoke(home.folder, home.authority, [Credentials.load(paths).serial], "")
        with pytest.raises(CredentialsError, match="was revoked"):
            issue.renew(home.folder, home.authority, [GPU])

    def test_failed_renewal_changes_no_file(self, home: Home) -> None:
        home.files(GPU)
        before = read_all_files(home.folder)
        with pytest.raises(CredentialsError, match="no certificate of npu/0"):
            issue.renew(home.folder, home.authority, [GPU, NPU])
        assert read_all_files(home.folder) == before

    def test_certificate_of_another_authority_is_not_renewed(self, home: Home, tmp_path: Path) -> None:
        shutil.copy(Home.at(tmp_path / "other").files(GPU).cert, home.folder)
        with pytest.raises(CredentialsError, match="not a certificate of gpu/0"):
            issue.renew(home.folder, home.authority, [GPU])


class TestRevoking:
    def test_revoked_certificate_is_refused_by_open_trust(self, home: Home) -> None:
        held, other = home.credentials(GPU), home.credentials(NPU)
        other.trust.check(held.cert_pem)
        issue.revoke(home.folder, home.authority, [held.serial], "the host was sold")
        with pytest.raises(RevokedError, match="the host was sold"):
            other.trust.check(held.cert_pem)
        with pytest.raises(RevokedError):
            held.check_now()

    def test_second_revocation_changes_nothing(self, home: Home) -> None:
        serial = home.credentials(GPU).serial
        assert len(issue.revoke(home.folder, home.authority, [serial], "a")) == 1
        assert issue.revoke(home.folder, home.authority, [serial], "b") == []
        found = deny_list(home)
        assert (found.revoked[serial].why, found.number) == ("a", 2)

    def test_revocation_covers_all_certificates_of_the_key(self, home: Home) -> None:
        """Whoever has the key can use any of them."""
        first, other = home.credentials(GPU), home.credentials(NPU)
        second = issue.renew(home.folder, home.authority, [GPU])[0].peer
        new = issue.revoke(home.folder, home.authority, [second.serial], "")
        assert {each.serial for each in new} == {first.serial, second.serial}
        with pytest.raises(RevokedError):
            other.trust.check(first.cert_pem)
        other.check_now()

    def test_unknown_serial_is_refused(self, home: Home) -> None:
        with pytest.raises(CredentialsError, match="no certificate has the serial"):
            issue.revoke(home.folder, home.authority, ["00"], "")

    def test_concurrent_revocations_are_all_listed(self, home: Home) -> None:
        who = [Identity(RUN, "gpu", "worker", index) for index in range(6)]
        serials = [each.peer.serial for each in issue.issue(home.folder, home.authority, who)]
        threads = [
            threading.Thread(target=issue.revoke, args=(home.folder, home.authority, [serial], ""))
            for serial in serials
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(20)
        found = deny_list(home)
        assert (set(found.revoked), found.number) == (set(serials), 7)

    def test_missing_deny_list_is_recreated_only_with_forget(self, home: Home) -> None:
        """An empty list would accept revoked certificates again; with `forget` it gets a higher number."""
        issue.revoke(home.folder, home.authority, [home.credentials(GPU).serial], "")
        home.credentials(NPU)  # a process reads it
        (home.folder / "revoked.json").unlink()
        for act in (lambda: home.files(GATE), lambda: issue.renew_deny_list(home.folder, home.authority)):
            with pytest.raises(CredentialsError, match="the deny list is missing"):
                act()
        issue.renew_deny_list(home.folder, home.authority, forget=True)
        assert deny_list(home) == trust.SignedList(3, deny_list(home).signer, {})

    def test_forged_deny_list_is_not_renewed(self, home: Home) -> None:
        trust.save(home.folder / "revoked.json", RUN, authority.make_key(), 9, {})
        with pytest.raises(CredentialsError, match="not signed by the run's authority"):
            issue.renew_deny_list(home.folder, home.authority)


class TestEphemeralCertificates:
    def test_workers_of_a_run_trust_only_each_other(self, tmp_path: Path) -> None:
        made = issue_ephemeral("demo", ["gpu/0", "gpu/gateway", "npu/0"], tmp_path)
        held = {worker: Credentials.load(paths) for worker, paths in made.items()}
        for one in held.values():
            for worker, other in held.items():
                assert one.trust.check(other.cert_pem).identity.worker == worker
        with pytest.raises(IdentityError):
            held["gpu/0"].trust.check(Home.at(tmp_path / "certs", "demo").certificate(Identity("demo", "gpu")))

    def test_folder_is_private_and_has_no_authority_key(self, tmp_path: Path) -> None:
        folder = issue_ephemeral("demo", ["gpu/0"], tmp_path)["gpu/0"].cert.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [path.name for path in folder.glob("*.key")] == ["gpu-worker-0.key"]
        assert folder.parent == tmp_path
