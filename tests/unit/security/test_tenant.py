"""The folder of an account: no run of others reads or writes in it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.security.authorities import GPU, Home, write_credentials
from whale_nebula.cli.checkpoints import main
from whale_nebula.errors import AccountError, CredentialsError
from whale_nebula.security import Files, authority, files
from whale_nebula.security.tenant import MARK, Tenant, check_folder, claim_folder, open_home

ANA = Tenant("ana", "gpu", "aa")
BOB = replace(ANA, account="bob")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_account_folder_is_private(tmp_path: Path) -> None:
    home = open_home(tmp_path, ANA)
    assert (home, mode(home)) == (tmp_path / "accounts/gpu/ana", 0o700)
    assert open_home(tmp_path, ANA) == home
    claim_folder(home / "runs", ANA)  # inside the account's folder, so no mark is needed
    assert not (home / "runs").exists() and open_home(tmp_path, BOB) != home


def make_link(tmp: Path, home: Path) -> Path:
    (tmp / "link").symlink_to(home)
    return tmp / "link" / "runs"


def write_invalid_mark(tmp: Path, home: Path) -> Path:
    (home / MARK).write_text("ana?")
    return home


def link_own_folder(tmp: Path, home: Path) -> Path:
    """Replace bob's folder by a link to ana's."""
    BOB.home(tmp).symlink_to(home)
    return BOB.home(tmp)


ATTACKS: dict[str, tuple[Callable[[Path, Path], Path], Tenant | None]] = {
    "another account": (lambda tmp, home: home, BOB),
    "a nested folder": (lambda tmp, home: home / "runs/a/step-00000001", BOB),
    "a path with parent references": (lambda tmp, home: tmp / "accounts/gpu/bob/../ana/runs", BOB),
    "a link": (make_link, BOB),
    "an own folder that is a link": (link_own_folder, BOB),
    "an account of that name in another cluster": (lambda tmp, home: home, replace(ANA, cluster="npu")),
    "an account of that name by another owner": (lambda tmp, home: home, replace(ANA, authority="bb")),
    "no account": (lambda tmp, home: home, None),
    "an invalid mark": (write_invalid_mark, ANA),
}


@pytest.mark.parametrize(("way", "who"), ATTACKS.values(), ids=ATTACKS)
def test_attack_folder_of_another_account(
    way: Callable[[Path, Path], Path], who: Tenant | None, tmp_path: Path
) -> None:
    folder = way(tmp_path, open_home(tmp_path, ANA))
    with pytest.raises(AccountError, match="but this run belongs to") as caught:
        check_folder(folder, who)
    assert "whale-nebula login --account" in caught.value.mend
    if who is not None:
        with pytest.raises(AccountError, match="but this run belongs to"):
            claim_folder(folder, who)


def test_account_folder_accessible_to_others_is_refused(tmp_path: Path) -> None:
    home = open_home(tmp_path, ANA)
    home.chmod(0o750)
    with pytest.raises(AccountError, match="other users can enter") as caught:
        open_home(tmp_path, ANA)
    assert "chmod 700" in caught.value.mend


def test_mark_by_another_user_is_ignored(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    claim_folder(tmp_path / "shared", ANA)
    os.chown(tmp_path / "shared" / MARK, 12345, -1)
    check_folder(tmp_path / "shared", BOB)


def test_account_name_in_certificate_cannot_be_a_path(tmp_path: Path) -> None:
    home, key, now = Home.at(tmp_path), authority.make_key().public_key(), files.now()

    def certify(account: str) -> files.Peer:
        signer, until = home.authority, now + timedelta(days=1)
        return files.read_peer(
            authority.make_process_certificate(GPU, key, signer.certificate, signer.key, until, now, account)
        )

    found = Tenant.from_certificate(certify("ana"))
    assert found is not None and (found.account, found.cluster, len(found.authority)) == ("ana", "gpu", 40)
    for name in ("..", "../bob", "a/b", "Ana", "ana\n"):
        with pytest.raises(CredentialsError, match="names an invalid account"):
            Tenant.from_certificate(certify(name))


# ---------------------------------------------------------------------- commands
def log_in(home: Home, account: str, certs: Path, days: float = 1.0) -> Tenant:
    """Write a certificate of an account to a folder."""
    key, now = authority.make_key(), files.now() - timedelta(days=2)
    signer, until = home.authority, now + timedelta(days=2 + days)
    made = authority.make_process_certificate(
        GPU, key.public_key(), signer.certificate, signer.key, until, now, account
    )
    write_credentials(Files.in_folder(certs, GPU), made, authority.encode_key(key), home.folder)
    for each in ("ca.pem", "revoked.json"):
        shutil.copy(home.folder / each, certs)
    found = Tenant.from_certificate(files.read_peer(made))
    assert found is not None
    return found


@pytest.fixture
def logged_in(tmp_path: Path) -> Path:
    """A folder of ana's run, valid certificates of ana and bob, and an expired one of ana."""
    home = Home.at(tmp_path / "authority")
    open_home(tmp_path, log_in(home, "ana", tmp_path / "of-ana"))
    log_in(home, "ana", tmp_path / "long-ago", days=-1)
    log_in(home, "bob", tmp_path / "of-bob")
    return tmp_path


@pytest.mark.parametrize("command", ["list", "show", "verify", "prune --keep 1", "export --to x.npz"])
def test_attack_checkpoints_of_another_account(
    command: str, logged_in: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(logged_in)
    what, *options = command.split()

    def ask(certs: str, folder: str = "accounts/gpu/ana/runs", *more: str) -> tuple[int, str]:
        code = main([what, folder, *options, *([f"--certs={certs}"] if certs else []), *more])
        return code, capsys.readouterr().err

    for certs, why in {
        "of-bob": "gpu-worker-0.pem belongs to account bob of gpu",
        "long-ago": "has expired",
        "": "no certificate of an account in certs",
    }.items():
        code, said = ask(certs)
        assert (code, "belongs to account ana of gpu, and no user" in said, why in said) == (1, True, True), said
    assert ask("of-ana")[0] == 66, "she may look, and there is none yet"
    (logged_in / "free").mkdir()
    assert ask("of-bob", "free")[0] == 66, "what is of no account is for everybody"
    if what == "export":
        assert ask("of-bob", "free", "--to", "accounts/gpu/ana/x.npz")[0] == 1
