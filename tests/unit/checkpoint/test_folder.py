"""The folder of checkpoints: valid and invalid ones, the effect of a power loss, and exclusive use by a run."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.checkpoint.folder import (
    Folder,
    FoundCheckpoint,
    Origin,
    choose_checkpoint,
    offer_checkpoints,
    save_memory_to_disk,
    write_origin,
)
from whale_nebula.checkpoint.manifest import Manifest, Position, Tensor, decode_manifest
from whale_nebula.checkpoint.parts import Start
from whale_nebula.cli.checkpoints import main
from whale_nebula.config import Config, Links
from whale_nebula.errors import CheckpointError, ConfigError, StateError
from whale_nebula.runtime.checkpoint.group import Group, choose_source
from whale_nebula.runtime.checkpoint.open_checkpoints import _check_folders
from whale_nebula.runtime.checkpoint.slices import Entry, Slice, Source
from whale_nebula.runtime.checkpoint.writer import Snapshot, commit_parts, write_part

WORKERS = ("gpu/0", "npu/0")


def save_checkpoint(
    folder: Folder, step: int, keep: int = 3, value: float = 0.0, start: Start | None = None
) -> Manifest:
    """Write a checkpoint of two workers, each of which has a half of one tensor and a tensor of its own. That of a
    `start` is not committed.
    """
    manifest, digests = Manifest(Position(step)), {}
    for number, worker in enumerate(WORKERS):
        half = Slice((number * 2, 0), (2, 3))
        own = np.full([2, 3], step + number + value, "float32")
        entries = [
            Entry("shared", Tensor("float32", (4, 3)), half, tf.constant(own)),
            Entry(f"own{number}", Tensor("float32", ()), Slice((), ()), tf.constant(float(step))),
        ]
        digests[worker] = write_part(folder, Snapshot(manifest, worker, entries, {}, start=start or Start())).digest
    if start is None:
        commit_parts(folder, manifest, digests, WORKERS, keep)
    return manifest


def read_tensors(found: FoundCheckpoint) -> tuple[list[float], float]:
    source = Source(found, next(iter(found.manifests.values())).identity)
    return source.read("shared").numpy()[:, 0].tolist(), float(source.read("own1"))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "run"))


def test_newest_checkpoints_are_kept_and_read(folder: Folder) -> None:
    for step in (3, 6, 9, 12):
        save_checkpoint(folder, step, keep=2)
    found = folder.scan()
    assert [(each.step, each.is_committed, each.check()) for each in found] == [(12, True, ()), (9, True, ())]
    assert read_tensors(found[0]) == ([12, 12, 13, 13], 12) and read_tensors(found[1]) == ([9, 9, 10, 10], 9)


def test_parts_of_workers_that_are_gone_are_committed(folder: Folder) -> None:
    """A run of two workers wrote them when it failed, and one process resumes."""
    save_checkpoint(folder, 3)
    save_checkpoint(folder, 5, start=Start("token", WORKERS))
    with nb.init(checkpoint=folder.path) as run:
        assert run.checkpoints.resumed.step == 5
    found = folder.scan()
    assert [(each.step, each.check()) for each in found] == [(5, ()), (3, ())]
    assert read_tensors(found[0]) == ([5, 5, 6, 6], 5)


def test_step_saved_again_replaces_the_earlier_checkpoint(folder: Folder) -> None:
    save_checkpoint(folder, 3)
    save_checkpoint(folder, 3, value=0.5)
    (found,) = folder.scan()
    assert read_tensors(found) == ([3.5, 3.5, 4.5, 4.5], 3) and found.check() == ()
    assert sorted(os.listdir(found.path)) == sorted(
        ["manifest.json", *(file.name for file in found.manifests[""].files)]
    )


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def append_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


DAMAGES = [truncate, flip_bit, append_byte, os.unlink]
FILES = ["manifest.json", "state.index", "state.data-00000-of-00002", "state.data-00001-of-00002"]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("name", FILES)
def test_damaged_checkpoint_is_detected(folder: Folder, name: str, damage: Callable[[Path], None]) -> None:
    save_checkpoint(folder, 3)
    save_checkpoint(folder, 6)
    damage(Path(folder.step_path(6)) / name)
    newest, before = folder.scan()
    assert newest.check() and before.check() == ()
    assert not newest.is_committed or name in newest.check()[0]


def test_prune_does_not_count_damaged_checkpoints(folder: Folder) -> None:
    for step in (3, 6, 9):
        save_checkpoint(folder, step)
    newest = Path(folder.step_path(9))
    next(newest.glob("*.index")).unlink()
    assert folder.prune(1) == [3] and [each.step for each in folder.scan()] == [9, 6]


def test_prune_refuses_the_folder_of_one_checkpoint(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """It would otherwise remove the other checkpoints of its run."""
    for step in (3, 6):
        save_checkpoint(folder, step)
    assert main(["prune", folder.step_path(6), "--keep", "1"]) != 0
    assert "a single checkpoint, not the folder of a run" in capsys.readouterr().err
    assert [each.step for each in folder.scan()] == [6, 3]
    assert main(["prune", f"{folder.path}/", "--keep", "1"]) == 0 and [each.step for each in folder.scan()] == [6]


def test_show_skips_a_checkpoint_that_was_not_committed(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(folder, 3)
    save_checkpoint(folder, 5, start=Start("token", WORKERS))
    assert main(["show", folder.path]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{folder.step_path(3)}: step 3")
    assert err == f"skipping {folder.step_path(5)}: it has no manifest: the run stopped while writing it\n"


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_export_writes_all_tensors_and_skips_damaged_checkpoints(
    kind: str, folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(folder, 3)
    short, exported = tf.constant([0.1, 2.0], tf.bfloat16), str(tmp_path / f"weights.{kind}")
    entry = Entry("short", Tensor("bfloat16", (2,)), Slice((0,), (2,)), short)
    part = write_part(folder, Snapshot(Manifest(Position(6)), "gpu/0", [entry], {}))
    commit_parts(folder, Manifest(Position(6)), {"gpu/0": part.digest}, ["gpu/0"], 3)
    load = np.load if kind == "npz" else pytest.importorskip("safetensors.numpy").load_file
    assert main(["export", folder.path, "--to", exported]) == 0
    assert load(exported)["short"].astype("float32").tolist() == np.asarray(short).astype("float32").tolist()
    next(Path(folder.step_path(6)).glob("*.index")).unlink()
    assert main(["export", folder.path, "--to", exported]) == 0
    assert load(exported)["own1"] == 3.0 and load(exported)["shared"].shape == (4, 3)
    assert "/step-00000006: state.index is missing" in capsys.readouterr().err
    assert main(["export", folder.path, "--to", str(tmp_path / "no" / f"weights.{kind}")]) == 1
    Path(exported).unlink()
    assert main(["export", folder.path, "--to", exported, "--only", "alien"]) == 1 and not Path(exported).exists()


def test_folder_named_after_another_step_is_reported(folder: Folder) -> None:
    save_checkpoint(folder, 3)
    shutil.copytree(folder.step_path(3), folder.step_path(9))
    assert [each.check() for each in folder.scan()] == [
        ("it was saved after step 3, but its folder is named for step 9",),
        (),
    ]


def test_swapped_checkpoint_files_are_detected(folder: Folder) -> None:
    save_checkpoint(folder, 3)
    save_checkpoint(folder, 6)
    one, other = (Path(folder.step_path(step)) / FILES[2] for step in (3, 6))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    assert ["digest" in each.check()[0] for each in folder.scan()] == [True, True]


def test_clean_renames_newer_and_removes_incomplete_checkpoints(folder: Folder) -> None:
    for step in (3, 6, 9):
        save_checkpoint(folder, step)
    truncate(Path(folder.step_path(9)) / "state.index")
    write_part(folder, Snapshot(Manifest(Position(12)), "gpu/0", (), {}))
    write_part(folder, Snapshot(Manifest(Position(6)), "gpu/0", (), {}))  # it was to be saved again
    assert folder.clean(6) == ["skipped-step-00000009.0"]
    assert sorted(os.listdir(folder.path)) == ["skipped-step-00000009.0", "step-00000003", "step-00000006"]
    assert folder.scan()[0].check() == () and ".gpu-0" not in os.listdir(folder.step_path(6))


def test_second_run_in_a_folder_is_refused(folder: Folder) -> None:
    hosts = [Folder(folder.path, group) for group in ("gpu-0", "npu-0")]
    folder.lock()
    for other in (Folder(folder.path), hosts[0]):
        with pytest.raises(StateError, match="another run is writing"):
            other.lock()
    folder.unlock()
    for host in hosts:  # those of one run may share it
        host.lock()
    for other in (folder, Folder(folder.path, "npu-0"), Folder(folder.path, "tpu-0", run="another")):
        with pytest.raises(StateError, match="another run is writing"):
            other.lock()


def test_forked_process_holds_no_lock(folder: Folder) -> None:
    """It may outlive the run, as those of a `multiprocessing.Pool` do whose parent is killed."""
    folder.lock()
    (reads, writes), (begun, begins) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(begins, b"x")
        os.read(reads, 1)
        os._exit(0)
    os.read(begun, 1)
    try:
        with pytest.raises(StateError, match="another run is writing"):
            Folder(folder.path).lock()
        folder.unlock()
        Folder(folder.path).lock()
    finally:
        os.write(writes, b"x")
        os.waitpid(child, 0)
        for each in (reads, writes, begun, begins):
            os.close(each)


def test_unwritable_folder_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    for path in (tmp_path / "runs", tmp_path / "runs" / "a", "unknown://runs/a"):
        with pytest.raises(ConfigError, match=f"checkpoints cannot be written to '{path}'"):
            Folder(str(path)).lock()


def test_part_with_another_digest_is_not_committed(folder: Folder) -> None:
    snapshot = Snapshot(
        Manifest(Position(3)), "gpu/0", [Entry("a", Tensor("int32", ()), Slice((), ()), tf.constant(1))], {}
    )
    write_part(folder, snapshot)
    with pytest.raises(CheckpointError, match="differs from the one that it wrote"):
        commit_parts(folder, snapshot.manifest, {"gpu/0": "another"}, ["gpu/0"], 1)
    assert not folder.scan()[0].is_committed


# ------------------------------------------------------------------ what a loss of power leaves
class PowerLoss:
    """What is on the disk if the power goes: of files and of folders what they held when they were synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.content: dict[int, bytes] = {}
        self.names: dict[str, dict[str, int]] = {}
        self.events = 0
        self._plain = os.fsync
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, opened: int) -> None:
        path, about = os.readlink(f"/proc/self/fd/{opened}"), os.fstat(opened)
        if stat.S_ISDIR(about.st_mode):
            self.names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self.content[about.st_ino] = Path(path).read_bytes()
        self._plain(opened)
        self.events += 1
        self.watch()

    def watch(self) -> None:
        """What is looked at after each."""

    def restore(self, folder: str, target: Path) -> None:
        """Put what is on the disk of a folder elsewhere."""
        target.mkdir()
        for name, inode in self.names.get(folder, {}).items():
            path = f"{folder}/{name}"
            if path in self.names:
                self.restore(path, target / name)
            elif inode in self.content:
                (target / name).write_bytes(self.content[inode])
            elif not name.startswith("step"):
                (target / name).touch()  # its name is there, and nothing in it


