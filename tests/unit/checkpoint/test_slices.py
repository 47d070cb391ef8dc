"""Slices: any part of any tensor is read correctly, whoever wrote which part, with few bytes more than it has."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.manifest import Manifest, Position, Tensor
from whale_nebula.errors import CheckpointError
from whale_nebula.ir.layout import SPLIT, Layout
from whale_nebula.runtime.checkpoint.slices import Entry, Slice, Source, cut_tiles, find_slice
from whale_nebula.runtime.checkpoint.writer import Snapshot, commit_parts, write_part

LAYOUTS = [Layout(), *(Layout(SPLIT, axis) for axis in (0, 1)), Layout(SPLIT, 1, units=8)]
SHAPES = [(7, 24), (40, 16, 3), (96, 8)]


def list_slices(shape: tuple[int, ...], layout: Layout, count: int) -> list[Slice]:
    if layout.kind != SPLIT:
        return [Slice((0,) * len(shape), shape)]
    return [find_slice(shape, layout, count, index) for index in range(count)]


def take_slice(value: np.ndarray, part: Slice) -> np.ndarray:
    return value[tuple(slice(a, a + n) for a, n in zip(part.starts, part.sizes, strict=True))]


def write_checkpoint(path: Path, held: dict[str, list[Entry]]) -> Source:
    folder, manifest = Folder(str(path)), Manifest(Position(1))
    digests = {worker: write_part(folder, Snapshot(manifest, worker, each, {})).digest for worker, each in held.items()}
    commit_parts(folder, manifest, digests, list(held), 1)
    (found,) = folder.scan()
    return Source(found, found.manifests[""].identity)


@pytest.mark.parametrize("written", LAYOUTS, ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_slices_of_any_layout_are_read_by_any_other(tmp_path: Path, written: Layout, count: int) -> None:
    draw = np.random.default_rng(0)
    values = {str(shape): draw.random(shape).astype("float32") for shape in SHAPES}
    held: dict[str, list[Entry]] = {f"gpu/{number}": [] for number in range(count)}
    for name, value in values.items():
        for number, part in enumerate(list_slices(value.shape, written, count)):
            held[f"gpu/{number}"].append(
                Entry(name, Tensor("float32", value.shape), part, tf.constant(take_slice(value, part)))
            )
    source = write_checkpoint(tmp_path / "run", held)
    for name, value in values.items():
        assert np.array_equal(source.read(name), value)
        for read in LAYOUTS:
            for other in (2, 3, 4):
                for part in list_slices(value.shape, read, other):
                    assert np.array_equal(source.read(name, part), take_slice(value, part))
    plain = tf.train.load_checkpoint(os.path.join(source.path, "state"))
    assert all(np.array_equal(plain.get_tensor(name), value) for name, value in values.items())


def test_tiles_cover_the_slice_exactly_once() -> None:
    for held in (
        Slice((3, 0), (5000, 1000)),
        Slice((0,), (10_000_000,)),
        Slice((0, 8, 0), (64, 500, 300)),
        Slice((0, 0), (1, 5_000_000)),
    ):
        covered = np.zeros([a + n for a, n in zip(held.starts, held.sizes, strict=True)], "int8")
        tiles = cut_tiles(held, 4)
        for tile in tiles:
            take_slice(covered, tile)[...] += 1
        assert len(tiles) > 1 and covered.sum() == held.numbers and (take_slice(covered, held) == 1).all()
        assert all(tile.numbers * 4 > 1 << 20 for tile in tiles)


def test_reading_a_slice_reads_only_its_bytes(tmp_path: Path) -> None:
    value = np.random.default_rng(1).random((4096, 2048)).astype("float32")
    whole = Slice((0, 0), value.shape)
    source = write_checkpoint(
        tmp_path / "run", {"gpu/0": [Entry("w", Tensor("float32", value.shape), whole, tf.constant(value))]}
    )
    source.read("w", find_slice(value.shape, Layout(SPLIT, 0), 64, 0))  # what TensorFlow reads once
    for axis in (0, 1):
        for count in (2, 4)[: 2 - axis]:
            part = find_slice(value.shape, Layout(SPLIT, axis), count, 1)
            before = count_bytes_read()
            found = source.read("w", part)
            assert count_bytes_read() - before <= 1.05 * part.numbers * 4
            assert np.array_equal(found, take_slice(value, part))


def count_bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.parametrize("value", [True, 3, 2.5, "text", np.float16(1.5), np.array([], "int64"), b"bytes"], ids=repr)
def test_values_of_each_dtype_round_trip(tmp_path: Path, value: object) -> None:
    tensor = tf.constant(value)
    form = Tensor(tensor.dtype.name, tuple(tensor.shape.as_list()))
    whole = Slice((0,) * len(form.shape), form.shape)
    found = write_checkpoint(tmp_path / "run", {"gpu/0": [Entry("v", form, whole, tensor)]}).read("v")
    assert found.dtype == tensor.dtype and np.array_equal(found, tensor)


def test_missing_tensor_is_reported_by_name(tmp_path: Path) -> None:
    part = Slice((0,), (2,))
    source = write_checkpoint(tmp_path / "run", {"gpu/0": [Entry("w", Tensor("float32", (4,)), part, tf.ones([2]))]})
    with pytest.raises(CheckpointError, match="'w' is not in the checkpoint's files on this host"):
        source.read("w")
