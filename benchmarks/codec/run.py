"""Error, size and cost of each codec on numbers with outlier channels; costs as multiples of one SVD.

    python benchmarks/codec/run.py            # everything; writes result.json
    python benchmarks/codec/run.py --quick    # an eighth of the rows, once; writes nothing

One thread. Alternately one `tf.linalg.svd` of the tensor, then an encode and a decode by each codec; the median of the
rounds. A cost is relative to the SVD of its own round.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf
from common import describe_machine, parser, verdict, write

from whale_nebula.codec import Coded, axes, structures
from whale_nebula.codec import blocks as rounding
from whale_nebula.codec import low_rank as lowrank
from whale_nebula.codec.blocks import dequantise, quantise

ROWS, COLUMNS = 8192, 768
OUTLIERS, TIMES, NORM_SPREAD = 12, 6.0, 0.4
"""So many channels are so many times the others; rows differ in norm (this is the spread of the norms' logarithm)."""
OTHER_DATA = {"no outliers": (0, 1.0), "4 channels x 12": (4, 12.0), "8 channels x 20": (8, 20.0)}
KEY = np.array([1, 2], np.uint32)


class Row(NamedTuple):
    """A codec to measure: its encoder, its decoder, and the bars (None: no bar)."""

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    error: float | None = None
    cost: float | None = None


def data(rows: int, channels: int = OUTLIERS, times: float = TIMES) -> np.ndarray:
    """Normal numbers in rows of different norms, with a few channels larger than the others."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((rows, COLUMNS), "float32")
    x[:, draw.choice(COLUMNS, channels, replace=False)] *= np.float32(times)
    return x * np.exp(NORM_SPREAD * draw.standard_normal((rows, 1), "float32"))


def make_block_row(name: str, bits: int, block: int, *bars: float | None, key: Any = None) -> Row:
    """Block-wise integers."""

    def decode(sent: Any) -> Any:
        dims = (int(sent[0].shape[0]), COLUMNS)
        return dequantise(*sent, dims=dims, bits=bits, block=block, dtype="float32")

    return Row(name, lambda x: quantise(x, bits=bits, block=block, key=key), decode, *bars)


def make_single_scale_row(bits: int, x: np.ndarray) -> Row:
    """Integers with one scale for the tensor, as in the papers: one row of one block."""

    def decode(sent: Any) -> Any:
        flat = dequantise(*sent, dims=(1, x.size), bits=bits, block=x.size, dtype="float32")
        return tf.reshape(flat, x.shape)

    name = f"int{bits}, one scale (for comparison)"
    return Row(name, lambda t: quantise(tf.reshape(t, [1, -1]), bits=bits, block=x.size), decode)


def make_low_rank_row(ratio: float, x: np.ndarray, optimal: Callable[[int], float]) -> Row:
    """The papers' SVD, whose optimal error is known."""
    k = lowrank.largest_rank(*x.shape, ratio)
    return Row(
        f"svd({ratio}), rank {k}",
        lambda x: lowrank.factor(x, k),
        lambda sent: lowrank.restore(*sent),
        1.01 * optimal(k),
        1 / 4,
    )


def make_shared_basis_row(r: int, x: np.ndarray) -> Row:
    """Coordinates in a basis that both sides hold."""
    q = tf.constant(lowrank.initial_basis(lowrank.compute_gram(x).numpy(), r))
    return Row(f"rank({r}), shared", lambda x: lowrank.project(x, q), lambda z: lowrank.expand(z, q), None, 1 / 25)


def make_renewal_row(r: int, x: np.ndarray) -> Row:
    """The producer's additional work once in 50 steps; only the basis crosses."""
    last = lowrank.initial_basis(lowrank.compute_gram(x).numpy(), r)

    def encode(x: Any) -> Any:
        return lowrank.renew_basis(lowrank.compute_gram(x, rows=1024).numpy(), last)

    return Row(f"rank({r}), renewing the basis", encode, lambda sent: None)


def make_top_k_row(fraction: float) -> Row:
    """The largest numbers of each row, with their positions."""
    k = lowrank.kept_count(COLUMNS, fraction)

    def encode(x: Any) -> Any:
        at = structures.find_largest(x, k)
        return structures.gather(x, at), structures.pack_positions(at, COLUMNS)

    def decode(sent: Any) -> Any:
        return structures.scatter(
            sent[0], structures.unpack_positions(sent[1], int(sent[0].shape[0]), COLUMNS, k), COLUMNS
        )

    return Row(f"topk({fraction})", encode, decode)


def make_coded_row(bits: float, count: int) -> Row:
    """Entropy coding at a number of bits a number."""
    chosen = Coded(bits)
    return Row(str(chosen), chosen.encode, lambda sent: chosen.decode(sent, (count, COLUMNS), "float32"))


def make_axes_row(bits: float, x: np.ndarray) -> Row:
    """The same on the tensor's principal axes."""
    q, alone = tf.constant(axes.make_axes(axes.compute_row_gram(x).numpy()).axes), make_coded_row(bits, len(x))
    return Row(
        f"axes, {alone.name}",
        lambda x: alone.encode(lowrank.project(x, q)),
        lambda sent: lowrank.expand(alone.decode(sent), q),
    )


def make_rows(x: np.ndarray, optimal: Callable[[int], float]) -> list[Row]:
    """All measured codecs."""
    return [
        Row("fp16", rounding.to_fp16, lambda sent: rounding.restore(sent, "float32")),
        Row("bf16", rounding.to_bf16, lambda sent: rounding.restore(sent, "float32")),
        make_block_row("int8, block 64", 8, 64, 0.013, 1 / 25),
        make_block_row("int8, block 64, by chance", 8, 64, None, 1 / 10, key=tf.constant(KEY)),
        make_block_row("int8, block 32", 8, 32),
        make_block_row("int8, block 128", 8, 128),
        make_single_scale_row(8, x),
        make_block_row("int4, block 32", 4, 32, 0.15, 1 / 10),
        make_block_row("int4, block 32, by chance", 4, 32, None, 1 / 10, key=tf.constant(KEY)),
        make_block_row("int4, block 64", 4, 64),
        make_single_scale_row(4, x),
        *(make_low_rank_row(ratio, x, optimal) for ratio in (0.6, 0.2)),
        make_shared_basis_row(96, x),
        make_renewal_row(96, x),
        make_top_k_row(0.1),
        make_coded_row(2, len(x)),
        make_axes_row(2, x),
    ]


def compute_optimal_errors(x: np.ndarray) -> Callable[[int], float]:
    """The error of the best matrix of each rank."""
    energy = np.linalg.svd(x.astype("float64"), compute_uv=False) ** 2
    return lambda k: float(np.sqrt(energy[k:].sum() / energy.sum()))


def measure_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the result is in memory, and the result."""
    began = time.perf_counter()
    result = run()
    for each in result if isinstance(result, tuple) else (result,):
        if isinstance(each, tf.Tensor):
            each.numpy()
    return time.perf_counter() - began, result


def count_bytes(sent: Any) -> int:
    """The bytes that would cross."""
    return sum(np.asarray(each).nbytes for each in (sent if isinstance(sent, tuple) else (sent,)))


def error(x: np.ndarray, back: Any) -> float | None:
    """The relative norm of the error."""
    return None if back is None else float(np.linalg.norm(back.numpy() - x) / np.linalg.norm(x))


def measure(x: np.ndarray, chosen: list[Row], rounds: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Errors and bytes once; seconds alternately, one SVD and then each codec."""
    tensor = tf.constant(x)
    found = []
    for row in chosen:
        once, sent = measure_seconds(lambda row=row: row.encode(tensor))
        more, back = measure_seconds(lambda row=row, sent=sent: row.decode(sent))
        share = count_bytes(sent) / x.nbytes
        found.append({"codec": row.name, "bytes": share, "error": error(x, back), "first": once + more, "shares": []})
    svds = []
    for _ in range(rounds):
        svds.append(measure_seconds(lambda: tf.linalg.svd(tensor))[0])
        for row, kept in zip(chosen, found, strict=True):
            encoding, sent = measure_seconds(lambda row=row: row.encode(tensor))
            decoding, _ = measure_seconds(lambda row=row, sent=sent: row.decode(sent))
            kept["shares"].append([encoding / svds[-1], decoding / svds[-1]])
        print("round", len(svds), f"one SVD {svds[-1]:.2f} s", flush=True)
    return found, svds


def format_row(row: Row, kept: dict[str, Any]) -> list[object]:
    """A line of the table."""
    encode, decode = (statistics.median(each) for each in zip(*kept["shares"], strict=True))
    value = kept["error"]
    pairs = [(value, row.error), (encode + decode, row.cost)]
    said = [verdict(have, bar) for have, bar in pairs if bar is not None and have is not None]
    bars = [f"1/{1 / row.cost:.0f}" if row.cost else "", f"{row.error:.3g}" if row.error else ""]
    words = "missed" if "missed" in said else "reached" if said else ""
    cost = f"1/{1 / (encode + decode):.0f}"
    lost = "" if value is None else f"{value:.2g}" if value < 0.001 else f"{value:.4f}"
    return [row.name, f"{kept['bytes']:.4f}", lost, bars[1], cost, bars[0], words, f"{kept['first']:.2f}"]


def measure_other_data(count: int) -> list[list[object]]:
    """Lines of the errors of the two main codecs on other data, as block errors depend on outliers."""
    lines = []
    for name, (channels, times) in OTHER_DATA.items():
        x = data(count, channels, times)
        for bits, block in ((8, 64), (4, 32)):
            row = make_block_row(f"int{bits}, block {block}: {name}", bits, block)
            lines.append([row.name, "", f"{error(x, row.decode(row.encode(tf.constant(x)))):.4f}", *[""] * 5])
    return lines


HEAD = [
    "codec",
    "bytes, of float32",
    "relative error",
    "at most",
    "cost, of one SVD",
    "at most",
    "verdict",
    "first call, s",
]


def main() -> int:
    """Measure, print and write."""
    made = parser(__doc__, "an eighth of the rows, once; writes nothing")
    made.add_argument("--rounds", type=int, default=7)
    options = made.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    about = describe_machine()
    x = data(ROWS // 8 if options.quick else ROWS)
    chosen = make_rows(x, compute_optimal_errors(x))
    found, svds = measure(x, chosen, 1 if options.quick else options.rounds)
    table = [format_row(row, kept) for row, kept in zip(chosen, found, strict=True)]
    table += measure_other_data(len(x))
    for line in [HEAD, *table]:
        print(*line, sep=" | ")
    if not options.quick:
        write(__file__, {"machine": about, "svd_seconds": svds, "codecs": found, "table": table}, [HEAD, *table])
    return int(any("missed" in line for line in table) and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
