"""Four bits a number and fewer: how the bytes lie, the same by numpy, and what must hold of what comes back."""

from functools import cache

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.codec import INT1, INT2, INT3, TURNED4, parse
from whale_nebula.codec.turned import LEAST, apart, block_of, dequantise, parts, quantise, spread, turned_back, turner
from whale_nebula.errors import OptionError, RemoteProtocolError

BLOCKS = st.sampled_from([8, 64])
BITS = (4, 3, 2, 1)
LOST = {4: 0.14, 3: 0.23, 2: 0.38, 1: 0.65}
"""Of the norm, at most: a little more than of normal numbers."""
DTYPES = ["float16", "bfloat16", "float32", "float64"]
DRAWN = np.array([11, 12], np.uint32)
KEYS = pytest.mark.parametrize("key", [None, DRAWN], ids=["fixed", "by chance"])
DIMS = st.sampled_from([(65,), (3, 64), (2, 2, 65), (0, 64), (4, 0), (2, 0, 65), ()])
NUMBERS = st.one_of(
    st.floats(width=32),
    st.floats(-4, 4, width=32),
    st.sampled_from([0.0, -0.0, 1e30, -1e30, 3.4e38, 1e-40, 1e-45, 1e-25, np.inf, -np.inf, np.nan]).map(np.float32),
)
TENSORS = DIMS.flatmap(lambda dims: hnp.arrays("float32", dims, elements=NUMBERS.map(float), fill=st.just(0.5)))


def crossed(x: tf.Tensor, bits: int = 2, block: int = 64, key: np.ndarray | None = None) -> np.ndarray:
    sent = quantise(x, bits=bits, block=block, key=key)
    back = dequantise(*sent, dims=tuple(x.shape), bits=bits, block=block, dtype=x.dtype.name)
    assert back.dtype == x.dtype
    return back.numpy().astype("float64")


def off(back: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(back - x) / np.linalg.norm(x))


def whole_blocks(x: np.ndarray, bits: int, block: int) -> np.ndarray:
    """For each number whether its block is finite."""
    if not x.size:
        return np.ones(x.shape, np.bool_)
    columns = x.shape[-1] if x.ndim else 1
    size = block_of(columns, bits, block)
    rows = np.isfinite(x.astype("float32")).reshape(-1, columns)
    found = [rows[:, start : start + size].all(axis=1) for start in range(0, columns, size)]
    return spread(np.stack(found, axis=1), columns, bits, block).reshape(x.shape)


