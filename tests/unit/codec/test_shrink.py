"""A compressor behind a probe: with zlib in zstd's place to see the probe at work, and with zstd where it is there."""

import importlib.util
import sys
import tracemalloc
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_nebula.codec.packing import SAMPLE_BYTES, Press, Zstd, shrink, unshrink
from whale_nebula.errors import ConfigError, RemoteProtocolError

HAS_ZSTD = importlib.util.find_spec("zstandard") is not None


@dataclass
class Zlib:
    """The same face over Python's own compressor; it remembers how much it was given."""

    pressed: list[int] = field(default_factory=list)

    def press(self, data: np.ndarray) -> bytes:
        self.pressed.append(data.size)
        return zlib.compress(data.tobytes(), 1)

    def open(self, data: np.ndarray, size: int) -> bytes | None:
        try:
            return zlib.decompressobj().decompress(data.tobytes(), size + 1)
        except zlib.error:
            return None


PRESSES: list[type[Press]] = [Zlib, *([Zstd] if HAS_ZSTD else [])]
EVERY = pytest.mark.parametrize("press", PRESSES)
NOISE = np.random.default_rng(0).integers(0, 256, 4 * SAMPLE_BYTES).astype(np.uint8)
ZEROS = np.zeros(4 * SAMPLE_BYTES, np.uint8)


@EVERY
@settings(deadline=None, max_examples=40)
@given(data=st.binary(max_size=300), times=st.integers(1, 20))
def test_what_was_shrunk_comes_back_and_is_smaller(press: type[Press], data: bytes, times: int) -> None:
    whole = np.frombuffer(data * times, np.uint8)
    small = shrink(whole, press())
    if small is not None:
        assert small.size <= 0.97 * whole.size
        np.testing.assert_array_equal(unshrink(small, whole.size, press()), whole)


def test_what_does_not_shrink_costs_a_sample() -> None:
    tool = Zlib()
    assert shrink(NOISE, tool) is None
    assert tool.pressed == [SAMPLE_BYTES]


def test_what_shrinks_in_the_middle_is_tried_whole() -> None:
    tool = Zlib()
    assert shrink(ZEROS, tool) is not None
    assert tool.pressed == [SAMPLE_BYTES, ZEROS.size]
    mixed = np.concatenate([np.tile(NOISE, 8), ZEROS[:SAMPLE_BYTES], np.tile(NOISE, 8)])
    assert shrink(mixed, tool) is None
    assert tool.pressed[2:] == [SAMPLE_BYTES, mixed.size]


@EVERY
@pytest.mark.parametrize("data", [ZEROS[:0], ZEROS[:1], NOISE[:100]], ids=["nothing", "a byte", "noise"])
def test_what_is_too_small_stays_as_it_is(press: type[Press], data: np.ndarray) -> None:
    assert shrink(data, press()) is None


@EVERY
@settings(deadline=None, max_examples=40)
@given(data=st.binary(max_size=60), size=st.integers(0, 200))
def test_any_bytes_are_of_that_size_or_refused(press: type[Press], data: bytes, size: int) -> None:
    try:
        assert unshrink(np.frombuffer(data, np.uint8), size, press()).size == size
    except RemoteProtocolError:
        return


@EVERY
@pytest.mark.parametrize("size", [0, ZEROS.size - 1, ZEROS.size + 1, 1 << 50])
def test_another_size_is_refused(press: type[Press], size: int) -> None:
    small = shrink(ZEROS, press())
    assert small is not None
    with pytest.raises(RemoteProtocolError, match="compressed bytes came that are not"):
        unshrink(small, size, press())


@EVERY
@settings(deadline=None, max_examples=60)
@given(place=st.integers(0, 10_000), change=st.integers(1, 255), cut=st.integers(0, 40))
def test_changed_and_cut_bytes_are_of_that_size_or_refused(
    press: type[Press], place: int, change: int, cut: int
) -> None:
    whole = np.resize(NOISE[:50], 5_000)
    small = shrink(whole, press())
    assert small is not None
    bad = small.copy()
    bad[place % bad.size] ^= change
    for data in (bad, small[: small.size - 1 - cut % small.size]):
        try:
            assert unshrink(data, whole.size, press()).size == whole.size
        except RemoteProtocolError:
            continue


@pytest.mark.skipif(not HAS_ZSTD, reason="its package is not here")
def test_a_frame_that_announces_more_is_not_opened_at_all() -> None:
    small = Zstd().press(np.zeros(1 << 28, np.uint8))
    assert len(small) < 1 << 16
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="that are not 100 bytes"):
            unshrink(np.frombuffer(small, np.uint8), 100, Zstd())
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not HAS_ZSTD, reason="its package is not here")
def test_bytes_after_a_frame_are_refused() -> None:
    small = Zstd().press(ZEROS)
    for more in (b"x", small):
        with pytest.raises(RemoteProtocolError):
            unshrink(np.frombuffer(small + more, np.uint8), ZEROS.size, Zstd())


def test_without_its_package_zstd_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"whale-nebula\[zstd\]"):
        Zstd()
