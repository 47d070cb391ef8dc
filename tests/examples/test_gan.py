"""The GAN: its plan has two phases, and without its scope lines it gives the same numbers."""

from pathlib import Path

from tests.examples.loops import same_numbers


def test_it_is_the_same_gan(tmp_path: Path) -> None:
    said, (_, _, radius) = same_numbers("gan", tmp_path)
    assert all(word in said for word in ("gpu", "npu", "phase 1"))
    assert 0.3 < radius < 2.0
