"""Slices of tensors in TensorFlow's bundles: how a tensor is divided for writing, and how any part of it is read.

A bundle is read in complete slices. Large tensors are therefore written as tiles: a plan that holds half of a variable,
along any axis, reads about half of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.checkpoint import files
from whale_nebula.checkpoint.folder import FoundCheckpoint
from whale_nebula.checkpoint.manifest import Manifest, Part, Tensor
from whale_nebula.errors import CheckpointError
from whale_nebula.ir.layout import Layout, divide

_TILE = 9 << 17
"""The minimum bytes of a tile: TensorFlow reads slices below 2^20 through a buffer, with their neighbours."""
_CUTS = (96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""The possible numbers of tiles along an axis, which many numbers of workers divide."""


class Slice(NamedTuple):
    """A part of a tensor: its start and size along each axis."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """The number of elements."""
        return prod(self.sizes)

    def describe(self, shape: Sequence[int]) -> str:
        """TensorFlow's text for a slice; "" is the complete tensor.

        >>> Slice((0, 4), (2, 3)).describe((2, 8)), Slice((0, 0), (2, 8)).describe((2, 8))
        ('2 8 0,2:4,3', '')
        """
        if not shape or tuple(shape) == self.sizes:
            return ""
        parts = ":".join(f"{start},{size}" for start, size in zip(self.starts, self.sizes, strict=True))
        return f"{' '.join(map(str, shape))} {parts}"


def parse_slice(text: str, shape: Sequence[int]) -> Slice:
    """Parse the text of `Slice.describe`.

    >>> parse_slice("2 8 0,2:4,3", (2, 8))
    Slice(starts=(0, 4), sizes=(2, 3))
    """
    if not text:
        return Slice((0,) * len(shape), tuple(shape))
    pairs = [part.split(",") for part in text.rpartition(" ")[2].split(":")]
    return Slice(tuple(int(start) for start, _ in pairs), tuple(int(size) for _, size in pairs))


def find_slice(shape: Sequence[int], layout: Layout, count: int, index: int) -> Slice:
    """The part of a variable of this shape that the device number `index` of `count` holds under a layout."""
    sizes = divide(shape[layout.axis], count, layout.units)
    starts, own = [0] * len(shape), list(shape)
    starts[layout.axis], own[layout.axis] = sum(sizes[:index]), sizes[index]
    return Slice(tuple(starts), tuple(own))


def cut_tiles(whole: Slice, size: int) -> list[Slice]:
    """Divide a slice, whose elements have `size` bytes, into tiles; a small one is a single tile."""
    most = whole.numbers * size // _TILE
    if len(whole.sizes) == 0 or most < 2:
        return [whole]
    last = whole.sizes[-1] if len(whole.sizes) > 1 else 1
    columns = _count_cuts(last, int((most / 2) ** 0.5))
    rows = _count_cuts(whole.sizes[0], most // columns)
    tiles = []
    for start, height in _divide_axis(whole.starts[0], whole.sizes[0], rows):
        for left, width in _divide_axis(whole.starts[-1], last, columns):
            starts, sizes = list(whole.starts), list(whole.sizes)
            if len(sizes) > 1:
                starts[-1], sizes[-1] = left, width
            starts[0], sizes[0] = start, height
            tiles.append(Slice(tuple(starts), tuple(sizes)))
    return tiles


def _count_cuts(size: int, most: int) -> int:
    """The number of tiles along an axis, at most `most`: chosen so that halves and quarters of it are whole tiles."""
    fit = [count for count in _CUTS if count <= min(size, max(most, 1))]
    even = [count for count in fit if size % count == 0 and 2 * count >= fit[0]]
    return (even or fit or [1])[0]


def _divide_axis(start: int, size: int, count: int) -> Iterator[tuple[int, int]]:
    for number in range(count):
        begin, end = size * number // count, size * (number + 1) // count
        yield start + begin, end - begin


class Entry(NamedTuple):
    """A tensor to write: `value` is its part `local_slice`, which is local; `tensor` describes all of it."""

    name: str
    tensor: Tensor
    local_slice: Slice
    value: Any


def make_whole_entry(name: str, value: Any) -> Entry:
    """An entry of a tensor that is completely in this process."""
    tensor = tf.convert_to_tensor(value)
    shape = tuple(tensor.shape.as_list())
    return Entry(name, Tensor(tensor.dtype.name, shape), Slice((0,) * len(shape), shape), tensor)


def write_entries(prefix: str, entries: Sequence[Entry]) -> dict[str, tuple[str, ...]]:
    """Write a bundle of these entries; returns the text of each slice in it, by tensor."""
    names, specs, tensors = [], [], []
    slices: dict[str, tuple[str, ...]] = {}
    with tf.device("CPU:0"):
        for name, form, held, value in entries:
            found = cut_tiles(held, value.dtype.size or 1)
            for tile in found:
                begin = [a - b for a, b in zip(tile.starts, held.starts, strict=True)]
                names.append(name)
                specs.append(tile.describe(form.shape))
                tensors.append(value if tile == held else tf.slice(value, begin, tile.sizes))
            slices[name] = tuple(specs[len(specs) - len(found) :])
        tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=specs, tensors=tensors)
    return slices


def count_overlap(one: Slice, other: Slice) -> int:
    """The number of elements that two slices of a tensor have in common.

    >>> count_overlap(Slice((0, 0), (2, 8)), Slice((1, 4), (3, 2)))
    2
    """
    sides = zip(one.starts, one.sizes, other.starts, other.sizes, strict=True)
    return prod(max(0, min(a + m, b + n) - max(a, b)) for a, m, b, n in sides)


class Source:
    """The tensors of a checkpoint that can be read locally, from the bundles of one or more hosts, or from variables
    that have `kept` them, by name.
    """

    def __init__(self, found: FoundCheckpoint, identity: str) -> None:
        self.path = found.path
        self.manifests: Sequence[Manifest] = [m for m in found.manifests.values() if m.identity == identity]
        self.tensors: Mapping[str, Tensor] = {n: t for m in self.manifests for n, t in m.tensors.items()}
        self.parts: Mapping[str, Part] = {part.worker: part for m in self.manifests for part in m.parts}
        self.kept: dict[str, Any] = {}
        self._slices: dict[str, dict[str, list[Slice]]] = {}  # by tensor and bundle
        for manifest in self.manifests:
            bundle = files.join(self.path, manifest.bundle)
            for name, texts in ((name, texts) for part in manifest.parts for name, texts in part.slices.items()):
                known = self._slices.setdefault(name, {}).setdefault(bundle, [])
                shape = self.tensors[name].shape
                known += [each for text in texts if (each := parse_slice(text, shape)) not in known]

    def keep(self, variables: Mapping[str, Any]) -> None:
        """Read these tensors from variables from now on."""
        self.kept = dict(variables)
        forms = {name: Tensor(each.dtype.name, tuple(each.shape.as_list())) for name, each in variables.items()}
        self.tensors = {**forms, **self.tensors}

    @property
    def manifest(self) -> Manifest:
        """A manifest, for what is the same in all manifests of the checkpoint."""
        return self.manifests[0]

    def list_slices(self, name: str) -> list[Slice]:
        """The local slices of a tensor."""
        return list(dict.fromkeys(each for found in self._slices.get(name, {}).values() for each in found))

    def has(self, name: str, part: Slice | None = None) -> bool:
        """Whether a tensor, or a part of it, can be read locally."""
        return name in self.kept or (name in self._slices and self._find_bundle(name, part) is not None)

    def _find_bundle(self, name: str, part: Slice | None) -> str | None:
        shape = self.tensors[name].shape
        wanted = part or Slice((0,) * len(shape), tuple(shape))
        found = self._slices[name].items()
        return next(
            (b for b, held in found if sum(count_overlap(each, wanted) for each in held) >= wanted.numbers), None
        )

    def read(self, name: str, part: Slice | None = None) -> Any:
        """Read a tensor, or a part of it; raises if that is not available locally."""
        if name in self.kept:
            value = self.kept[name].read_value()
            return value if part is None else tf.slice(value, part.starts, part.sizes)
        form = self.tensors[name]
        bundle = self._find_bundle(name, part)
        if bundle is None:
            raise CheckpointError(
                f"{name!r} is not in the checkpoint's files on this host",
                where=self.path,
                why="other hosts have written it to their own folders",
                mend="read it in a run of all these hosts, or use one shared folder for all of them",
            )
        spec = "" if part is None else part.describe(form.shape)
        try:
            with tf.device("CPU:0"):
                return tf.raw_ops.RestoreV2(
                    prefix=bundle, tensor_names=[name], shape_and_slices=[spec], dtypes=[form.dtype]
                )[0]
        except tf.errors.OpError as error:
            raise CheckpointError(f"{name!r} cannot be read", where=self.path, why=error.message) from None
