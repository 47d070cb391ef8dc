"""Programs beside the package import names that are there: benchmarks, examples and tools."""

from __future__ import annotations

import ast
import functools
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


@functools.cache
def list_defined_names(path: Path) -> set[str]:
    """What a program defines or imports outside functions and classes."""
    names: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {(each.asname or each.name).split(".")[0] for each in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            else:
                todo.append(node)
    return names


def find_sibling(program: Path, module: str | None) -> Path | None:
    """The file of a module that is next to a program or in the folder above."""
    return next((each for folder in program.parents[:2] if (each := folder / f"{module}.py").exists()), None)


def find_sibling_uses(program: Path) -> Iterator[tuple[Path, str]]:
    """Each name that a program takes from a file next to it, or in the folder above."""
    tree = ast.parse(program.read_text("utf-8"))
    modules: dict[str, Path] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (source := find_sibling(program, node.module)):
            yield from ((source, each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            modules |= {each.name: source for each in node.names if (source := find_sibling(program, each.name))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def test_programs_use_existing_names_of_programs_next_to_them() -> None:
    programs = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    uses = [(program, source, name) for program in programs for source, name in find_sibling_uses(program)]
    assert len(uses) > 100
    missing = [
        f"{program}: {source.name}: {name}" for program, source, name in uses if name not in list_defined_names(source)
    ]
    assert missing == []


def test_programs_import_existing_names() -> None:
    found = sorted(set(find_imports()))
    assert len({file for file, *_ in found}) > 60
    missing = [f"{file}: {module}.{name}" for file, module, name in found if not is_importable(module, name)]
    assert missing == []