# ---------------------------------------------------------------------- sizes
@given(st.integers(1, 2000), st.sampled_from(BITS), st.sampled_from([8, 16, 32, 64, 128, 256]))
def test_a_block_is_the_one_of_the_fewest_bytes_and_at_most_what_was_asked(columns: int, bits: int, most: int) -> None:
    def size(block: int) -> int:
        return -(-columns // block) * (block * bits // 8 + 2)

    chosen = block_of(columns, bits, most)
    assert LEAST <= chosen <= most
    assert size(chosen) == min(size(2**power) for power in range(3, most.bit_length()))
    assert size(chosen) == sum(part.nbytes for part in parts((1, columns), bits, most)) - 8


@pytest.mark.parametrize(
    ("codec", "bits"),
    [(TURNED4(), 4.125), (INT3(), 3.125), (INT2(), 2.125), (INT2(64), 2.25), (INT2(32), 2.5), (INT1(), 1.125)],
)
def test_bits_of_a_number_with_its_part_of_a_scale(codec: INT3 | INT2 | INT1, bits: float) -> None:
    assert 8 * sum(part.nbytes for part in codec.parts((512, 768), "float32")[:2]) == 512 * 768 * bits


@pytest.mark.parametrize("block", [0, 4, 48, 512, 64.0, True, "64"])
@pytest.mark.parametrize("kind", [INT3, INT2, INT1])
def test_a_block_is_a_power_of_two(kind: type[INT2], block: object) -> None:
    with pytest.raises(OptionError, match="power of two") as caught:
        kind(block)  # type: ignore[arg-type]
    assert caught.value.mend == f"nb.codec.{kind.__name__}(128)"


def test_its_text_has_a_block_only_where_that_was_asked() -> None:
    texts = ("int2", "int2(128)", "int2(32)", "int1(64)", "rank(8) >> int3")
    assert [str(parse(text)) for text in texts] == ["int2", "int2", "int2(32)", "int1(64)", "rank(8) >> int3"]
    with pytest.raises(OptionError, match="power of two"):
        parse("int2(3)")


# ---------------------------------------------------------------------- bytes
@pytest.mark.parametrize("block", [2**power for power in range(3, 9)])
def test_to_turn_and_to_turn_back_is_to_multiply(block: int) -> None:
    h = turner(block).astype(int)
    assert (h @ h.T == block * np.eye(block, dtype=int)).all()
    assert np.abs(h.sum(axis=0)).max() <= block / 2, "a block of equal numbers does not become one number"


@pytest.mark.parametrize("bits", BITS)
def test_golden_bytes(bits: int) -> None:
    """The wire format: these do not change."""
    x = np.arange(-16, 16, dtype="float32").reshape(2, 16)
    scales, packed, key = quantise(tf.constant(x), bits=bits, block=16)
    assert (packed.numpy().tolist(), scales.numpy().astype("float32").ravel().tolist()) == GOLDEN[bits]
    assert key.numpy().tolist() == [0, 0]
    scales, packed, key = quantise(tf.constant(x), bits=bits, block=16, key=DRAWN)
    assert (packed.numpy().tolist(), scales.numpy().astype("float32").ravel().tolist()) == BY_CHANCE[bits]
    assert np.asarray(key).tolist() == DRAWN.tolist()


BY_CHANCE = {
    4: ([[204, 86, 72, 86, 103, 101, 71, 101], [117, 136, 15, 135, 119, 136, 115, 136]], [0.478515625, 0.388671875]),
    3: ([[238, 171, 92, 171, 19, 0], [254, 0, 199, 3, 2, 253]], [0.77734375, 0.8046875]),
    2: ([[119, 85, 6, 85], [85, 170, 67, 169]], [1.453125, 1.7734375]),
    1: ([[19, 0], [2, 253]], [2.765625, 4.6875]),
}
GOLDEN = {
    4: ([[149, 69, 136, 188, 150, 186, 135, 219], [45, 199, 165, 149, 120, 72, 106, 89]], [0.427734375, 0.380859375]),
    3: ([[94, 166, 12, 154, 242, 238], [195, 163, 150, 134, 45, 60]], [0.73046875, 0.61328125]),
    2: ([[165, 201, 166, 255], [75, 57, 105, 105]], [1.15625, 1.2109375]),
    1: ([[242, 238], [45, 60]], [2.046875, 1.8125]),
}


@pytest.mark.parametrize("bits", BITS)
@given(rows=st.integers(0, 3), columns=st.sampled_from([1, 65]), block=BLOCKS, draw=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_numpy_turns_back_what_tensorflow_does(bits: int, rows: int, columns: int, block: int, draw: int) -> None:
    scales, packed, _ = (part.dims for part in parts((rows, columns), bits, block))
    data = np.random.default_rng(draw).integers(0, 256, packed, np.uint8)
    wide = np.linspace(0.5, 3, int(np.prod(scales)), dtype="float32").reshape(scales).astype(ml_dtypes.bfloat16)
    sent = tf.constant(wide), tf.constant(data), tf.zeros([2], tf.uint32)
    made = dequantise(*sent, dims=(rows, columns), bits=bits, block=block, dtype="float32")
    integers = turned_back(data, columns, bits, block)
    assert integers.dtype == np.int16 and np.abs(integers, dtype="int64").max(initial=0) < 2**bits * block
    np.testing.assert_array_equal(made.numpy(), integers * spread(wide.astype("float32"), columns, bits, block))


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (4, [1, 2, 15, 8], [0b11110001, 0b10000010]),
        (1, [0, 1, 1, 0, 0, 0, 0, 1], [0b10000110]),
        (2, [3, 2, 1, 0], [0b00011011]),
        (3, [0, 1, 2, 3, 4, 5, 6, 7], [0b10001000, 0b11011101, 0b11110000]),
    ],
)
def test_how_integers_lie_in_bytes(bits: int, codes: list[int], packed: list[int]) -> None:
    """The lower two bits of three first, the first quarter of a row in the lowest; then the upper ones, by eighths."""
    assert apart(np.array([packed], np.uint8), bits).tolist() == [[2 * code - 2**bits + 1 for code in codes]]


@pytest.mark.parametrize("bits", BITS)
@KEYS
@given(x=TENSORS, block=BLOCKS)
@settings(max_examples=15, deadline=None)
def test_any_tensor_crosses_in_the_parts_that_were_foretold(
    bits: int, key: np.ndarray | None, x: np.ndarray, block: int
) -> None:
    sent = quantise(tf.constant(x), bits=bits, block=block, key=key)
    due = [tuple(part) for part in parts(x.shape, bits, block)]
    assert [(np.asarray(part).dtype.name, tuple(part.shape)) for part in sent] == due
    back, whole = crossed(tf.constant(x), bits, block, key), whole_blocks(x, bits, block)
    assert back.shape == x.shape
    assert np.isnan(back[~whole]).all() and np.isfinite(back[whole]).all()


