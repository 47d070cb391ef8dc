"""`whale-nebula doctor`: its findings, and an exit status for missing requirements."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import whale_nebula
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.manifest import File, Manifest, Part, Position
from whale_nebula.checkpoint.parts import Start, WrittenPart, write_document
from whale_nebula.cli import doctor
from whale_nebula.cli.doctor import check_config, read_requirements, satisfies
from whale_nebula.errors import ConfigError
from whale_nebula.launch.placement import Placement

Capture = pytest.CaptureFixture[str]

ROOT = Path(__file__).resolve().parents[3]


def test_this_machine_is_well(capsys: Capture) -> None:
    assert doctor.main([]) == 0
    told = capsys.readouterr().out
    assert all(
        name in told for name in ("Python", "TensorFlow", "Keras", "gRPC", "oneDNN", "CPU threads", "free memory")
    )
    assert told.endswith("all requirements are met\n")


def test_json(capsys: Capture) -> None:
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert {"name", "state", "found", "why", "mend"} == set(found["checks"][0])


def test_it_says_where_this_package_comes_from_and_if_two_copies_are_mixed(tmp_path: Path) -> None:
    copy = tmp_path / "whale_nebula"
    shutil.copytree(Path(whale_nebula.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-P", "-m", "whale_nebula", "doctor", "--json"]
    for folder, state in ((str(ROOT), "ok"), (str(tmp_path), "warning")):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": folder}
        )
        (own,) = (each for each in json.loads(done.stdout)["checks"] if each["name"] == "whale-nebula")
        assert own["state"] == state and folder in own["why"]


def test_the_ranges_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {line.split(";")[0] for line in project["dependencies"]}
    assert {name + range_ for name, range_ in read_requirements().items()} == wanted
    assert doctor.check_python().why == f"supported: {project['requires-python']}"


VERSIONS = {
    ("2.21.0", ">=2.21,<2.22"): True, ("2.21", ">=2.21.0"): True, ("2.20.9", ">=2.21,<2.22"): False,
    ("2.22.0rc1", ">=2.21,<2.22"): False, ("3.9.1", ">=3.11,<3.14"): False, ("1.0.0.dev0", ""): True,
    ("2.0", "!=2.0"): False, ("2.0", "==2.0"): True, ("2.0", ">2.0"): False, ("2.0", "<=2.0"): True,
}  # fmt: skip


def test_versions() -> None:
    assert {(version, wanted): satisfies(version, wanted) for version, wanted in VERSIONS} == VERSIONS


def test_a_version_out_of_range_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(doctor, "read_requirements", lambda: {"keras": ">=4.0"})
    assert doctor.main([]) == 1
    told = capsys.readouterr().out
    assert "BAD   Keras" in told and 'mend: pip install "keras>=4.0"' in told
    assert "1 of" in told and "must be fixed" in told


def test_what_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED", {"no-such-package": "It"})
    assert doctor.main(["--json"]) == 1
    assert doctor.check_package("no-such-package").found == "not installed"


def test_a_gateways_host_needs_no_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {name: version for name in doctor.NEEDED if (version := doctor.find_version(name))}
    missing = {name: version for name, version in there.items() if name not in doctor.FOR_TRAINING}
    monkeypatch.setattr(doctor, "find_version", missing.get)
    assert doctor.main(["--gateway"]) == 0
    assert doctor.main([]) == 1


def test_another_backend_of_keras_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert doctor.check_backend().state == "bad"
    monkeypatch.delenv("KERAS_BACKEND")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    assert doctor.check_backend().found == "tensorflow"
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    assert (doctor.check_backend().state, doctor.check_backend().found) == ("bad", "torch")
    (tmp_path / "keras.json").write_text("[")
    assert doctor.check_backend().state == "ok"


def test_settings_that_change_bits_and_little_memory_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(doctor, "read_free_memory", lambda: 2.0**29)
    checks = [doctor.check_onednn(), doctor.check_threads(), doctor.check_memory()]
    assert {check.state for check in checks} == {"note"}
    assert checks[0].found == "off" and "OMP_NUM_THREADS=1" in checks[1].why and checks[2].found == "512.0 MiB"


def test_a_config_is_checked(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "clusters.yaml"
    path.write_text("clusters: {gpu: {workers: ['a:1']}, npu: {}}\nsecurity: {insecure: true}\n")
    assert doctor.main(["--config", str(path)]) == 0
    assert "gpu, npu; 1 worker, 0 links" in capsys.readouterr().out
    path.write_text("clutsers: {}\n")
    assert doctor.main(["--config", str(path)]) == 78
    assert "did you mean 'clusters'?" in capsys.readouterr().err
    assert doctor.main(["--config", str(path), "--json"]) == 78
    assert json.loads(capsys.readouterr().out)["code"] == "NB-500"


def test_workers_at_one_address_are_found_as_a_run_finds_them(tmp_path: Path) -> None:
    path = tmp_path / "clusters.yaml"
    path.write_text("clusters: {gpu: {workers: ['a:1', 'a:2']}, npu: {workers: ['a:2']}}\nsecurity: {insecure: true}\n")
    said = "gpu/1 and npu/0 have the same address, a:2"
    with pytest.raises(ConfigError, match=said):
        check_config(str(path))
    with pytest.raises(ConfigError, match=said):
        Placement(("npu/0",), {"gpu/0": "a:1", "gpu/1": "a:2", "npu/0": "a:2"})


@pytest.mark.parametrize(
    "line",
    [
        "clusters.yaml",
        "--cluster gpu",
        "--worker 0",
        "--config c.yaml --cluster gpu --worker x",
        "--config c.yaml --cluster gpu --worker 0 --gateway",
    ],
)
def test_a_line_that_says_nothing_is_refused(line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(line.split())
    assert ended.value.code == 2


def test_it_knows_what_a_run_would_go_on_from(tmp_path: Path) -> None:
    config, saved = tmp_path / "clusters.yaml", tmp_path / "saved"
    config.write_text(f"checkpoint: {saved}\n")
    assert [(each.state, each.why) for each in check_config(str(config))[1:]] == [
        ("ok", "0 checkpoints; a run starts from the beginning")
    ]
    folder = Folder(str(saved))
    for step in (4, 8):
        os.makedirs(folder.step_path(step))
        folder.commit(Manifest(Position(step), {"local/0": "x"}))
    assert check_config(str(config))[1].why == "2 checkpoints; a run resumes from step 8"
    start = Start("token", ("gpu/0", "npu/0"))
    os.makedirs(folder.worker_path(9, "gpu/0"))
    write_document(folder.worker_path(9, "gpu/0"), WrittenPart(Part("gpu/0", {}), {}, Manifest(Position(9)), start))
    noted, _ = check_config(str(config))[1:]
    assert (noted.state, noted.found) == ("note", folder.step_path(9)) and "if it also finds that of npu/0" in noted.why
    folder.clean(8)
    (Path(folder.step_path(8)) / "manifest.json").write_text("{}")
    (Path(folder.step_path(4)) / "manifest.json").unlink()
    folder.commit(Manifest(Position(4), {"local/0": "x"}, files=(File("state.index", 4, "x"),)))
    found = check_config(str(config))[1:]
    assert [each.state for each in found] == ["warning", "ok"] and "state.index is missing" in found[0].why
    config.write_text(f"checkpoint: {config}/saved\n")
    assert check_config(str(config))[1].state == "bad"
