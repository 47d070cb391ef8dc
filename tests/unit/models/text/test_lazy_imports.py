"""Importing the models, or the text part of them, imports no heavy dependency that is not needed yet."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
LATER = {"tensorflow_text", "sacrebleu", "safetensors"}


def list_top_level_imports(tree: ast.AST) -> Iterator[str]:
    """What a module imports when it is imported: outside of functions."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield (child.module or "").partition(".")[0]
        yield from list_top_level_imports(child)


@pytest.mark.parametrize(
    ("folder", "later"), [("models", LATER), ("models/text", {"tensorflow", "keras"})], ids=["few need", "text"]
)
def test_heavy_dependencies_are_imported_lazily(folder: str, later: set[str]) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = {path.name: later & set(list_top_level_imports(ast.parse(path.read_text("utf-8")))) for path in paths}
    assert {name: names for name, names in found.items() if names} == {}


def test_import_finder_finds_top_level_imports() -> None:
    source = "import sacrebleu.metrics\ndef f():\n    import keras\nif a:\n    from tensorflow_text import x\n"
    assert set(list_top_level_imports(ast.parse(source))) == {"sacrebleu", "tensorflow_text"}
