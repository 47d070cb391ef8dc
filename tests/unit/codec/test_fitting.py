"""What of a codec a tensor gets: never more bytes than with less of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.codec import BF16, FP16, INT4, INT8, SVD, Codec, Rank, TopK
from whale_nebula.codec.objects import PLAIN
from whale_nebula.codec.packing import PREFIX
from whale_nebula.codec.sizes import elides, extra_bytes, fitting, nbytes, payload_bytes, used_codec
from whale_nebula.codec.way import Way, parse_way
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


def size(codec: Codec | None, dtype: str, dims: tuple[int, ...]) -> int:
    """Bytes as they cross."""
    return nbytes((codec or PLAIN).arrays(dims, dtype)) + PREFIX * (codec is not None)


@given(CODECS, DTYPES, SIZES)
def test_less_of_a_codec_is_used_where_all_is_not_smaller(codec: Codec, dtype: str, dims: tuple[int, ...]) -> None:
    used = fitting(codec, dtype, dims)
    raw = Spec(dtype, dims).nbytes()
    assert used in (codec, codec.precision, None)
    assert used is None or size(used, dtype, dims) < raw
    if used is not None and used.structure is not None:
        assert size(used, dtype, dims) < size(codec.precision, dtype, dims)
    elif used is None and codec.precision is not None:
        assert size(codec.precision, dtype, dims) >= raw


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
def test_examples(codec: Codec, dims: tuple[int, ...], used: str) -> None:
    assert str(fitting(codec, "float32", dims)) == used


@pytest.mark.parametrize("taken", [True, False])
def test_a_gradient_returns_in_the_form_that_its_tensor_had(taken: bool) -> None:
    back = (TopK(0.9) >> INT8()).returned
    assert fitting(back, "float32", (64, 768), taken=taken) == (back if taken else INT8())
    assert fitting(SVD(0.5).returned, "float32", (64, 768), taken=taken) == SVD(0.5)


def test_the_plan_knows_of_a_gradient_whose_tensor_fell_back() -> None:
    there, back = parse_way("topk(0.9) >> int4"), parse_way("topk(0.9) >> int8")
    assert used_codec(there, "float32", (64, 768)) == INT4()
    assert used_codec(back, "float32", (64, 768), there) == INT8()
    assert payload_bytes(str(back), "float32", (64, 768), str(there)) == size(INT8(), "float32", (64, 768))


def test_positions_cross_once() -> None:
    text, dims = "topk(0.25) >> fp16", (64, 768)
    there, back = payload_bytes(text, "float32", dims), payload_bytes(text, "float32", dims, text)
    assert there - back == 64 * 768 // 8
    assert back == PREFIX + 64 * 192 * 2


@given(CODECS, DTYPES, SIZES)
def test_no_payload_is_larger_than_its_tensor_and_what_may_come_on_top(
    codec: Codec, dtype: str, dims: tuple[int, ...]
) -> None:
    for way in (Way(codec), Way(codec, mask=""), Way(codec, zstd=True), Way(None, mask="")):
        raw = Spec(dtype, dims).nbytes()
        assert payload_bytes(str(way), dtype, dims) <= raw + extra_bytes(way, dims)
        assert payload_bytes(str(way), dtype, dims, str(way)) <= raw + extra_bytes(way, dims)


@given(st.none() | CODECS, DTYPES, SIZES, st.data())
def test_rows_are_left_out_where_that_is_less(
    codec: Codec | None, dtype: str, dims: tuple[int, ...], data: st.DataObject
) -> None:
    rows = math.prod(dims[:-1])
    kept = data.draw(st.integers(0, rows))
    part = (kept, dims[-1])
    some = size(fitting(codec, dtype, part), dtype, part) + -(-rows // 8)
    every = size(fitting(codec, dtype, dims), dtype, dims)
    if elides(codec, dtype, dims, kept):
        assert some <= every + PREFIX
    assert not elides(codec, dtype, dims, rows)
