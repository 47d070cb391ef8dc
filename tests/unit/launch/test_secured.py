"""Certificates of the workers that are started here."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from whale_nebula.config import load
from whale_nebula.errors import CredentialsError, IdentityError, NebulaError, WrongNameError
from whale_nebula.launch.gateways import check_files as check
from whale_nebula.launch.gateways import check_names, configured_files, for_one_run

WORKERS = ("gpu/0", "npu/0")
CONFIG = load({"run": "mt", "clusters": {"gpu": {}, "npu": {}}})
INSECURE = load({"security": {"insecure": True}})


def test_a_run_of_one_machine_has_an_authority_that_is_gone_with_it() -> None:
    with for_one_run(CONFIG, WORKERS) as files:
        assert list(files) == list(WORKERS)
        check(files, "mt")
        folder = Path(files["gpu/0"].key).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(Path(each.key).stat().st_mode) for each in files.values()} == {0o600}
    assert not folder.exists()


def test_it_is_gone_after_an_error_too() -> None:
    with pytest.raises(KeyboardInterrupt), for_one_run(CONFIG, WORKERS) as files:
        folder = Path(files["gpu/0"].key).parent
        raise KeyboardInterrupt
    assert not folder.exists()


def test_the_files_of_a_config_lie_beside_it(tmp_path: Path) -> None:
    found = configured_files(CONFIG, WORKERS, str(tmp_path / "clusters.yaml"))["npu/0"]
    assert (found.ca, found.cert) == (str(tmp_path / "certs/ca.pem"), str(tmp_path / "certs/npu-worker-0.pem"))


def test_files_that_are_not_there_are_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(NebulaError) as refused:
        check(configured_files(CONFIG, WORKERS, str(tmp_path / "clusters.yaml")), "mt")
    assert refused.value.mend


def test_a_deny_list_that_is_missing_is_told_before_anything_starts() -> None:
    with for_one_run(CONFIG, WORKERS) as files:
        Path(files["gpu/0"].ca).with_name("revoked.json").unlink()
        with pytest.raises(CredentialsError, match="there is no deny list"):
            check(files, "mt")
        check({name: replace(each, revoked=None) for name, each in files.items()}, "mt")


def test_files_of_somebody_else_are_told_before_anything_starts() -> None:
    with for_one_run(CONFIG, WORKERS) as files, pytest.raises(WrongNameError) as refused:
        check({"npu/0": files["gpu/0"]}, "mt")
    assert refused.value.what == "this is npu/0, and its certificate is that of gpu/0"
    assert "copy npu-worker-0.pem and npu-worker-0.key" in refused.value.mend


@pytest.mark.parametrize(
    ("run", "worker", "mend"), [("lo op", "gpu/0", "run: lo-op"), ("mt", "n/pu/0", "cluster: n-pu")]
)
def test_names_that_no_certificate_can_hold_are_told_before_anything_starts(run: str, worker: str, mend: str) -> None:
    with pytest.raises(IdentityError, match="that a certificate can hold") as refused:
        check_names(load({"run": run}), ["tpu/0", worker])
    assert refused.value.mend == mend
    check_names(load({"run": run, "security": {"insecure": True}}), [worker])


def test_insecure_is_without_files() -> None:
    assert configured_files(INSECURE, WORKERS, None) == {}
    with for_one_run(INSECURE, WORKERS) as files:
        assert files == {}
