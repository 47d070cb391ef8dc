"""Measure TensorFlow's device: rates of kernels and of memory, seconds of a call; and codecs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.codec import INT8, SVD, Codec, Precision, Rank, TopK
from whale_nebula.codec.registry import CODECS
from whale_nebula.errors import NebulaError
from whale_nebula.hardware.clusters import Device, format_quantity
from whale_nebula.hardware.measurements import RUNS, CallTime, count_cores, fit_line, time_calls

Report = Callable[[str], None]
_CHANNELS, _IMAGES = 32, 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured operands: sides of square matrices, sides of images, elements of element-wise kernels and
    of memory copies, rows and columns of the tensor for codecs; and runs of each.
    """

    matmul: tuple[int, ...] = (256, 512, 1024)
    conv: tuple[int, ...] = (16, 32, 64)
    elementwise: tuple[int, ...] = (1 << 16, 1 << 19, 1 << 22)
    memory: int = 1 << 23
    codec: tuple[int, int] = (8192, 256)
    runs: int = RUNS


FULL = Sizes()
QUICK = Sizes((32, 64), (8, 16), (1 << 10, 1 << 14), 1 << 16, (64, 64), 3)


@dataclass(frozen=True)
class DeviceMeasurement:
    """A measured device, with the spread of each of its numbers, by "rates.matmul", "call_seconds" ..."""

    device: Device
    spreads: Mapping[str, float]


def measure_device(sizes: Sizes = FULL, report: Report = lambda text: None) -> DeviceMeasurement:
    """Measure the device that TensorFlow uses in this process; `report` receives a line for each number."""
    gpus = tf.config.list_physical_devices("GPU")
    spreads, rates = {}, {}
    for kernel, points in _create_kernels(sizes).items():
        timed = [(flops, _time(run, sizes)) for flops, run in points]
        fitted = fit_line([(flops, each.seconds) for flops, each in timed])
        flops, largest = timed[-1]
        rates[kernel] = 1 / fitted.beta if fitted.beta else flops / largest.seconds
        spreads[f"rates.{kernel}"] = largest.spread
        report(f"{kernel}: {rates[kernel] / 1e9:.3g} GFLOP/s, spread {largest.spread:.0%}")
    spreads["flops_per_s"] = spreads["rates.matmul"]
    moved = _time(_compile(tf.negative, sizes.memory), sizes)
    memory = 2 * 4 * sizes.memory / moved.seconds  # each element is read and written
    spreads["memory_bytes_per_s"] = moved.spread
    report(f"memory: {memory / 1e9:.3g} GB/s, spread {moved.spread:.0%}")
    call = _time(_compile(lambda x: x, 1), sizes)
    spreads["call_seconds"] = call.spread
    report(f"empty call: {call.seconds * 1e6:.3g} µs, spread {call.spread:.0%}")
    kind, held = ("gpu", None) if gpus else ("cpu", read_total_memory())
    spreads |= {"memory_bytes": 0.0} if held is not None else {}
    return DeviceMeasurement(Device(kind, count_cores(), rates["matmul"], held, memory, rates, call.seconds), spreads)


def _create_kernels(sizes: Sizes) -> dict[str, list[tuple[float, Callable[[], Any]]]]:
    """By kind of kernel, calls with their floating-point operations."""
    images = [(side, (_IMAGES, side, side, _CHANNELS)) for side in sizes.conv]
    window = tf.constant(_draw(3, 3, _CHANNELS, _CHANNELS))
    return {
        "matmul": [(2.0 * side**3, _compile(tf.matmul, (side, side), (side, side))) for side in sizes.matmul],
        "conv": [
            (18.0 * _CHANNELS**2 * _IMAGES * side**2, _compile(lambda x: tf.nn.conv2d(x, window, 1, "SAME"), form))
            for side, form in images
        ],
        "elementwise": [(2.0 * count, _compile(lambda x: x * 1.5 + 0.5, count)) for count in sizes.elementwise],
    }


def _compile(function: Callable[..., Any], *forms: Any) -> Callable[[], Any]:
    """A call of a compiled TensorFlow function on random tensors."""
    tensors = [tf.constant(_draw(*np.atleast_1d(form))) for form in forms]
    traced = tf.function(function, autograph=False).get_concrete_function(
        *(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors)
    )
    return lambda: traced(*tensors)


def _draw(*form: int) -> Any:
    return np.random.default_rng(1).standard_normal(form, "float32")


def _time(call: Callable[[], Any], sizes: Sizes) -> CallTime:
    """Time a call until the device has finished it."""

    def run() -> None:
        call()
        wait()

    wait = tf.test.experimental.sync_devices if tf.config.list_physical_devices("GPU") else lambda: None
    return time_calls(run, sizes.runs)


def read_total_memory() -> int | None:
    """Bytes of memory of this machine, within the container's limit; None if unknown."""
    known = []
    with suppress(OSError):
        found = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text("utf-8"))
        known += [1024 * int(found[1])] if found else []
    with suppress(OSError, ValueError):
        known.append(int(Path("/sys/fs/cgroup/memory.max").read_text("utf-8")))
    return min(known, default=None)


# ---------------------------------------------------------------------- codecs
@dataclass(frozen=True)
class CodecCosts:
    """Costs of codecs: seconds for a byte of a tensor, to encode and to decode it; and the spread of each."""

    seconds_per_byte: Mapping[str, float]
    spreads: Mapping[str, float]


def measure_codecs(sizes: Sizes = FULL, report: Report = lambda text: None) -> CodecCosts:
    """Measure all codecs of the registry that can be used alone, and need no state of a run other than a basis."""
    x = tf.constant(_draw(*sizes.codec))
    found, spreads = {}, {}
    for codec in _list_codecs(sizes.codec[1]):
        timed = _time_codec(codec, x, sizes)
        found[str(codec)] = timed.seconds / (4 * x.shape.num_elements())
        spreads[str(codec)] = timed.spread
    report("codecs, per MB: " + ", ".join(f"{name} {format_quantity(1e6 * each, 's')}" for name, each in found.items()))
    return CodecCosts(found, spreads)


def _list_codecs(columns: int) -> Iterator[Codec]:
    """Precisions with their defaults, and structures with a usual size."""
    usual = (SVD(0.6), TopK(0.1), Rank(min(96, columns // 2)) >> INT8())
    for kind in CODECS.values():
        if issubclass(kind, Precision) and not kind.lossless:
            with suppress(TypeError, NebulaError):  # it has required arguments
                yield kind()
    yield from usual


def _time_codec(codec: Codec, x: Any, sizes: Sizes) -> CallTime:
    structure = codec.structure
    state = None if structure is None else structure.init(tuple(x.shape))
    if isinstance(structure, Rank):
        state, _ = structure.refresh(structure.init(tuple(x.shape)), x, 0)

    def both() -> None:
        made = codec.compress(x, state)
        codec.restore(made.data, tuple(x.shape), x.dtype.name, state)

    return _time(both, sizes)
