"""Importing the models, or the text part of them, imports no heavy dependency that is not needed yet."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
LATER = {"tensorflow_text", "sacrebleu", "safetensors"}


def at_import(tree: ast.AST) -> Iterator[str]:
    """What a module imports when it is imported: outside of functions."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield (child.module or "").partition(".")[0]
        yield from at_import(child)


@pytest.mark.parametrize("path", sorted((ROOT / "models").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_few_need_is_imported_where_it_is_needed(path: Path) -> None:
    assert LATER & set(at_import(ast.parse(path.read_text("utf-8")))) == set()


@pytest.mark.parametrize("path", sorted((ROOT / "models" / "text").rglob("*.py")), ids=lambda path: path.name)
def test_text_imports_tensorflow_where_it_is_needed(path: Path) -> None:
    assert {"tensorflow", "keras"} & set(at_import(ast.parse(path.read_text("utf-8")))) == set()


def test_the_test_itself_finds_an_import() -> None:
    source = "import sacrebleu.metrics\ndef f():\n    import keras\nif a:\n    from tensorflow_text import x\n"
    assert set(at_import(ast.parse(source))) == {"sacrebleu", "tensorflow_text"}
