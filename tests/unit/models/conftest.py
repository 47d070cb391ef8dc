"""No test of models sees another's run."""

from collections.abc import Iterator

import pytest

import whale_nebula as nb


@pytest.fixture(autouse=True)
def no_run_left() -> Iterator[None]:
    nb.shutdown()
    yield
    nb.shutdown()
