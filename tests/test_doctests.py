"""Every example in a docstring of the library runs with the output shown."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "whale_nebula": "whale_nebula",
    "models": "whale_nebula.models",
    "strategies": "whale_nebula.strategies",
    "tests/simulation": "tests.simulation",
}


def list_modules() -> list[str]:
    """From the files, so that collecting tests imports nothing."""
    names = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>>" not in path.read_text("utf-8"):
                continue
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return [name for name in names if not name.endswith("__main__") and ".test_" not in name]


@pytest.mark.parametrize("name", list_modules())
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.testmod(module, optionflags=options)
    assert failed == 0, f"{failed} examples of {name} failed: run python -m doctest on it"
