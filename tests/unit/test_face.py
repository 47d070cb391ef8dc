"""The package itself: what importing it loads, and that its names stay what they are."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import whale_nebula as nb

ROOT = Path(__file__).resolve().parents[2]


def test_scopes_config_codecs_and_errors_need_no_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys, whale_nebula as nb, whale_nebula.config\n"
        "nb.codec.SVD(0.6); nb.errors.NebulaError\n"
        "with nb.cluster(), nb.stage(cluster='gpu'), nb.compress(fp16=True): pass\n"
        "print(*sorted({'tensorflow', 'keras', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert nb.__version__ == project["version"]


@pytest.mark.parametrize("name", sorted(set(nb.__all__) - {"codec", "errors", "outer", "__version__"}))
def test_a_submodule_never_hides_a_public_name(name: str) -> None:
    if (ROOT / "whale_nebula" / f"{name}.py").exists():
        importlib.import_module(f"whale_nebula.{name}")
    assert callable(getattr(nb, name))


def test_dir_shows_what_is_public_and_nothing_else() -> None:
    _ = nb.stage  # loads what is behind it
    assert [name for name in dir(nb) if not name.startswith("__")] == sorted(set(nb.__all__) - {"__version__"})
    assert {"__version__", "__doc__", "__path__"} <= set(dir(nb))


def test_a_misspelt_name_is_suggested() -> None:
    with pytest.raises(AttributeError, match="did you mean 'pipeline'"):
        _ = nb.pipelin
    assert not hasattr(nb, "nothing_like_it")
