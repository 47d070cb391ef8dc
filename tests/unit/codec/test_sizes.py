"""The codec of a tensor, its estimated cost, and the text of an encoding."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.codec import (
    BF16,
    FP16,
    INT4,
    INT8,
    SVD,
    Codec,
    Coded,
    Precision,
    Rank,
    Structure,
    TopK,
    parse,
)
from whale_nebula.codec.encoding import Encoding, describe_bytes, describe_conditions, describe_encoding
from whale_nebula.codec.objects import CALL_SECONDS, CAST_SECONDS, COPY_SECONDS, FLOPS, PLAIN, Cost
from whale_nebula.codec.packing import PREFIX
from whale_nebula.codec.sizes import (
    choose_codec,
    cost,
    estimate_renewal,
    extra_bytes,
    mask_saves_bytes,
    nbytes,
    payload_bytes,
)
from whale_nebula.spec import Spec

PRECISIONS = st.sampled_from([FP16(), BF16(), INT8(), INT4()])
STRUCTURES = st.one_of(
    st.builds(SVD, st.floats(0.01, 1)),
    st.builds(TopK, st.floats(0.01, 1)),
    st.builds(Rank, st.integers(1, 200)),
)
CODECS = st.one_of(PRECISIONS, STRUCTURES, st.builds(lambda s, p: s >> p, STRUCTURES, PRECISIONS))
SIZES = st.lists(st.integers(0, 130), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from(["float16", "bfloat16", "float32", "float64"])


def size_in_frame(codec: Codec | None, dtype: str, dims: tuple[int, ...]) -> int:
    """Bytes as they cross."""
    return nbytes((codec or PLAIN).arrays(dims, dtype)) + PREFIX * (codec is not None)


@given(CODECS, DTYPES, SIZES)
def test_choose_codec_drops_parts_that_save_no_bytes(codec: Codec, dtype: str, dims: tuple[int, ...]) -> None:
    used = choose_codec(codec, dtype, dims)
    raw = Spec(dtype, dims).nbytes()
    assert used in (codec, codec.precision, None)
    assert used is None or size_in_frame(used, dtype, dims) < raw
    if used is not None and used.structure is not None:
        assert size_in_frame(used, dtype, dims) < size_in_frame(codec.precision, dtype, dims)
    elif used is None and codec.precision is not None:
        assert size_in_frame(codec.precision, dtype, dims) >= raw


@pytest.mark.parametrize(
    ("codec", "dims", "used"),
    [
        (SVD(0.6) >> FP16(), (512, 512), "svd(0.6) >> fp16"),
        (SVD(1.0) >> INT4(), (64, 48), "int4"),  # rows of factors are padded to whole blocks
        (SVD(0.6) >> INT8(), (1, 768), "int8"),
        (SVD(0.001), (32, 8), "None"),
        (Rank(96) >> INT8(), (64, 96), "int8"),
        (Rank(96), (64, 48), "None"),
        (TopK(0.5) >> INT4(), (64, 768), "topk(0.5) >> int4"),
        (TopK(0.9) >> INT4(), (64, 768), "int4"),
        (INT8(), (64, 1), "int8"),
        (INT8(), (1, 1), "None"),
        (FP16(), (0, 768), "None"),
        (FP16(), (), "None"),
    ],
)
def test_choose_codec_of_examples(codec: Codec, dims: tuple[int, ...], used: str) -> None:
    assert str(choose_codec(codec, "float32", dims)) == used


@pytest.mark.parametrize("taken", [True, False])
def test_choose_codec_of_a_gradient_follows_its_tensor(taken: bool) -> None:
    back = (TopK(0.9) >> INT8()).returned
    assert choose_codec(back, "float32", (64, 768), taken=taken) == (back if taken else INT8())
    assert choose_codec(SVD(0.5).returned, "float32", (64, 768), taken=taken) == SVD(0.5)


@given(CODECS, DTYPES, SIZES)
def test_payload_bytes_are_at_most_raw_and_extra_bytes(codec: Codec, dtype: str, dims: tuple[int, ...]) -> None:
    for encoding in (Encoding(codec), Encoding(codec, mask=""), Encoding(codec, zstd=True), Encoding(None, mask="")):
        raw = Spec(dtype, dims).nbytes()
        assert payload_bytes(str(encoding), dtype, dims) <= raw + extra_bytes(encoding, dims)
        assert payload_bytes(str(encoding), dtype, dims, str(encoding)) <= raw + extra_bytes(encoding, dims)


@given(st.none() | CODECS, DTYPES, SIZES, st.data())
def test_mask_saves_bytes_only_if_the_result_is_smaller(
    codec: Codec | None, dtype: str, dims: tuple[int, ...], data: st.DataObject
) -> None:
    rows = math.prod(dims[:-1])
    kept = data.draw(st.integers(0, rows))
    part = (kept, dims[-1])
    some = size_in_frame(choose_codec(codec, dtype, part), dtype, part) + -(-rows // 8)
    every = size_in_frame(choose_codec(codec, dtype, dims), dtype, dims)
    if mask_saves_bytes(codec, dtype, dims, kept):
        assert some <= every + PREFIX
    assert not mask_saves_bytes(codec, dtype, dims, rows)


DIMS = (8192, 768)
MEASURED = Path(__file__).parents[3] / "benchmarks" / "codec" / "result.json"
MEASURED_ON_EPYC, EPYC_CODECS = MEASURED.with_name("epyc.json"), ("coded(2)",)
ROWS: dict[str, tuple[Codec, bool]] = {
    "fp16": (FP16(), False),
    "bf16": (BF16(), False),
    "int8, block 64": (INT8(), False),
    "int8, block 64, by chance": (INT8(), True),
    "int4, block 32": (INT4(), False),
    "int4, block 32, by chance": (INT4(), True),
    "svd(0.6), rank 421": (SVD(0.6), False),
    "svd(0.2), rank 140": (SVD(0.2), False),
    "rank(96), shared": (Rank(96), False),
    "topk(0.1)": (TopK(0.1), False),
    "coded(2)": (Coded(2), False),
}


@pytest.mark.parametrize("name", ROWS)
def test_estimated_cost_is_within_twice_the_measured_cost(name: str) -> None:
    found = json.loads((MEASURED_ON_EPYC if name in EPYC_CODECS else MEASURED).read_text())
    shares = next(each["shares"] for each in found["codecs"] if each["codec"] == name)
    svds = found["svd_seconds"]
    codec, back = ROWS[name]
    estimate = cost(codec, DIMS, back=back)
    assert estimate is not None
    for side, estimated_seconds in enumerate(estimate):
        seconds = statistics.median(share[side] * svd for share, svd in zip(shares, svds, strict=True))
        assert seconds / 2 < estimated_seconds < 2 * seconds, ("encode", "decode")[side]


def test_precision_cost_depends_on_the_reduced_size() -> None:
    alone, both = cost(Rank(96), DIMS), cost(Rank(96) >> INT8(), DIMS)
    few, many = cost(INT8(), (8192, 96)), cost(INT8(), DIMS)
    assert alone and both and few and many
    assert both.seconds == pytest.approx(alone.seconds + few.seconds)
    assert few.seconds < many.seconds / 5


@pytest.mark.parametrize("dims", [(0, 8), (8, 0), (1, 1), (5,), (2, 3, 4)])
@pytest.mark.parametrize(
    "text",
    [
        "fp16",
        "int4",
        "svd(0.5) >> int8",
        "rank(2) >> bf16",
        "topk(0.5) >> int4",
        "bits",
        "axes >> coded(2)",
    ],
)
def test_cost_is_defined_for_any_sizes(text: str, dims: tuple[int, ...]) -> None:
    estimate = cost(parse(text), dims)
    assert estimate is not None and estimate.encode >= CAST_SECONDS and estimate.decode >= CAST_SECONDS


@pytest.mark.parametrize("codec", [INT8(), INT4()], ids=str)
def test_delta_cost_adds_passes_on_both_sides(codec: Codec) -> None:
    alone, kept = cost(codec, DIMS), cost(codec, DIMS, delta=True)
    assert alone and kept
    count = DIMS[0] * DIMS[1]
    assert (
        kept.encode > alone.encode + 10 * COPY_SECONDS * count and kept.decode > alone.decode + 8 * COPY_SECONDS * count
    )
    half = cost(codec, (DIMS[0] // 2, DIMS[1]), delta=True)
    assert half and half.seconds == pytest.approx(kept.seconds / 2, rel=0.01)


def test_estimated_renewal_is_within_twice_the_measured_renewal() -> None:
    """It was measured with 1024 rows, and as all of a renewal; a step looks at 256 and has a fiftieth of the rest."""
    found = json.loads(MEASURED.read_text())
    shares = next(each["shares"] for each in found["codecs"] if each["codec"] == "rank(96), renewing the basis")
    measured = statistics.median(share[0] * svd for share, svd in zip(shares, found["svd_seconds"], strict=True))
    rest = 50 * (estimate_renewal(Rank(96), DIMS) - estimate_renewal(Rank(1), DIMS))
    assert measured / 2 < 2.0 * 1024 * 768**2 / FLOPS + rest < 2 * measured


def test_renewal_is_estimated_for_shared_bases_only() -> None:
    assert (
        estimate_renewal(None, DIMS)
        == estimate_renewal(SVD(0.5), DIMS)
        == estimate_renewal(Rank(768), DIMS)
        == estimate_renewal(Rank(2), ())
        == 0.0
    )
    assert 0.0 < estimate_renewal(Rank(2), (8, 64)) < estimate_renewal(Rank(2) >> INT8(), (512, 64))


def test_cost_without_codec_and_of_scalars_is_zero() -> None:
    assert cost(None, DIMS) == cost(INT8(), ()) == Cost(0.0, 0.0)


@dataclass(frozen=True)
class UnknownPrecision(Precision):
    name = "mine"

    def parts(self, dims: Any, dtype: str) -> Any:
        return ()

    def encode(self, x: Any, key: Any = None) -> Any:
        return ()

    def decode(self, parts: Any, dims: Any, dtype: str) -> Any:
        return parts


@dataclass(frozen=True)
class UnknownStructure(Structure):
    name = "fewer"

    def numbers(self, dims: Any) -> Any:
        return (dims,)

    def reduce(self, state: Any, x: Any) -> Any:
        return x

    def expand(self, state: Any, numbers: Any, extras: Any, dims: Any) -> Any:
        return numbers


@pytest.mark.parametrize(
    "codec",
    [UnknownPrecision(), UnknownStructure(), UnknownStructure() >> INT8(), SVD(0.5) >> UnknownPrecision()],
    ids=str,
)
def test_cost_of_a_custom_codec_is_unknown(codec: Codec) -> None:
    assert cost(codec, DIMS) is None


class PrecisionWithCost(UnknownPrecision):
    nearest, by_chance = Cost(1e6, 2e6), Cost(3e6, 4e6)


class StructureWithCost(UnknownStructure):
    def cost(self, m: int, n: int) -> Cost:
        return Cost(float(m), float(n))


def test_cost_of_a_custom_codec_may_be_declared() -> None:
    assert cost(PrecisionWithCost(), (2, 5)) == pytest.approx((0.01 + CALL_SECONDS, 0.02 + CALL_SECONDS))
    assert cost(PrecisionWithCost(), (2, 5), back=True) == pytest.approx((0.03 + CALL_SECONDS, 0.04 + CALL_SECONDS))
    assert cost(StructureWithCost(), (2, 5)) == (2.0 + CALL_SECONDS, 5.0 + CALL_SECONDS)


# ---------------------------------------------------------------------- words
@pytest.mark.parametrize(
    ("encoding", "cell", "rest"),
    [
        ("none", "8 B", ""),
        ("int8", "8 B as int8", ""),
        ("svd(0.6) >> fp16", "8 B as svd(0.6) >> fp16", ""),
        ("none, mask", "at most 8 B, only marked rows", ""),
        ("none, mask tokens", "at most 8 B, only marked rows", "only rows marked by tokens"),
        ("int8, mask", "at most 8 B as int8", "only marked rows"),
        ("int8, zstd", "at most 8 B as int8", "then zstd if it saves bytes"),
        ("bits", "at most 8 B", "in as many bits as the numbers need"),
        ("auto", "at most 8 B", "unencoded, fp16, int8 or int4: the mildest that computation hides"),
        ("auto, mask", "at most 8 B", None),
        ("int4, from step 7", "8 B as int4", "from step 7 on"),
        ("int8, nonfinite skip", "8 B as int8", "steps with a NaN are skipped"),
        ("int4, delta ids", "8 B as int4", "as differences from the previous values of the samples in ids"),
        ("rank(2)", "8 B as rank(2)", "plus the basis every 50 steps"),
        (
            "int4, ramp fp16 int8 below 0.05", "8 B as int4",
            "first fp16, then int8, each until the error of the next is at most 5 %; then int4 (the size shown)",
        ),
    ],
)  # fmt: skip
def test_encoding_description(encoding: str, cell: str, rest: str | None) -> None:
    assert describe_bytes("8 B", encoding) == cell
    if rest is not None:
        assert describe_conditions(encoding) == rest
    assert describe_encoding(encoding).startswith("as") or not describe_encoding(encoding) or "8 B as" not in cell
