"""An owner's dataset read in two processes: directly by the owner, and over a line by an account."""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes.worker_runs import run_workers
from tests.unit.datasets.conftest import Owner, Site, certify, owner, site  # noqa: F401 - fixtures


def test_owner_and_account_train_on_the_same_rows(site: Site, tmp_path: Path) -> None:  # noqa: F811
    site.owner.publish()
    site.owner.grant("ana")
    certify(site.owner, "ana", tmp_path / "of-ana")
    home = {"at": f"127.0.0.1:{site.port}", "folder": str(tmp_path / "of-ana"), "registry": f"{site.owner.home}/certs"}
    found = run_workers("read_dataset", {"gpu/0": "gpu", "npu/0": "npu"}, json.dumps(home))
    found.result.check()
    assert found.get_common("weights") and found.get_common("loss")
    assert sum(each["rows"] for each in site.access_records) == 200
    assert {each["account"] for each in site.access_records} == {"ana"}
    (direct,) = (site.owner.home / "certs/audit").glob("data-gpu-worker-0.jsonl")
    said = [json.loads(line) for line in direct.read_text().splitlines()]
    assert sum(each.get("rows", 0) for each in said) == 200 and {each.get("account") for each in said} >= {"owner"}
    assert site.owner.grants.registry.find("ana")
