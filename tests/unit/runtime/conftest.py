"""Every test of the runtime begins without a run, and leaves none."""

from collections.abc import Iterator

import pytest

import whale_nebula as nb


@pytest.fixture(autouse=True)
def closed_run() -> Iterator[None]:
    nb.shutdown()
    yield
    nb.shutdown()
