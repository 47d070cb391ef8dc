"""Common fixtures of all tests: quiet logs, fixed seeds, and a check that no process is left."""

import os

# Before anything imports TensorFlow or gRPC: both read these once, when they load.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ["WHALE_NEBULA_VERIFY_PASSES"] = "1"  # programs are verified after every pass, in all processes
os.environ["XDG_CACHE_HOME"] = "/proc/nowhere"  # nothing that was measured on this machine, or by other tests, counts
os.environ.setdefault("MPLCONFIGDIR", os.path.abspath(".pytest_cache/matplotlib"))  # fonts are looked for once

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

_SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # however slow the machine is
settings.register_profile("the same examples in every run", derandomize=True, max_examples=25, **_SLOW)
settings.register_profile("other examples in every run", **_SLOW)
settings.load_profile("the same examples in every run")

Children = dict[psutil.Process, str]
SEED = 20_260_101
GRACE_SECONDS = 2.0
LONG = ("tests/processes/", "tests/parity/", "tests/examples/", "tests/scripts/", "tests/traps/")
OPTIMIZED = ("tests/parity/test_cases.py", "tests/parity/test_pretraining.py")
PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "tests.processes.zygote")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite: whole grids instead of samples of them, and golden files written instead of compared."""
    parser.addoption("--grid", action="store_true", help="run whole grids, not samples of them")
    parser.addoption("--regenerate", action="store_true", help="write the golden files of tests/golden anew")


def pytest_configure(config: pytest.Config) -> None:
    """A test marked `grid` is of a grid, and not of its sample."""
    config.addinivalue_line("markers", "grid: only `make soak` runs it, by `--grid -m grid`")
    if config.getoption("--grid"):
        settings.load_profile("other examples in every run")
    gc.disable()  # until all is collected: of so many objects hardly one is garbage


def pytest_collection_finish() -> None:
    """From here on there is garbage."""
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--grid` the samples alone; long files first, so that no worker starts one when the others are done."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    if config.getoption("--grid"):
        return
    left_out = [item for item in items if item.get_closest_marker("grid") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("grid") is None]


@pytest.fixture(autouse=True, scope="module")
def young_heap() -> None:
    """What is alive before a module, garbage collections pass by.

    A process that has run a hundred modules holds millions of objects: TensorFlow, Keras, the caches of both. To walk
    through them again and again, as every `keras.utils.clear_session` does, would cost more than most of the tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_zygote_stays() -> Iterator[None]:
    """The process that forks workers ends with the tests, if one was started."""
    yield
    if (zygote := sys.modules.get("tests.processes.zygote")) is not None:
        zygote.stop()


@pytest.fixture(autouse=True, scope="module")
def graph_optimizer(request: pytest.FixtureRequest) -> None:
    """Tests that run each function a few times do so without TensorFlow's graph optimizer, which takes a fifth of their
    time. Parity tests run with it, as users do; with `--grid` all but unit tests.
    """
    node, grid = request.node.nodeid, request.config.getoption("--grid")
    off = node.startswith("tests/unit/") if grid else not node.startswith(OPTIMIZED)
    os.environ["TESTS_WITHOUT_OPTIMIZER"] = "1" * off  # for what `tests.processes.zygote` forks
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": off})


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test draws the same numbers, alone or in company. Loads no TensorFlow that the test does not."""
    random.seed(SEED)
    np.random.seed(SEED)
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        tensorflow.random.set_seed(SEED)
    if (keras := sys.modules.get("keras")) is not None:
        keras.utils.set_random_seed(SEED)


@pytest.fixture(autouse=True)
def closed_run() -> Iterator[None]:
    """Every test begins without a run, and leaves none. Loads nothing that the test does not.

    A module whose tests look at one run gives a fixture of this name that does nothing.
    """
    _shut_down()
    yield
    _shut_down()


def _shut_down() -> None:
    if (runs := sys.modules.get("whale_nebula.runtime.run")) is not None:
        runs.shutdown()


@pytest.fixture(autouse=True, scope="module")
def loggers_left_alone() -> Iterator[None]:
    """A module that silences our loggers would hide from later ones what they look for."""
    yield
    assert (logging.getLogger("whale_nebula").level, logging.root.manager.disable) == (logging.NOTSET, 0)


@pytest.fixture(autouse=True, scope="module")
def no_scopes_made_by_other_modules() -> None:
    """What is made where tests are collected, no test is told of."""
    if (unentered := sys.modules.get("whale_nebula.scopes.hints")) is not None:
        unentered.forget()


@pytest.fixture(autouse=True)
def no_scopes_made_before() -> None:
    """What a test made and never entered, the next one is not told of. Loads nothing that the test does not."""
    if (unentered := sys.modules.get("whale_nebula.scopes.hints")) is not None:
        unentered.forget()


@pytest.fixture(autouse=True)
def no_leaked_children() -> Iterator[None]:
    """A test that leaves a process running fails; the process is stopped, so that one test is blamed."""
    before = running_children()
    yield
    leaked = wait_until_gone(before)
    for child in leaked:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if leaked:
        pytest.fail("left running by this test:\n  " + "\n  ".join(map(str, leaked.values())))


def wait_until_gone(before: Children) -> Children:
    """Children that are not in `before`, after those about to end have had a moment to do so."""
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        extra = {child: command for child, command in running_children().items() if child not in before}
        if not extra or time.monotonic() > deadline:
            return extra
        time.sleep(0.02)


def running_children() -> Children:
    """Direct children that run, with their commands: no zombies, nor the helpers that Python itself keeps."""
    found = {}
    for child in children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not any(name in command for name in PYTHONS_OWN):
                found[child] = f"{child.pid}: {command}"
    return found


def children() -> list[psutil.Process]:
    """Direct children. Linux lists them by thread; psutil looks at all processes, which twice a test adds up."""
    found = []
    try:
        for thread in Path("/proc/self/task").iterdir():
            for number in (thread / "children").read_text().split():
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(int(number)))
    except OSError:  # another system, or a thread that ends
        return psutil.Process().children()
    return found
