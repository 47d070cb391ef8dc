"""Caches of samples: the same bits on both sides, whatever arrives, and never more than the limit."""

import numpy as np
import pytest

from whale_nebula.codec.deltas import Cache
from whale_nebula.errors import LocalProtocolError, RemoteProtocolError

COLUMNS, BLOCK = 6, 4
ROOM = 1 << 20


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def rows(*values: float) -> np.ndarray:
    return np.array([[value] * COLUMNS for value in values], np.float16)


def change(draw: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    ints = draw.integers(-127, 128, (count, COLUMNS)).astype(np.int8)
    return ints, draw.standard_normal((count, 2)).astype(np.float32)


def stored(cache: Cache) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in cache.as_arrays().items()}


def test_a_change_is_added_in_single_precision_and_rounded_once() -> None:
    cache, draw = Cache(ROOM), np.random.default_rng(0)
    old = cache.put(ids(1, 2), draw.standard_normal((2, COLUMNS)).astype(np.float16))
    ints, scales = change(draw, 2)
    by_hand = np.repeat(scales, BLOCK, axis=1)[:, :COLUMNS] * ints.astype(np.float32) + old.astype(np.float32)
    new = cache.add(ids(1, 2), ints, scales, BLOCK)
    assert new.dtype == np.float16 and new.tobytes() == by_hand.astype(np.float16).tobytes()
    assert cache.get(ids(2, 1)).tobytes() == new[::-1].tobytes()


def test_rows_may_have_several_axes_and_blocks_keep_to_the_last() -> None:
    cache = Cache(ROOM)
    cache.put(ids(5), np.zeros((1, 2, 3)))
    scales = np.array([[[1.0, 10.0], [100.0, 1000.0]]], np.float32)
    new = cache.add(ids(5), np.ones((1, 2, 3), np.int8), scales, block=2)
    assert new.tolist() == [[[1.0, 1.0, 10.0], [100.0, 100.0, 1000.0]]]


def test_an_id_that_stands_twice_changes_from_what_was_held_and_the_last_stays() -> None:
    cache = Cache(ROOM)
    assert cache.put(ids(1, 1), rows(1.0, 2.0)).tolist() == rows(1.0, 2.0).tolist()
    assert cache.get(ids(1)).tolist() == rows(2.0).tolist()
    ints = np.array([[10] * COLUMNS, [20] * COLUMNS], np.int8)
    new = cache.add(ids(1, 1), ints, np.ones((2, 2), np.float32), BLOCK)
    assert new.tolist() == rows(12.0, 22.0).tolist()
    assert cache.get(ids(1)).tolist() == rows(22.0).tolist()


def test_beyond_the_limit_what_was_not_written_for_longest_goes() -> None:
    one = Cache(ROOM)
    one.put(ids(0), rows(0.0))
    cache = Cache(3 * one.nbytes)
    for number in range(3):
        cache.put(ids(number), rows(number))
    cache.put(ids(0), rows(9.0))  # the oldest is 1 from here on
    cache.put(ids(7), rows(7.0))
    assert cache.known(ids(0, 1, 2, 7)).tolist() == [True, False, True, True]
    assert cache.nbytes == 3 * one.nbytes and len(cache) == 3


def test_a_batch_beyond_the_limit_leaves_its_last_and_none_where_there_is_no_room() -> None:
    one = Cache(ROOM)
    one.put(ids(0), rows(0.0))
    cache = Cache(2 * one.nbytes)
    cache.put(ids(1, 2, 3), rows(1.0, 2.0, 3.0))
    assert cache.known(ids(1, 2, 3)).tolist() == [False, True, True]
    none = Cache(0)
    assert none.put(ids(1), rows(1.0)).tolist() == rows(1.0).tolist()
    assert len(none) == 0 and none.nbytes == 0


def test_the_version_tells_what_was_written_by_id_by_bits_by_order_and_by_what_went() -> None:
    def version(*writes: tuple[int, float], limit: int = ROOM) -> int:
        cache = Cache(limit)
        for number, value in writes:
            cache.put(ids(number), rows(value))
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


def test_what_is_too_large_is_as_large_as_can_be() -> None:
    cache = Cache(ROOM)
    cache.put(ids(1), rows(np.inf))
    new = cache.add(ids(1), np.full((1, COLUMNS), 127, np.int8), np.full((1, 2), 1e6, np.float32), BLOCK)
    assert new.tolist() == cache.get(ids(1)).tolist() == rows(65504.0).tolist()


def test_unknown_samples_and_sizes_that_do_not_fit_are_refused_and_change_nothing() -> None:
    cache = Cache(ROOM)
    cache.put(ids(1), rows(1.0))
    before = stored(cache)
    ints, scales = np.ones((1, COLUMNS), np.int8), np.ones((1, 2), np.float32)
    for attempt, words in [
        (lambda: cache.get(ids(1, 2)), "1 of 2 samples"),
        (lambda: cache.add(ids(2), ints, scales, BLOCK), "1 of 1 samples"),
        (lambda: cache.add(ids(1), ints[:, :3], scales, BLOCK), "differences int8"),
        (lambda: cache.add(ids(1), ints.astype(np.float32), scales, BLOCK), "differences float32"),
        (lambda: cache.add(ids(1), ints, scales[:, :1], BLOCK), "1 scales, expected"),
    ]:
        with pytest.raises(RemoteProtocolError, match=words):
            attempt()
    for rest, words in [
        (np.ones((1, 3)), "do not match cached rows of shape"),
        (np.ones((2, COLUMNS)), "do not match rows of shape"),
    ]:
        with pytest.raises(LocalProtocolError, match=words):
            cache.put(ids(1), rest)
    assert stored(cache) == before


def test_rows_that_are_held_do_not_hold_their_batch() -> None:
    cache, batch = Cache(ROOM), np.zeros((3, COLUMNS), np.float16)
    cache.put(ids(1, 2, 3), batch)
    batch[:] = 9
    assert cache.get(ids(2)).tolist() == rows(0.0).tolist()


def test_there_is_room_for_the_first_that_come_each_once() -> None:
    one = Cache(ROOM)
    one.put(ids(0), rows(0.0))
    cache, size = Cache(3 * one.nbytes), COLUMNS * 2
    assert cache.admits(ids(1, 2, 1, 3, 4), size).tolist() == [True, True, True, True, False]
    cache.put(ids(1, 2), rows(1.0, 2.0))
    assert cache.admits(ids(2, 5, 6, 5), size).tolist() == [False, True, False, True]
    assert not Cache(0).admits(ids(1), size).any()