@pytest.mark.parametrize("keep", [1, 2])
def test_power_loss_at_any_point_leaves_a_checkpoint(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    power, safe, seen = PowerLoss(monkeypatch), [0], []

    def watch() -> None:
        target = tmp_path / f"after{power.events}"
        power.restore(folder.path, target)
        whole = [each for each in Folder(str(target)).scan() if not each.check()]
        assert not safe[-1] or (whole and whole[0].step >= safe[-1]), (power.events, safe)
        seen.append(whole[0].step if whole else 0)
        shutil.rmtree(target)

    power.watch = watch
    for step in (3, 6, 6, 9):
        save_checkpoint(folder, step, keep)
        safe.append(step)
    assert sorted(set(seen)) == [0, 3, 6, 9] and seen == sorted(seen) and len(seen) > 40


# ------------------------------------------------------------------ several hosts
def create_offers(
    step: int, groups: dict[str, tuple[str, ...]], identity: str = "a"
) -> Iterator[list[dict[str, object]]]:
    workers = sorted(worker for parts in groups.values() for worker in parts)
    for parts in groups.values():
        yield [{"step": step, "identity": identity, "parts": list(parts), "workers": workers}]


def test_checkpoint_missing_on_a_host_is_not_chosen() -> None:
    both = {"a": ("gpu/0", "gpu/1"), "b": ("npu/0",)}
    gpu, npu = (
        [*older, *newer] for older, newer in zip(create_offers(3, both), create_offers(6, both, "b"), strict=True)
    )
    assert choose_checkpoint([gpu, npu]) == (6, "b")
    assert choose_checkpoint([gpu, npu[:1]]) == (3, "a")
    assert choose_checkpoint([gpu, []]) is None and choose_checkpoint([]) is None


def test_each_host_of_a_folder_has_a_manifest(tmp_path: Path) -> None:
    digests, folders = {}, {}
    manifest = Manifest(Position(3))
    for worker in WORKERS:
        label = worker.replace("/", "-")
        folders[worker] = Folder(str(tmp_path / "shared"), label)
        entries = [Entry(worker, Tensor("int32", (2,)), Slice((0,), (2,)), tf.constant([1, 2]))]
        digests[worker] = write_part(folders[worker], Snapshot(manifest, worker, entries, {})).digest
    commit_parts(folders["gpu/0"], manifest, digests, ["gpu/0"], 2)
    assert choose_checkpoint([offer_checkpoints(folders["gpu/0"].scan())]) is None
    commit_parts(folders["npu/0"], manifest, digests, ["npu/0"], 2)
    (found,) = folders["gpu/0"].scan()
    chosen = choose_checkpoint([offer_checkpoints([found])])
    assert sorted(found.manifests) == ["gpu-0", "npu-0"] and found.check() == () and chosen is not None
    source = Source(found, chosen[1])
    assert [source.read(worker).numpy().tolist() for worker in WORKERS] == [[1, 2], [1, 2]]


def test_manifest_round_trips_and_invalid_content_is_refused() -> None:
    given = Manifest(Position(7, 1, 2, 3, programs={"a": 7}, logs={"loss": 0.5}), {"gpu/0": "x"}, seed=5)
    assert decode_manifest(given.encode(), "m") == given
    assert replace(given, time="later").identity == given.identity != replace(given, attempt=1).identity
    changed = given.encode().replace(b'"step": 7', b'"step": 8')
    for content, why in {
        b"": "not the manifest",
        b"{}": "not the manifest",
        b"[1]": "not the manifest",
        changed: "digest",
    }.items():
        with pytest.raises(CheckpointError) as caught:
            decode_manifest(content, "m")
        assert why in caught.value.why


def test_newest_checkpoint_of_disk_and_memory_is_chosen(tmp_path: Path) -> None:
    """A run goes on from the newest of what is on the disk and in memory."""
    disk, memory = Folder(str(tmp_path / "disk")), Folder(str(tmp_path / "memory"))
    for step in (3, 6):
        save_checkpoint(disk, step)
    save_checkpoint(memory, 8)
    group = Group(nb.Run(Config(), Links()))
    for damage, step in ((None, 8), (truncate, 6)):
        if damage is not None:
            damage(Path(memory.step_path(8)) / "state.index")
        source = choose_source(group, lambda: [*disk.scan(), *memory.scan()])
        assert source is not None and source.manifest.position.step == step


class _TwoHostGroup(Group):
    """A host beside another one, which has the same checkpoint on its disk and nothing in its memory."""

    def exchange(self, doing: str, offer: Any) -> dict[str, Any]:
        offered = [each for each in offer if each["step"] == 3] if doing.startswith("the checkpoints") else offer
        return {self.worker: offer, "tpu/0": offered}


def test_incomplete_newer_memory_checkpoint_does_not_hide_the_disks(tmp_path: Path) -> None:
    disk, memory = Folder(str(tmp_path / "disk")), Folder(str(tmp_path / "memory"))
    save_checkpoint(disk, 3)
    for step in (5, 6, 7):
        save_checkpoint(memory, step)
    for step in (5, 6, 7):  # those are parts of what the other host has lost
        path = Path(memory.manifest_path(step, ""))
        manifest = decode_manifest(path.read_bytes(), "m")
        path.write_bytes(replace(manifest, workers={**manifest.workers, "tpu/0": "x"}).encode())
    source = choose_source(_TwoHostGroup(nb.Run(Config(), Links())), lambda: [*memory.scan(), *disk.scan()])
    assert source is not None and source.manifest.position.step == 3


def test_newer_checkpoints_in_memory_are_saved_to_disk(folder: Folder, tmp_path: Path) -> None:
    """What is older, or damaged, is not; what a worker has written by half is replaced. All newer ones are, because
    another launcher may not have the newest.
    """
    memory = Folder(str(tmp_path / "memory" / "0123"))
    write_origin(memory, Origin(folder.path, "", "run", keep=1))
    for step in (3, 6):
        save_checkpoint(folder, step)
    save_checkpoint(memory, 6)
    assert list(save_memory_to_disk(str(tmp_path / "memory"))) == []
    for step in (7, 8, 9):
        save_checkpoint(memory, step)
    truncate(Path(memory.step_path(9)) / "state.index")
    Path(folder.worker_path(8, "gpu/0")).mkdir(parents=True)
    assert list(save_memory_to_disk(str(tmp_path / "memory"))) == [
        f"step {step}, which was saved in memory, is saved in {folder.path}" for step in (8, 7)
    ]
    assert [(each.step, each.check()) for each in folder.scan()] == [(8, ()), (7, ())]
    assert read_tensors(folder.scan()[0]) == ([8, 8, 9, 9], 8)
    save_checkpoint(memory, 10)
    folder.lock()
    (line,) = save_memory_to_disk(str(tmp_path / "memory"))
    assert (
        line.startswith("step 10, which was saved in memory, could not be saved") and "another run is writing" in line
    )
    folder.unlock()


def test_workers_with_different_folders_on_a_host_are_refused() -> None:
    _check_folders({"gpu/0": "/a", "gpu/1": "/a"})
    with pytest.raises(CheckpointError, match="gpu/0 saves to '/a', and gpu/1 to '/b'"):
        _check_folders({"gpu/0": "/a", "gpu/1": "/b"})