@given(st.binary(min_size=30, max_size=30))
@settings(max_examples=20, deadline=None)
def test_any_bytes_decode_to_something(data: bytes) -> None:
    scales = np.frombuffer(data[:4], ml_dtypes.bfloat16).reshape(2, 1)
    packed = np.frombuffer(data[4:28], "uint8").reshape(2, 12)
    key = np.frombuffer(data[22:30], np.uint32)
    back = dequantise(tf.constant(scales), tf.constant(packed), key, dims=(2, 26), bits=3, block=32, dtype="float32")
    assert back.shape == (2, 26) and not np.isinf(back).any()


def test_parts_of_another_tensor_are_refused() -> None:
    scales, packed, key = quantise(tf.ones([4, 100]), bits=2, block=64)
    wide = tf.cast(scales, "float32")
    for wrong in ((packed, scales, key), (scales[:3], packed, key), (scales, packed[:, :-1], key), (wide, packed, key)):
        with pytest.raises(RemoteProtocolError, match="not the parts"):
            dequantise(*wrong, dims=(4, 100), bits=2, block=64, dtype="float32")


# ---------------------------------------------------------------------- what is lost
@cache
def kinds() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    normal = draw.standard_normal((128, 256))
    return {
        "normal": normal,
        "outliers": np.where(np.arange(256) % 64 == 3, 20, 1) * normal,
        "positive": np.maximum(normal, 0),
        "zeros": np.where(draw.random(normal.shape) < 0.8, 0, normal),
        "equal": np.ones((128, 256)) * draw.standard_normal((128, 1)),
        "heavy": draw.standard_t(2, normal.shape),
        "small": 1e-12 * normal,
        "large": 1e30 * normal,
    }


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("bits", BITS)
def test_as_much_of_the_norm_is_lost_whatever_the_numbers_are(bits: int, block: int, kind: str) -> None:
    x = kinds()[kind].astype("float32")
    assert off(crossed(tf.constant(x), bits, block), x.astype("float64")) < LOST[bits]


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("bits", BITS)
def test_a_gradient_keeps_its_own_share(bits: int, kind: str) -> None:
    x = kinds()[kind].astype("float32")
    wide, back = x.astype("float64"), crossed(tf.constant(x), bits, key=DRAWN)
    products, squares = (back * wide).sum(axis=1), (wide * wide).sum(axis=1)
    assert products[squares > 0] == pytest.approx(squares[squares > 0], rel=0.004)  # what bfloat16 leaves of a scale
    assert off(back, wide) < LOST[bits] * (1.3 if bits == 1 else 1.1)


@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize("bits", BITS)
def test_by_chance_a_tensor_is_right_on_average(bits: int, kind: str) -> None:
    x = kinds()[kind].astype("float32")
    many = [crossed(tf.constant(x), bits, key=np.array([9, step], np.uint32)) for step in range(36)]
    alone = off(many[0], x.astype("float64"))
    assert alone / 7.5 < off(np.mean(many, axis=0), x.astype("float64")) < alone / 4.5, "a sixth, or nearly"


def test_by_chance_equal_rows_lose_different_things() -> None:
    x = np.tile(np.random.default_rng(3).standard_normal((1, 64)), (400, 1)).astype("float32")
    lost = np.linalg.norm((crossed(tf.constant(x), 1, key=DRAWN) - x).mean(axis=0)) / np.linalg.norm(x[0])
    assert lost < 0.08


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_keeps_its_range(dtype: str) -> None:
    top = min(float(tf.as_dtype(dtype).max), float(np.finfo("float32").max))
    rows = np.stack([np.full(64, top), np.linspace(-1, 1, 64) * top, np.zeros(64), np.linspace(-3, 3, 64)])
    x = tf.cast(tf.constant(rows), dtype)
    raw = x.numpy().astype("float64")
    for key in (None, DRAWN):
        back = crossed(x, key=key)
        assert np.isfinite(back).all() and not back[2].any()
        for row in (0, 1, 3):
            assert off(back[row] / top, raw[row] / top) < 0.45


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_only_the_block_of_what_is_not_finite_is_lost(bad: float) -> None:
    x = np.ones((2, 100), "float32")
    x[1, 99] = bad
    lost = np.isnan(crossed(tf.constant(x)))
    assert lost[1, 64:].all() and lost.sum() == 36


def test_the_same_tensor_and_key_become_the_same_bytes_and_another_key_others() -> None:
    x = tf.random.stateless_normal([8, 96], [1, 2])
    for key in (None, DRAWN):
        one, other = (INT2().encode(x, key) for _ in range(2))
        assert [np.asarray(part).tobytes() for part in one] == [np.asarray(part).tobytes() for part in other]
    one, other = (INT2().encode(x, key)[1].numpy() for key in (DRAWN, DRAWN + 1))
    assert (one != other).any()
