"""The end of a level of checkpoints, and of a checkpoint that is given up."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.manifest import Manifest, Position
from whale_nebula.errors import NebulaWarning
from whale_nebula.runtime.checkpoint.copies import Copies
from whale_nebula.runtime.checkpoint.level import Level, Pace, _explain
from whale_nebula.runtime.checkpoint.slices import make_whole_entry
from whale_nebula.runtime.checkpoint.writer import Snapshot


def test_closed_level_ends_its_threads() -> None:
    """That of the copies, too: a process that opens and shuts down several runs would keep one of each run."""
    copies = Copies(Mock(), Mock(), "npu/1", "npu/2")
    level = Level(Mock(), Mock(), Pace(), keep=2, copies=copies)
    for each in (level._writer, copies._receiving):
        each.submit(int).result(30)  # a thread starts with the first call
    threads = [level._writer._thread, copies._receiving._thread]
    assert all(thread.is_alive() for thread in threads)
    level.close()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("durable", [False, True])
def test_part_of_an_abandoned_checkpoint_is_removed_from_memory(durable: bool, tmp_path: Path) -> None:
    group = Mock(worker="npu/0", members=("npu/0",), is_single_worker=False)
    level = Level(Folder(str(tmp_path)), group, Pace(), keep=1, durable=durable)
    level.write(Snapshot(Manifest(Position(step=3)), "npu/0", [make_whole_entry("weight", np.ones(4))], {}))
    level.abandon()
    level.close()
    assert not level.busy
    assert Path(level.folder.worker_path(3, "npu/0")).exists() == durable


@pytest.mark.parametrize("durable", [False, True])
def test_unread_checkpoint_is_renamed_on_disk_and_removed_from_memory(durable: bool, tmp_path: Path) -> None:
    group = Mock(worker="npu/0", members=("npu/0",), everyone=("npu/0",), exchange=lambda _, own: {"npu/0": own})
    level = Level(Folder(str(tmp_path)), group, Pace(), keep=2, durable=durable)
    names = []
    for step in (3, 5):
        level.write(Snapshot(Manifest(Position(step=step)), "npu/0", [make_whole_entry("weight", np.ones(4))], {}))
        level.drain()
        names += {path.name for path in tmp_path.iterdir()} - {*names}
    level.clean(3)
    level.close()
    renamed = [f"skipped-{names[-1]}.0"] if durable else []
    assert {path.name for path in tmp_path.iterdir()} == {*names[:-1], *renamed}


def test_folder_that_vanishes_does_not_end_training(tmp_path: Path) -> None:
    """The failed save cannot remove its part either; when the folder is back, the next one succeeds."""
    group = Mock(worker="npu/0", members=("npu/0",), is_single_worker=True)
    folder = tmp_path / "run"
    level = Level(Folder(str(folder)), group, Pace(), keep=1)
    folder.touch()  # a file in its place
    for step, fails in ((3, True), (5, False)):
        with pytest.warns(NebulaWarning, match="step 3 could not be saved") if fails else nullcontext():
            level.write(Snapshot(Manifest(Position(step=step)), "npu/0", [make_whole_entry("weight", np.ones(4))], {}))
            level.drain()
        folder.unlink() if fails else None
    level.close()
    assert [each.step for each in level.folder.scan() if not each.check()] == [5]


def test_message_of_a_full_disk_names_no_node_of_tensorflow() -> None:
    error = tf.errors.ResourceExhaustedError(None, None, "{{function_node a_b}} runs/a; No space left [Op:SaveV2]")
    assert _explain(error) == "runs/a; No space left"
