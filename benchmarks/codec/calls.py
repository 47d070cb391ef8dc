"""The fixed cost of a call of an encoder and of a decoder: the constants of `codec/objects.py`.

    python benchmarks/codec/calls.py

One thread, in seconds of computing, through the functions by which boundaries are encoded and decoded.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf

from whale_nebula.codec import packing, parse

DIMS, TIMES = (32, 64), 200
CODECS = ("fp16", "bf16", "int8", "int4", "rank(8)", "rank(8) >> int8", "svd(0.5) >> fp16", "topk(0.1) >> int8")


def measure_call(run: Callable[[], Any]) -> float:
    """Average milliseconds of computing, which are independent of other programs."""
    run()
    began = time.process_time()
    for _ in range(TIMES):
        run()
    return 1e3 * (time.process_time() - began) / TIMES


def measure_codec(text: str) -> tuple[float, float]:
    """Milliseconds to encode and to decode a small tensor."""
    codec, x = parse(text), tf.constant(np.random.default_rng(0).standard_normal(DIMS, "float32"))
    structure = codec.structure
    state = None if structure is None else structure.init(DIMS)
    state = None if structure is None else structure.refresh(state, x, 0)[0]
    data = codec.compress(x, state).data
    there = measure_call(lambda: codec.compress(x, state))
    return there, measure_call(lambda: codec.restore(data, DIMS, "float32", state))


def main() -> None:
    """Print the costs, and that of packing whole numbers."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    for text in CODECS:
        encode, decode = measure_codec(text)
        print(f"{text:20} encode {encode:.2f} ms, decode {decode:.2f} ms")
    numbers = np.random.default_rng(0).integers(0, 30000, 2**20)
    packed = packing.pack(numbers)
    there = measure_call(lambda: packing.pack(numbers))
    back = measure_call(lambda: packing.unpack(packed, "int64", numbers.shape))
    print(f"whole numbers: encode {1e6 * there / numbers.size:.1f} ns each, decode {1e6 * back / numbers.size:.1f} ns")


if __name__ == "__main__":
    main()
