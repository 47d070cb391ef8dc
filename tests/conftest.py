"""Common fixtures of all tests: quiet logs, fixed seeds, and a check that no process is left."""

import os

# Before anything imports TensorFlow or gRPC: both read these once, when they load.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ["WHALE_NEBULA_VERIFY_PASSES"] = "1"  # programs are verified after every pass, in all processes
os.environ["XDG_CACHE_HOME"] = "/proc/nowhere"  # no measurements of this machine or of other tests are read
os.environ.setdefault("MPLCONFIGDIR", os.path.abspath(".pytest_cache/matplotlib"))  # fonts are searched for once

import contextlib
import gc
import logging
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, settings

_SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # the machine may be slow
settings.register_profile("the same examples in every run", derandomize=True, max_examples=25, **_SLOW)
settings.register_profile("other examples in every run", **_SLOW)
settings.load_profile("the same examples in every run")

Children = dict[psutil.Process, str]
SEED = 20_260_101
GRACE_SECONDS = 2.0
LONG = ("tests/processes/", "tests/parity/", "tests/examples/", "tests/scripts/", "tests/traps/")
OPTIMIZED = ("tests/parity/test_cases.py", "tests/parity/test_pretraining.py")
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "tests.processes.zygote")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options `--grid` and `--regenerate`."""
    parser.addoption("--grid", action="store_true", help="run whole grids, not samples of them")
    parser.addoption("--regenerate", action="store_true", help="write the golden files of tests/golden anew")


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker `grid`, and disable garbage collection while tests are collected: it would find little."""
    config.addinivalue_line("markers", "grid: only `make soak` runs it, by `--grid -m grid`")
    if config.getoption("--grid"):
        settings.load_profile("other examples in every run")
    gc.disable()


def pytest_collection_finish() -> None:
    """Enable garbage collection."""
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests of long files first, so that no worker starts one when the others are done; without `--grid` deselect
    the tests that are marked `grid`.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    if config.getoption("--grid"):
        return
    left_out = [item for item in items if item.get_closest_marker("grid") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("grid") is None]


@pytest.fixture(autouse=True, scope="module")
def young_heap() -> None:
    """Exempt objects that exist before a module from garbage collections.

    A process that has run a hundred modules holds millions of objects: TensorFlow, Keras, the caches of both. Visiting
    them in every collection, as by `keras.utils.clear_session`, would take longer than most of the tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_zygote_stays() -> Iterator[None]:
    """End the process that forks workers, if one was started, after all tests."""
    yield
    if (zygote := sys.modules.get("tests.processes.zygote")) is not None:
        zygote.stop()


@pytest.fixture(autouse=True, scope="module")
def graph_optimizer(request: pytest.FixtureRequest) -> None:
    """Disable TensorFlow's graph optimizer, which takes a fifth of the time of tests that run each function a few
    times; not for parity tests, and with `--grid` for unit tests only.
    """
    node, grid = request.node.nodeid, request.config.getoption("--grid")
    off = node.startswith("tests/unit/") if grid else not node.startswith(OPTIMIZED)
    os.environ["TESTS_WITHOUT_OPTIMIZER"] = "1" * off  # for the processes that `tests.processes.zygote` forks
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": off})


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Seed random numbers, so that they do not depend on earlier tests. Loads no TensorFlow."""
    random.seed(SEED)
    np.random.seed(SEED)
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        tensorflow.random.set_seed(SEED)
    if (keras := sys.modules.get("keras")) is not None:
        keras.utils.set_random_seed(SEED)


@pytest.fixture(autouse=True)
def closed_run() -> Iterator[None]:
    """Close the open run, if any, before and after every test. Loads no module of the library.

    A module whose tests share a run overrides this fixture with one that does nothing.
    """
    _shut_down()
    yield
    _shut_down()


def _shut_down() -> None:
    if (runs := sys.modules.get("whale_nebula.runtime.run")) is not None:
        runs.shutdown()


@pytest.fixture(autouse=True, scope="module")
def loggers_left_alone() -> Iterator[None]:
    """Assert that a module has left the level of the library's logger unchanged, on which later tests depend."""
    yield
    assert (logging.getLogger("whale_nebula").level, logging.root.manager.disable) == (logging.NOTSET, 0)


@pytest.fixture(autouse=True, scope="module")
def no_hints_of_collection() -> None:
    """Forget scopes that were created while tests were collected: warnings about scopes that were never entered would
    name them.
    """
    _forget_scopes()


@pytest.fixture(autouse=True)
def no_hints_of_earlier_tests() -> None:
    """Forget scopes that earlier tests created and did not enter. Loads no module of the library."""
    _forget_scopes()


def _forget_scopes() -> None:
    if (hints := sys.modules.get("whale_nebula.scopes.hints")) is not None:
        hints.forget()


@pytest.fixture(autouse=True)
def no_leaked_children() -> Iterator[None]:
    """Fail a test that leaves a process running, and kill the process, so that later tests do not fail for it."""
    before = running_children()
    yield
    leaked = wait_until_gone(before)
    for child in leaked:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if leaked:
        pytest.fail("left running by this test:\n  " + "\n  ".join(map(str, leaked.values())))


def wait_until_gone(before: Children) -> Children:
    """The children that are not in `before` and still run after `GRACE_SECONDS`."""
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        extra = {child: command for child, command in running_children().items() if child not in before}
        if not extra or time.monotonic() > deadline:
            return extra
        time.sleep(0.02)


def running_children() -> Children:
    """Direct children that run, with their commands, except zombies and the helpers of `HELPERS`."""
    found = {}
    for child in children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not any(name in command for name in HELPERS):
                found[child] = f"{child.pid}: {command}"
    return found


def children() -> list[psutil.Process]:
    """Direct children. Linux lists them by thread; psutil would look at all processes, which is slower."""
    found = []
    try:
        for thread in Path("/proc/self/task").iterdir():
            for number in (thread / "children").read_text().split():
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(int(number)))
    except OSError:  # another system, or a thread that ends
        return psutil.Process().children()
    return found
