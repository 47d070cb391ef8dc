"""`examples/large_classifier.py`, Whale's second case, trains as plain Keras does: in one process, in two, and where
the planner has to find that the classifier is divided.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import test_short_examples
from whale_nebula.launch.placement import free_port

NAME, PLANNED = "large_classifier", "9MiB"
"""The memory of a worker in which the classifier does not fit, and a half of it does."""
IMPORT = "import whale_nebula as nb\n"
pytestmark = [pytest.mark.grid, pytest.mark.timeout(600)]


def write_plain_example() -> str:
    """The example in Keras alone."""
    written = re.sub(r"(?m)^plan = .*\n.*\n +print\(plan\)\n", "", test_short_examples.plain(NAME))
    written = written.replace("if nb.here().lead:", "if True:")
    return written.replace(IMPORT, "keras.utils.set_random_seed(1)\n")


def write_planned_example() -> str:
    """The example with one line in the place of its scopes."""
    found = ast.unparse(test_short_examples.ScopeRemover().visit(ast.parse(test_short_examples.source(NAME))))
    return found.replace(IMPORT, f"{IMPORT}nb.init(seed=1)\nnb.auto_parallel(memory={PLANNED!r})\n")


def run_script(folder: Path, script: str, *launcher: str) -> str:
    """What a script prints."""
    (folder / "script.py").write_text(script)
    workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    (folder / "two.yaml").write_text(json.dumps({"clusters": {"gpu": {"workers": workers}}}))
    command = [sys.executable, *launcher, "script.py"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_large_classifier_trains_like_plain_keras(tmp_path: Path) -> None:
    launcher = ("-m", "whale_nebula", "run", "--all", "--config", "two.yaml")
    loss, accuracy = test_short_examples.numbers(run_script(tmp_path, write_plain_example()))
    for script, how in (
        (test_short_examples.source(NAME), ()),
        (test_short_examples.source(NAME), launcher),
        (write_planned_example(), launcher),
    ):
        output = run_script(tmp_path, script, *how)
        assert "classifier/kernel is split(1)" in output
        (found,) = re.findall(r"loss [\d.]+, accuracy [\d.]+", output)
        assert test_short_examples.numbers(found) == pytest.approx([loss, accuracy], rel=1e-2)
