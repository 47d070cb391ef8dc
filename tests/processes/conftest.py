"""Workers of these tests are forked, except for whole grids, whose workers start as users' do."""

import sys
from collections.abc import Iterator

import pytest

from tests.processes import zygote
from whale_nebula.launch import worker_processes


@pytest.fixture(autouse=True, scope="module")
def forked_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """While tests of this folder run."""
    if request.config.getoption("--grid") or sys.platform != "linux":
        yield
        return
    plain, worker_processes.start = worker_processes.start, zygote.start
    try:
        yield
    finally:
        worker_processes.start = plain
