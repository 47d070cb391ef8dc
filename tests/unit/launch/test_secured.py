"""Certificates of the workers that are started here."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from whale_nebula.config import load
from whale_nebula.errors import NebulaError
from whale_nebula.launch.secured import check, configured, for_one_run

WORKERS = ("gpu/0", "npu/0")
CONFIG = load({"run": "mt", "clusters": {"gpu": {}, "npu": {}}})
INSECURE = load({"security": {"insecure": True}})


def test_a_run_of_one_machine_has_an_authority_that_is_gone_with_it() -> None:
    with for_one_run(CONFIG, WORKERS) as files:
        assert list(files) == list(WORKERS)
        check(files)
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
    found = configured(CONFIG, WORKERS, str(tmp_path / "clusters.yaml"))["npu/0"]
    assert (found.ca, found.cert) == (str(tmp_path / "certs/ca.pem"), str(tmp_path / "certs/npu-worker-0.pem"))


def test_files_that_are_not_there_are_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(NebulaError) as refused:
        check(configured(CONFIG, WORKERS, str(tmp_path / "clusters.yaml")))
    assert refused.value.mend


def test_insecure_is_without_files() -> None:
    assert configured(INSECURE, WORKERS, None) == {}
    with for_one_run(INSECURE, WORKERS) as files:
        assert files == {}
