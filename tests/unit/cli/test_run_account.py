"""`whale-nebula run` with an account's certificates: its folder, its limits, its output, and its log."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.datasets.conftest import Owner, certify, owner  # noqa: F401 - a fixture
from tests.unit.transport.grpc_workers import find_free_address
from whale_nebula.cli import arguments
from whale_nebula.cli.main import main
from whale_nebula.security.allowance import Allowance

SCRIPT = """
import pathlib, time
from whale_nebula.launch import attach
me = attach()
pathlib.Path(me.home, "note").write_text(f"{me.worker} {me.tenant.account}")
block = bytearray(b"a" * (MIB << 20))
time.sleep(LONG)
"""


def run(folder: Path, mib: int, long: int) -> int:
    (folder / "train.py").write_text(SCRIPT.replace("MIB", str(mib)).replace("LONG", str(long)))
    return main(["run", "--config", str(folder / "clusters.yaml"), "--cluster", "gpu", str(folder / "train.py")])


def test_account_run_enforces_and_logs_limits(owner: Owner, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    (tmp_path / "clusters.yaml").write_text(
        f'run: mt\nclusters: {{gpu: {{workers: ["{find_free_address()}"]}}, npu: {{workers: ["10.77.0.2:7101"]}}}}\n'
        "restarts: 3\nforbid: [y -> npu]\n"
    )
    certify(owner, "ana", tmp_path / "certs", allowance=Allowance(memory=200 << 20, cpus=1, disk=1 << 30))
    shutil.copy(owner.home / "certs/revoked.json", tmp_path / "certs")
    home = tmp_path / "accounts/gpu/ana"
    assert run(tmp_path, mib=1, long=0) == arguments.DONE
    err = capfd.readouterr().err
    assert f"account ana of gpu: folder {home}; limits on this host: memory 200 MiB, cpus 1, disk 1 GiB" in err
    assert "not isolated: memory: checked four times a second; cpus: not limited" in err
    assert (home / "note").read_text() == "gpu/0 ana" and (home / "note").stat().st_mode & 0o777 == 0o600
    assert run(tmp_path, mib=400, long=300) == 137  # not restarted
    assert "failed first: it was killed: account ana of gpu is limited to 200 MiB of memory" in capfd.readouterr().err
    log = [json.loads(line) for line in (home / "audit/gpu-worker-0.jsonl").read_text().splitlines()]
    decisions = [(each["action"], each["decision"]) for each in log if each["action"].endswith("run")]
    assert decisions == [("start run", "allow"), ("end run", ""), ("start run", "allow"), ("end run", "deny")]
    assert [each["reason"] for each in log if each["action"] == "end run"][1].startswith(
        "account ana of gpu is limited to 200 MiB"
    )
    start = next(each for each in log if each["action"] == "start run")
    assert (start["approvals"], start["forbid"]) == ([], ["y -> npu"]) and "tensorflow" in start["versions"]
    with (tmp_path / "clusters.yaml").open("a") as config:
        config.write("approvals: approved\n")
    (tmp_path / "approved").mkdir()
    assert run(tmp_path, mib=1, long=0) == arguments.CONFIG
    assert "train.py is not approved" in capfd.readouterr().err
    refusals = [line for line in (home / "audit/gpu-worker-0.jsonl").read_text().splitlines() if "not approved" in line]
    refused = json.loads(refusals[-1])
    assert (refused["action"], refused["decision"], refused["account"]) == ("start run", "deny", "ana")
    assert refused["config"] != start["config"] and refused["needs_approval"]
    text = (tmp_path / "clusters.yaml").read_text()
    (tmp_path / "clusters.yaml").write_text(text.replace("approvals: approved\n", ""))
    (home / "much").write_bytes(b"a" * (1 << 20))
    certify(owner, "ana", tmp_path / "certs", allowance=Allowance(disk=1 << 20))
    assert run(tmp_path, mib=1, long=0) == arguments.CONFIG
    assert "the disk limit of account ana of gpu is 1 MiB on each host, and it uses 1.0" in capfd.readouterr().err
    log = [json.loads(line) for line in (home / "audit/gpu-worker-0.jsonl").read_text().splitlines()]
    assert [each["decision"] for each in log if each["action"] == "start run"] == ["allow", "allow", "deny", "deny"]
    assert main(["audit", "verify", str(home / "audit/gpu-worker-0.jsonl")]) == arguments.DONE
