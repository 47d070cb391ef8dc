"""Unsupported versions of TensorFlow or Keras, and other backends of Keras: reported by name at the first use."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from whale_nebula.tf import RANGES

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import keras, numpy as np, tensorflow as tf
import whale_nebula as nb

def scoped():
    with nb.stage(cluster="a"):  # mark: scope
        pass

def attempt(module, name, value, use):
    before = getattr(module, name)
    setattr(module, name, value)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    try:
        use()
    except nb.errors.NebulaError as error:
        print(error, end="\\n--\\n")
    setattr(module, name, before)

attempt(tf, "__version__", "2.14.1", scoped)
attempt(keras, "__version__", "3.16.0", scoped)
attempt(keras.config, "backend", lambda: "jax", scoped)
attempt(tf, "__version__", "2.9.0", lambda: nb.function(scoped))
scoped()
print("goes on")
"""
SAID = (
    ("NB-501 TensorFlow 2.14.1 is not supported", "from 2.21 up to", 'pip install "tensorflow>=2.21,<2.22"'),
    ("NB-501 Keras 3.16.0 is not supported", "from 3.15 up to", '"keras>=3.15,<3.16"'),
    ("NB-206 Keras runs on jax", "a graph that TensorFlow traced", "KERAS_BACKEND=tensorflow"),
    ("NB-501 TensorFlow 2.9.0 is not supported", "uses internals of TensorFlow", "pip install"),
)


def test_version_ranges_match_the_package_requirements() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"{name}>={low},<{high}" for name, (low, high) in RANGES.items()} <= set(wanted)


def test_unsupported_versions_are_reported_at_first_use(tmp_path: Path) -> None:
    """At a scope, and at nb.function. A model without scopes is none of our business, whatever it runs on."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-Wignore", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    *messages, last = done.stdout.split("--\n")
    assert last == "goes on\n", done.stderr
    for message, said in zip(messages, SAID, strict=True):
        what, why, mend = message.splitlines()
        assert what.startswith(said[0])
        assert f"({script}:" in what
        assert said[1] in why
        assert said[2] in mend
    scope = SCRIPT.splitlines().index('    with nb.stage(cluster="a"):  # mark: scope') + 1
    assert all(f"train.py:{scope})" in message for message in messages[:3])
