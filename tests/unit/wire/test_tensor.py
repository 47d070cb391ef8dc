"""Element types on the wire, and arrays as bytes."""

import ml_dtypes
import numpy as np
import pytest

from whale_nebula.errors import LocalProtocolError
from whale_nebula.wire.tensor import DTYPE_NAMES, array_bytes, array_from, dtype_code, dtype_of

SHAPES = [(), (0,), (3, 0, 2), (5,), (2, 3), (1, 2, 1, 2, 1, 2, 1, 2)]


def some(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    return (
        (np.arange(size) % 2 if dtype == "bool" else np.arange(size)).reshape(shape).astype(dtype_of(dtype_code(dtype)))
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_type_and_shape_comes_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    array = some(dtype, shape)
    data = array_bytes(array)
    again = array_from(data, dtype_code(dtype), shape)
    assert data.dtype == np.uint8
    assert data.size == array.nbytes
    assert again.dtype == array.dtype
    assert again.shape == shape
    assert again.tobytes() == array.tobytes()


def test_numbers_of_types_never_change() -> None:
    names = (
        "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128"
    )
    assert [dtype_code(name) for name in names.split()] == list(range(1, 16)) and set(names.split()) == set(DTYPE_NAMES)


@pytest.mark.parametrize("code", [0, 16, 255])
def test_other_numbers_have_no_type(code: int) -> None:
    assert dtype_of(code) is None


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([b"a"]), np.array([object()])], ids=["str", "bytes", "object"]
)
def test_what_is_no_number_is_refused_by_name(array: np.ndarray) -> None:
    with pytest.raises(LocalProtocolError, match=array.dtype.name):
        array_bytes(array)


def test_small_integers_of_odd_width_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="int4"):
        array_bytes(np.zeros(2, ml_dtypes.int4))


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(array_bytes(array), array)


def test_transposed_and_big_endian_arrays_are_brought_in_order() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    again = array_from(array_bytes(array), dtype_code("int32"), (3, 2))
    np.testing.assert_array_equal(again, array)
