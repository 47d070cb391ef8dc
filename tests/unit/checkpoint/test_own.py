"""Where a run of an account keeps what it saves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from whale_nebula.errors import AccountError
from whale_nebula.launch.attach import Attachment
from whale_nebula.runtime.checkpoint.checkpoints import find_own
from whale_nebula.security.tenant import Tenant, open_home


def test_it_is_in_its_folder_unless_the_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    homes = {name: open_home(tmp_path, Tenant(name, "gpu", "aa")) for name in ("ana", "bob")}
    ana = Attachment("gpu/0", "gpu", {}, tenant=Tenant("ana", "gpu", "aa"), home=str(homes["ana"]))
    assert find_own("runs/a", ana) == str(homes["ana"] / "runs/a")
    assert find_own("/data/runs", ana) == "/data/runs" and find_own("gs://runs/a", ana) == "gs://runs/a"
    assert find_own("runs/a", None) == "runs/a"
    for path in (homes["bob"] / "runs", os.path.join("..", "bob", "runs")):
        with pytest.raises(AccountError, match="is of account bob of gpu, and this run is of account ana of gpu"):
            find_own(str(path), ana)
    with pytest.raises(AccountError, match="and this run is of no account"):
        find_own("accounts/gpu/ana/runs/a", None)
