"""The custom loop: it prints its plan and its loss, learns, and without its scope lines gives the same numbers."""

from pathlib import Path

from tests.examples.loops import same_numbers


def test_it_is_the_same_loop(tmp_path: Path) -> None:
    said, (loss, _, accuracy) = same_numbers("custom_loop", tmp_path)
    assert all(word in said for word in ("gpu", "npu", "eager-1f1b"))
    assert loss < 0.5
    assert accuracy > 0.8
