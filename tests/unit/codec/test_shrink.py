"""Zstandard behind a probe: when it is tried, round trips, and refusal of other bytes."""

import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_nebula.codec.packing import SAMPLE_BYTES, shrink, unshrink
from whale_nebula.errors import ConfigError, RemoteProtocolError

zstandard = pytest.importorskip("zstandard")
NOISE = np.random.default_rng(0).integers(0, 256, 4 * SAMPLE_BYTES).astype(np.uint8)
ZEROS = np.zeros(4 * SAMPLE_BYTES, np.uint8)


@settings(deadline=None, max_examples=40)
@given(data=st.binary(max_size=300), times=st.integers(1, 20))
def test_what_was_shrunk_comes_back_and_is_smaller(data: bytes, times: int) -> None:
    whole = np.frombuffer(data * times, np.uint8)
    small = shrink(whole)
    if small is not None:
        assert small.size <= 0.97 * whole.size
        np.testing.assert_array_equal(unshrink(small, whole.size), whole)


AMONG_NOISE = np.random.default_rng(0).integers(0, 256, 65 * SAMPLE_BYTES).astype(np.uint8)
AMONG_NOISE[32 * SAMPLE_BYTES : 33 * SAMPLE_BYTES] = 0


@pytest.mark.parametrize(
    ("data", "tried", "smaller"),
    [
        (NOISE, [SAMPLE_BYTES], False),
        (ZEROS, [SAMPLE_BYTES, ZEROS.size], True),
        (AMONG_NOISE, [SAMPLE_BYTES, AMONG_NOISE.size], False),
        (ZEROS[:0], [0], False),
        (ZEROS[:1], [1], False),
        (NOISE[:100], [100], False),
    ],
    ids=["noise", "zeros", "zeros among noise", "nothing", "a byte", "little noise"],
)
def test_a_sample_out_of_the_middle_is_tried_first(
    data: np.ndarray, tried: list[int], smaller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, compressor = [], zstandard.ZstdCompressor(level=1)

    class Watched:
        def compress(self, part: memoryview) -> bytes:
            given.append(len(part))
            return compressor.compress(part)

    monkeypatch.setattr(zstandard, "ZstdCompressor", lambda level: Watched())
    assert (shrink(data) is not None) is smaller
    assert given == tried


@settings(deadline=None, max_examples=40)
@given(data=st.binary(max_size=60), size=st.integers(0, 200))
def test_any_bytes_are_of_that_size_or_refused(data: bytes, size: int) -> None:
    try:
        assert unshrink(np.frombuffer(data, np.uint8), size).size == size
    except RemoteProtocolError:
        return


@settings(deadline=None, max_examples=60)
@given(place=st.integers(0, 10_000), change=st.integers(1, 255), cut=st.integers(0, 40))
def test_changed_and_cut_bytes_are_of_that_size_or_refused(place: int, change: int, cut: int) -> None:
    whole = np.resize(NOISE[:50], 5_000)
    small = shrink(whole)
    assert small is not None
    bad = small.copy()
    bad[place % bad.size] ^= change
    for data in (bad, small[: small.size - 1 - cut % small.size]):
        try:
            assert unshrink(data, whole.size).size == whole.size
        except RemoteProtocolError:
            continue


SMALL = zstandard.ZstdCompressor(level=1).compress(ZEROS.data)


@pytest.mark.parametrize(
    ("data", "size"),
    [*((SMALL, size) for size in (0, ZEROS.size - 1, ZEROS.size + 1, 1 << 50)),
     (SMALL + b"x", ZEROS.size), (SMALL + SMALL, ZEROS.size)],
)  # fmt: skip
def test_another_size_and_bytes_after_a_frame_are_refused(data: bytes, size: int) -> None:
    with pytest.raises(RemoteProtocolError, match="compressed bytes came that are not"):
        unshrink(np.frombuffer(data, np.uint8), size)


def test_a_frame_that_announces_more_is_not_opened_at_all() -> None:
    small = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    assert len(small) < 1 << 16
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="that are not 100 bytes"):
            unshrink(np.frombuffer(small, np.uint8), 100)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_without_its_package_zstd_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"whale-nebula\[zstd\]"):
        shrink(ZEROS)
