"""Element types on the wire, and arrays as bytes."""

import ml_dtypes
import numpy as np
import pytest

from whale_nebula.errors import LocalProtocolError
from whale_nebula.wire.tensor import DTYPE_NAMES, decode_array, encode_array, find_dtype, find_dtype_code

SHAPES = [(), (0,), (3, 0, 2), (5,), (2, 3), (1, 2, 1, 2, 1, 2, 1, 2)]


def make_array(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    return (
        (np.arange(size) % 2 if dtype == "bool" else np.arange(size))
        .reshape(shape)
        .astype(find_dtype(find_dtype_code(dtype)))
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_array_round_trip_is_bit_exact(dtype: str, shape: tuple[int, ...]) -> None:
    array = make_array(dtype, shape)
    data = encode_array(array)
    restored = decode_array(data, find_dtype_code(dtype), shape)
    assert data.dtype == np.uint8
    assert data.size == array.nbytes
    assert restored.dtype == array.dtype
    assert restored.shape == shape
    assert restored.tobytes() == array.tobytes()


def test_dtype_codes_are_stable() -> None:
    names = (
        "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128"
    )
    assert [find_dtype_code(name) for name in names.split()] == list(range(1, 16)) and set(names.split()) == set(
        DTYPE_NAMES
    )


@pytest.mark.parametrize("code", [0, 16, 255])
def test_unknown_code_has_no_dtype(code: int) -> None:
    assert find_dtype(code) is None


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([b"a"]), np.array([object()])], ids=["str", "bytes", "object"]
)
def test_non_numeric_array_is_refused_by_dtype_name(array: np.ndarray) -> None:
    with pytest.raises(LocalProtocolError, match=array.dtype.name):
        encode_array(array)


def test_int4_array_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="int4"):
        encode_array(np.zeros(2, ml_dtypes.int4))


def test_contiguous_array_is_not_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(encode_array(array), array)


def test_transposed_big_endian_array_is_normalized() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    restored = decode_array(encode_array(array), find_dtype_code("int32"), (3, 2))
    np.testing.assert_array_equal(restored, array)
