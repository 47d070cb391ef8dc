"""Programs beside the package import names that are there: benchmarks, examples and tools."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "examples", "tools", "tests/soak")


def find_imports() -> Iterator[tuple[str, str, str]]:
    """The file, the module and the name of each import from this repository."""
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("whale_nebula", "tests"):
                for name in node.names:
                    yield str(path.relative_to(ROOT)), str(node.module), name.name


def is_importable(module: str, name: str) -> bool:
    """Whether a module has a name, or is a package with a module of that name."""
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


def test_programs_import_existing_names() -> None:
    found = sorted(set(find_imports()))
    assert len({file for file, *_ in found}) > 60
    missing = [f"{file}: {module}.{name}" for file, module, name in found if not is_importable(module, name)]
    assert missing == []
