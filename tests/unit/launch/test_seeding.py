"""Libraries are seeded when they are loaded, and are not loaded for that."""

from __future__ import annotations

import ast
import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from whale_nebula.launch import seeding
from whale_nebula.launch.seeding import call_before_load, call_when_loaded, keep_generators


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that draws a random number when it is loaded."""
    (tmp_path / "nebula_drawing.py").write_text("import random\nDRAWN = random.random()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nebula_drawing", raising=False)
    return "nebula_drawing"


def test_callback_runs_once_when_the_module_is_loaded(module: str) -> None:
    done: list[str] = []
    before = list(sys.meta_path)
    call_when_loaded(module, lambda: done.append(module))
    assert importlib.util.find_spec(module) is not None
    assert done == []
    loaded = importlib.import_module(module)
    assert done == [module]
    assert sys.meta_path == before
    assert type(loaded.__loader__).__name__ == type(loaded.__spec__.loader).__name__ == "SourceFileLoader"
    call_when_loaded(module, lambda: done.append("again"))
    assert done == [module, "again"]


def test_callback_runs_before_the_module_is_loaded(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    found: list[bool] = []
    call_before_load(module, lambda: found.append(module in sys.modules))
    importlib.import_module(module)
    importlib.import_module(module)
    assert found == [False]


def test_random_state_is_unaffected_by_loading(module: str) -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    call_when_loaded(module, lambda: random.seed(8))
    importlib.import_module(module)
    assert random.random() == expected


def test_missing_module_still_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", before.copy())
    call_when_loaded("nebula_nowhere", pytest.fail)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nebula_nowhere")


def test_seeding_loads_no_libraries() -> None:
    code = (
        "import sys, random; from whale_nebula.launch.seeding import seed_all; seed_all(7); a = random.random();"
        "print(sorted({'numpy', 'tensorflow', 'keras'} & set(sys.modules)), a);"
        "import numpy; print(numpy.random.rand())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"[] {random.Random(7).random()}", "0.07630828937395717"]


@pytest.mark.parametrize("first", ["keras", "tensorflow", "numpy"])
def test_keras_seed_function_is_called_once_after_loading(first: str, tmp_path: Path) -> None:
    """The libraries here are small ones of the same names; what the real ones draw, tests of processes compare."""
    (tmp_path / "numpy.py").write_text(NUMPY)
    (tmp_path / "tensorflow.py").write_text("import importlib.util as u; u.find_spec('keras'); READY = True")
    (tmp_path / "keras.py").write_text("import tensorflow, numpy, random; random.random()\n" + KERAS)
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from whale_nebula.launch.seeding import seed_all
seed_all(7)
import {first}
import keras, tensorflow, numpy, random
waiting = [finder for finder in sys.meta_path if type(finder).__module__ == seed_all.__module__]
print(keras.CALLS, numpy.random.state, random.random(), waiting)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"[(7, True)] seeded 7 {random.Random(7).random()} []", done.stderr


NUMPY = """
class random:
    state = "not seeded"
    def seed(number): random.state = f"seeded {number}"
    def get_state(): return random.state
    def set_state(state): random.state = state
"""
KERAS = """
CALLS = []
class utils:
    def set_random_seed(seed):
        CALLS.append((seed, tensorflow.READY))
        numpy.random.state = "by Keras"
"""


def test_library_never_draws_from_the_global_random_state() -> None:
    """A line that waits with `random.random()` in one process only gives it other weights than the next one has."""
    package = Path(seeding.__file__).parents[1]
    own = {"Random", "SystemRandom"}
    found = {
        f"{path.relative_to(package)}: random.{node.attr}"
        for path in package.rglob("*.py")
        if "random." in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
    }
    assert {each for each in found if each.rpartition(".")[2] not in own} == {
        f"launch/seeding.py: random.{name}" for name in ("seed", "getstate", "setstate")
    }


def test_keep_generators_restores_the_random_states() -> None:
    random.seed(3)
    np.random.seed(3)
    expected = random.Random(3).random(), np.random.RandomState(3).rand()
    with pytest.raises(ConnectionError), keep_generators():
        random.random(), np.random.rand()
        raise ConnectionError
    assert (random.random(), np.random.rand()) == expected
