"""The checkpoint folder of an account's run, and the leading program of a loop that trains several."""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.manifest import Position
from whale_nebula.errors import AccountError, CheckpointError
from whale_nebula.launch.attach import Attachment
from whale_nebula.runtime.checkpoint.leading_program import LeadingProgram
from whale_nebula.runtime.checkpoint.open_checkpoints import resolve_folder
from whale_nebula.security.allowance import Allowance
from whale_nebula.security.tenant import Tenant, measure_disk_usage, open_home


def test_relative_checkpoint_path_is_in_the_accounts_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    homes = {name: open_home(tmp_path, Tenant(name, "gpu", "aa")) for name in ("ana", "bob")}
    ana = Attachment("gpu/0", "gpu", {}, tenant=Tenant("ana", "gpu", "aa"), home=str(homes["ana"]))
    assert resolve_folder("runs/a", ana) == str(homes["ana"] / "runs/a")
    assert resolve_folder("/data/runs", ana) == "/data/runs" and resolve_folder("gs://runs/a", ana) == "gs://runs/a"
    assert resolve_folder("runs/a", None) == "runs/a"
    for path in (homes["bob"] / "runs", os.path.join("..", "bob", "runs")):
        with pytest.raises(
            AccountError, match="belongs to account bob of gpu, but this run belongs to account ana of gpu"
        ):
            resolve_folder(str(path), ana)
    with pytest.raises(AccountError, match="but this run belongs to no account"):
        resolve_folder("accounts/gpu/ana/runs/a", None)


def test_disk_limit_of_the_account_is_enforced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of about 5 KiB: the first one fits, and the one that does not is left out, with a warning."""
    tenant = Tenant("ana", "gpu", "aa", Allowance(disk=1 << 20))
    home = open_home(tmp_path, tenant)
    attachment = Attachment("gpu/0", "gpu", {}, tenant=tenant, home=str(home))
    monkeypatch.setattr("whale_nebula.runtime.run.attach", lambda: attachment)
    monkeypatch.chdir(tmp_path)
    nb.shutdown()
    with nb.init(checkpoint={"folder": "runs/a", "every": 1}):
        inputs = keras.Input((4,))
        with nb.cluster(), nb.stage(cluster="gpu"):
            outputs = keras.layers.Dense(32)(inputs)
        model = keras.Model(inputs, outputs)
        model.compile("adam", "mse")
        model.fit(np.ones((8, 4)), np.ones((8, 32)), batch_size=4, verbose=0)
        nb.save("by-hand", model)
        (home / "other").write_bytes(os.urandom(1 << 20))
        with pytest.raises(CheckpointError, match="could not be saved") as refused:
            nb.save("by-hand-2", model)
        with pytest.warns(nb.errors.NebulaWarning, match="of gpu is 1 MiB on each host, and it uses"):
            model.fit(np.ones((8, 4)), np.ones((8, 32)), batch_size=4, verbose=0)
            nb.shutdown()
    assert "gpu/0: the disk limit of account ana of gpu is 1 MiB" in (refused.value.why or "")
    assert [*(home / "runs/a").glob("step-*/manifest.json")] and (home / "by-hand/manifest.json").exists()
    assert not [*tmp_path.glob("runs")] and not (home / "by-hand-2").exists()


def test_refused_folder_is_unlocked_and_has_no_thread(tmp_path: Path) -> None:
    """No thread goes on, and the folder is locked by nobody."""
    nb.save(tmp_path, keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    nb.shutdown()
    with pytest.raises(CheckpointError, match=r"a model that nb\.save wrote"), nb.init(checkpoint=str(tmp_path)):
        pytest.fail("it is not a folder of a run")
    assert not [each for each in threading.enumerate() if each.name == "nebula-checkpoint"]
    Folder(str(tmp_path)).lock()


def test_disk_use_counts_hard_links_once_and_ignores_holes(tmp_path: Path) -> None:
    (tmp_path / "block").write_bytes(os.urandom(256 << 10))
    os.link(tmp_path / "block", tmp_path / "again")
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", 1 << 30)
    (tmp_path / "link").symlink_to(tmp_path)
    assert 256 << 10 <= measure_disk_usage([tmp_path, tmp_path]) < 300 << 10


def count_steps(programs: str) -> tuple[str, int]:
    """The leading program and its steps after one step of each of these programs and the end of the loop."""
    leading, position, counts = LeadingProgram(), Position(), Counter[str]()
    for program in programs:
        position = leading.choose(position, program)
        counts[program] += 1
        position = replace(position, programs=dict(counts))
        if program == position.program:
            position = replace(position, step=position.step + 1)
    position = leading.count_last(position)
    return position.program, position.step


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ("", ("", 0)),
        ("aaa", ("a", 3)),
        ("dgdgdg", ("d", 3)),  # a discriminator and a generator in turn: steps of one are counted
        ("dddgdddgdddg", ("d", 9)),
        ("aaabbb", ("b", 6)),  # one model after the other: all steps are counted
        ("aaabcbcbc", ("b", 6)),
        ("aaa" + "b" * 40, ("b", 43)),
        ("aaab" + "ab" * 40, ("a", 43)),
        ("abbb", ("a", 1)),  # one step alone: whether the other trains in turn with it is not known yet
    ],
)
def test_steps_are_counted_by_the_leading_program(programs: str, expected: tuple[str, int]) -> None:
    assert count_steps(programs) == expected
