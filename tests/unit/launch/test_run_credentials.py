"""Certificates of the workers started here, and their folder for one run."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.datasets.conftest import Owner, certify, owner  # noqa: F401 - a fixture
from whale_nebula.config import load
from whale_nebula.errors import AccountError, CredentialsError, IdentityError, NebulaError, WrongNameError
from whale_nebula.launch.gateways import (
    PREFIX,
    check_names,
    configured_files,
    issue_for_run,
    make_private_folder,
    remove_abandoned,
)
from whale_nebula.launch.gateways import check_files as check

WORKERS = ("gpu/0", "npu/0")
CONFIG = load({"run": "mt", "clusters": {"gpu": {}, "npu": {}}})
INSECURE = load({"security": {"insecure": True}})


def test_temporary_authority_is_removed_with_the_run() -> None:
    with issue_for_run(CONFIG, WORKERS) as files:
        assert list(files) == list(WORKERS)
        check(files, "mt")
        folder = files["gpu/0"].key.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(each.key.stat().st_mode) for each in files.values()} == {0o600}
    assert not folder.exists()


def test_configured_files_are_relative_to_the_config(tmp_path: Path) -> None:
    found = configured_files(CONFIG, WORKERS, str(tmp_path / "clusters.yaml"))["npu/0"]
    assert (found.ca, found.cert) == (tmp_path / "certs/ca.pem", tmp_path / "certs/npu-worker-0.pem")


def test_missing_files_are_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(NebulaError) as refused:
        check(configured_files(CONFIG, WORKERS, str(tmp_path / "clusters.yaml")), "mt")
    assert refused.value.mend


def test_missing_deny_list_is_refused_before_the_start() -> None:
    with issue_for_run(CONFIG, WORKERS) as files:
        files["gpu/0"].ca.with_name("revoked.json").unlink()
        with pytest.raises(CredentialsError, match="the deny list is missing"):
            check(files, "mt")
        check({name: each._replace(revoked=None) for name, each in files.items()}, "mt")


@pytest.mark.parametrize(
    ("worker", "run", "what", "mend"),
    [
        (
            "npu/0",
            "mt",
            "this process is npu/0, but its certificate is for gpu/0",
            "copy npu-worker-0.pem and npu-worker-0",
        ),
        ("gpu/0", "other", "this run is named 'other', but the certificate is for run 'mt'", "run: mt in every config"),
    ],
)
def test_certificate_of_another_worker_is_refused_before_the_start(worker: str, run: str, what: str, mend: str) -> None:
    with issue_for_run(CONFIG, WORKERS) as files, pytest.raises(WrongNameError) as refused:
        check({worker: files["gpu/0"]}, run)
    assert refused.value.what == what
    assert mend in refused.value.mend


def test_start_with_two_accounts_is_refused(owner: Owner, tmp_path: Path) -> None:  # noqa: F811
    found = {f"gpu/{n}": certify(owner, who, tmp_path / who, index=n) for n, who in enumerate(("ana", "ana", "bob"))}
    for each in found.values():
        shutil.copy(owner.home / "certs/revoked.json", each.ca.parent)
    bobs = found.pop("gpu/2")
    tenant = check(found, "mt")
    assert tenant is not None and tenant.account == "ana"
    with pytest.raises(AccountError, match="belong to different accounts") as refused:
        check({**found, "gpu/2": bobs}, "mt")
    assert refused.value.why == "gpu/0 belongs to account ana of gpu, and gpu/2 to account bob of gpu"


@pytest.mark.parametrize(
    ("run", "worker", "mend"), [("lo op", "gpu/0", "run: lo-op"), ("mt", "n/pu/0", "cluster: n-pu")]
)
def test_names_unfit_for_a_certificate_are_refused_before_the_start(run: str, worker: str, mend: str) -> None:
    with pytest.raises(IdentityError, match="name in a certificate") as refused:
        check_names(load({"run": run}), ["tpu/0", worker])
    assert refused.value.mend == mend
    check_names(load({"run": run, "security": {"insecure": True}}), [worker])


def test_insecure_config_has_no_files() -> None:
    assert configured_files(INSECURE, WORKERS, None) == {}
    with issue_for_run(INSECURE, WORKERS) as files:
        assert files == {}


HOLD_PRIVATE_FOLDER = """
import signal, sys
from whale_nebula.launch.gateways import make_private_folder
with make_private_folder(sys.argv[1]) as folder:
    (folder / "gpu-worker-0.key").write_text("secret")
    print(folder, flush=True)
    signal.pause()
"""


def test_private_folder_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    with make_private_folder(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "deep").mkdir()
        (folder / "deep" / "key").write_text("secret")
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_killed_run_is_removed_by_the_next_run(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_PRIVATE_FOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with make_private_folder(tmp_path):
            assert left.is_dir()
        other.send_signal(signal.SIGKILL)
        other.wait(20)
    assert (left / "gpu-worker-0.key").is_file()
    with make_private_folder(tmp_path) as fresh:
        assert list(tmp_path.iterdir()) == [fresh]


def test_other_folders_are_not_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "in-use").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    begun = tmp_path / f"{PREFIX}begun"  # by one that has not come to its lock yet
    begun.mkdir()
    remove_abandoned(tmp_path)
    assert (elsewhere / "in-use").is_file() and begun.is_dir() and os.path.islink(tmp_path / f"{PREFIX}link")
