"""The bytes of every codec's payload, and their decoded values, in one golden file.

Codecs that use a linear algebra library (singular vectors, learned axes) give other bytes on another processor: for
them the file holds the length and the rounded relative error instead of digests.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.golden.files import check_golden
from tests.unit.runtime.test_channels import Pair
from whale_nebula.codec import CODECS
from whale_nebula.errors import NebulaError
from whale_nebula.transport.protocol import Packed

PRECISIONS = ("fp16", "bf16", "int8", "int4", "coded(3)", "coded(1.5)")
STRUCTURES = ("topk(0.25)", "svd(0.6)", "rank(12)", "axes")
CHAINS = (
    *(f"{structure} >> {precision}" for structure in STRUCTURES[:3] for precision in ("fp16", "int8")),
    "axes >> coded(3)",
    "axes >> int4",
)
OPTIONS = ("none, zstd", "int8, zstd", "bf16, zstd", "fp16, zstd", "topk(0.25), zstd")
WAYS = (*PRECISIONS, *STRUCTURES[:3], *CHAINS, *OPTIONS)
LINEAR_ALGEBRA = ("svd", "rank", "axes")
SHAPES = ((6, 48), (5, 7, 33), (1, 1), (0, 48), (3, 130))
DTYPES = ("float32", "float16", "bfloat16", "float64")


def digest(array: np.ndarray) -> str:
    data = np.ascontiguousarray(array)
    return hashlib.sha256(f"{data.dtype} {data.shape}".encode() + data.tobytes()).hexdigest()[:16]


def payload_bytes(payload: Any) -> np.ndarray:
    return np.frombuffer(payload.data, np.uint8) if isinstance(payload, Packed) else payload.numpy()


def draw(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Numbers that every machine draws alike."""
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(tf.cast(drawn, dtype).numpy())


def describe(way: str, x: np.ndarray, decoded: np.ndarray, payload: Any) -> str:
    data = payload_bytes(payload)
    if not way.startswith(LINEAR_ALGEBRA):
        return f"{data.nbytes} bytes {digest(data)}, decoded {digest(decoded)}"
    original, got = x.astype("float64"), decoded.astype("float64")
    error = float(np.linalg.norm(got - original) / (np.linalg.norm(original) or 1.0))
    size = "about" if "coded" in way else "exactly"
    nbytes = round(data.nbytes, -2) if "coded" in way else data.nbytes
    return f"{size} {nbytes} bytes, relative error {error:.1f}"


def cross(way: str, x: np.ndarray) -> Iterator[str]:
    """A tensor and its gradient, each in two steps: states and rounding differ in the second."""
    pair = Pair(way, way)
    for step in range(2):
        try:
            decoded = pair.cross(x, step)
            yield f"forward {step}: {describe(way, x, decoded, pair.payload)}"
            decoded = pair.cross_back(x, step)
            yield f"backward {step}: {describe(way, x, decoded, pair.payload)}"
        except NebulaError as error:
            yield f"step {step}: refused, {error.code}"


def list_payloads(way: str) -> list[str]:
    """The lines of one codec; compositions cross in one shape, their members in all of them."""
    single = way in PRECISIONS or way in STRUCTURES
    inputs = {f"float32{list(shape)}": draw(shape, "float32", 7) for shape in (SHAPES if single else SHAPES[:1])}
    inputs |= {f"{dtype}[6, 48]": draw((6, 48), dtype, 7) for dtype in (DTYPES[1:] if single else ())}
    inputs["float32[6, 48] of zeros"] = np.zeros((6, 48), "float32")
    inputs["float32[6, 48] of 1e30"] = draw((6, 48), "float32", 7) * np.float32(1e30)
    for name, number in (("a NaN", np.nan), ("an infinity", np.inf)):
        inputs[f"float32[6, 48] with {name}"] = draw((6, 48), "float32", 7)
        inputs[f"float32[6, 48] with {name}"][2, 5] = number
    return [f"{way}: {name}: {line}" for name, x in inputs.items() for line in cross(way, x)]


def test_payloads_match_the_golden_file(request: pytest.FixtureRequest) -> None:
    check_golden(request, "payloads.txt", "\n".join(line for way in WAYS for line in list_payloads(way)))


def test_payloads_cover_all_codecs() -> None:
    written = {part.partition("(")[0] for way in WAYS for part in way.replace(",", " >> ").split(" >> ")}
    assert {name for name, kind in CODECS.items() if kind.__module__.startswith("whale_nebula.")} - {"bits"} <= written
