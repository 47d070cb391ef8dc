"""Caches of samples: the same bits on both sides, whatever arrives, and never more than the limit."""

import numpy as np
import pytest

from whale_nebula.codec.deltas import Cache
from whale_nebula.errors import RemoteProtocolError

COLUMNS, BLOCK = 6, 4
ROOM = 1 << 20


def make_ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def make_rows(*values: float) -> np.ndarray:
    return np.array([[value] * COLUMNS for value in values], np.float16)


def draw_change(draw: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    ints = draw.integers(-127, 128, (count, COLUMNS)).astype(np.int8)
    return ints, draw.standard_normal((count, 2)).astype(np.float32)


def dump_cache(cache: Cache) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in cache.as_arrays().items()}


def test_cache_adds_changes_in_float32_and_rounds_once() -> None:
    cache, draw = Cache(ROOM), np.random.default_rng(0)
    old = cache.put(make_ids(1, 2), draw.standard_normal((2, COLUMNS)).astype(np.float16))
    ints, scales = draw_change(draw, 2)
    by_hand = np.repeat(scales, BLOCK, axis=1)[:, :COLUMNS] * ints.astype(np.float32) + old.astype(np.float32)
    new = cache.add(make_ids(1, 2), ints, scales, BLOCK)
    assert new.dtype == np.float16 and new.tobytes() == by_hand.astype(np.float16).tobytes()
    assert cache.get(make_ids(2, 1)).tobytes() == new[::-1].tobytes()


def test_cache_rows_may_have_several_axes() -> None:
    cache = Cache(ROOM)
    cache.put(make_ids(5), np.zeros((1, 2, 3)))
    scales = np.array([[[1.0, 10.0], [100.0, 1000.0]]], np.float32)
    new = cache.add(make_ids(5), np.ones((1, 2, 3), np.int8), scales, block=2)
    assert new.tolist() == [[[1.0, 1.0, 10.0], [100.0, 100.0, 1000.0]]]


def test_repeated_id_changes_from_the_cached_row_and_last_write_wins() -> None:
    cache = Cache(ROOM)
    assert cache.put(make_ids(1, 1), make_rows(1.0, 2.0)).tolist() == make_rows(1.0, 2.0).tolist()
    assert cache.get(make_ids(1)).tolist() == make_rows(2.0).tolist()
    ints = np.array([[10] * COLUMNS, [20] * COLUMNS], np.int8)
    new = cache.add(make_ids(1, 1), ints, np.ones((2, 2), np.float32), BLOCK)
    assert new.tolist() == make_rows(12.0, 22.0).tolist()
    assert cache.get(make_ids(1)).tolist() == make_rows(22.0).tolist()


def test_cache_evicts_least_recently_written_rows() -> None:
    one = Cache(ROOM)
    one.put(make_ids(0), make_rows(0.0))
    cache = Cache(3 * one.nbytes)
    for number in range(3):
        cache.put(make_ids(number), make_rows(number))
    cache.put(make_ids(0), make_rows(9.0))  # the oldest is 1 from here on
    cache.put(make_ids(7), make_rows(7.0))
    assert cache.contains(make_ids(0, 1, 2, 7)).tolist() == [True, False, True, True]
    assert cache.nbytes == 3 * one.nbytes and len(cache) == 3


def test_cache_keeps_last_rows_of_a_batch_beyond_its_limit() -> None:
    one = Cache(ROOM)
    one.put(make_ids(0), make_rows(0.0))
    cache = Cache(2 * one.nbytes)
    cache.put(make_ids(1, 2, 3), make_rows(1.0, 2.0, 3.0))
    assert cache.contains(make_ids(1, 2, 3)).tolist() == [False, True, True]
    none = Cache(0)
    assert none.put(make_ids(1), make_rows(1.0)).tolist() == make_rows(1.0).tolist()
    assert len(none) == 0 and none.nbytes == 0


def test_cache_version_depends_on_ids_bits_order_and_evictions() -> None:
    def version(*writes: tuple[int, float], limit: int = ROOM) -> int:
        cache = Cache(limit)
        for number, value in writes:
            cache.put(make_ids(number), make_rows(value))
        return cache.version

    versions = [
        version(),
        version((1, 1.0)),
        version((2, 1.0)),
        version((1, 1.5)),
        version((1, 1.0), (2, 1.0)),
        version((2, 1.0), (1, 1.0)),
        version((1, 1.0), (1, 1.0)),
        version((1, 1.0), (2, 1.0), limit=200),
    ]
    assert versions[0] == 0 and len(set(versions)) == len(versions)
    assert all(0 <= each < 2**32 for each in versions)


def test_cache_saturates_large_values_at_float16_maximum() -> None:
    cache = Cache(ROOM)
    cache.put(make_ids(1), make_rows(np.inf))
    new = cache.add(make_ids(1), np.full((1, COLUMNS), 127, np.int8), np.full((1, 2), 1e6, np.float32), BLOCK)
    assert new.tolist() == cache.get(make_ids(1)).tolist() == make_rows(65504.0).tolist()


def test_cache_refuses_unknown_samples_and_wrong_sizes_unchanged() -> None:
    cache = Cache(ROOM)
    cache.put(make_ids(1), make_rows(1.0))
    before = dump_cache(cache)
    ints, scales = np.ones((1, COLUMNS), np.int8), np.ones((1, 2), np.float32)
    for attempt, words in [
        (lambda: cache.get(make_ids(1, 2)), "1 of 2 samples"),
        (lambda: cache.add(make_ids(2), ints, scales, BLOCK), "1 of 1 samples"),
        (lambda: cache.add(make_ids(1), ints[:, :3], scales, BLOCK), "differences int8"),
        (lambda: cache.add(make_ids(1), ints.astype(np.float32), scales, BLOCK), "differences float32"),
        (lambda: cache.add(make_ids(1), ints, scales[:, :1], BLOCK), "1 scales, expected"),
    ]:
        with pytest.raises(RemoteProtocolError, match=words):
            attempt()
    assert dump_cache(cache) == before


def test_cache_copies_rows_out_of_their_batch() -> None:
    cache, batch = Cache(ROOM), np.zeros((3, COLUMNS), np.float16)
    cache.put(make_ids(1, 2, 3), batch)
    batch[:] = 9
    assert cache.get(make_ids(2)).tolist() == make_rows(0.0).tolist()


def test_cache_admits_first_samples_within_its_limit() -> None:
    one = Cache(ROOM)
    one.put(make_ids(0), make_rows(0.0))
    cache, size = Cache(3 * one.nbytes), COLUMNS * 2
    assert cache.admits(make_ids(1, 2, 1, 3, 4), size).tolist() == [True, True, True, True, False]
    cache.put(make_ids(1, 2), make_rows(1.0, 2.0))
    assert cache.admits(make_ids(2, 5, 6, 5), size).tolist() == [False, True, False, True]
    assert not Cache(0).admits(make_ids(1), size).any()
