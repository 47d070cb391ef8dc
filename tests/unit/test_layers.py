"""The layers of the package: which package may import which, that no modules import each other in a circle, which load
TensorFlow or gRPC, and what library code never does.

Read from the source by `ast`, so that a breach is named by file and line without importing anything; one test
imports for real. `TestRules` plants breaches: a rule that cannot fail is not a rule.
"""

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from subprocess import PIPE

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "whale_nebula": ROOT / "whale_nebula",
    "whale_nebula.models": ROOT / "models",
    "whale_nebula.strategies": ROOT / "strategies",
}
MOST_LINES = 600
ARCHITECTURE = runpy.run_path(str(ROOT / "tools" / "architecture.py"))
LAYERS: tuple[str, ...] = ARCHITECTURE["LAYERS"]
PAGE: Path = ARCHITECTURE["PAGE"]

WITHOUT_TF = ("wire", "schedule", "report", "launch", "gateway", "security")
CLI_START_MODULES = ("cli", "cli.main")
TENSORFLOW = {"tensorflow", "tensorflow_text", "keras"}
FORBIDDEN = dict.fromkeys(sorted(WITHOUT_TF), TENSORFLOW)

PICKLE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
ENVIRON_WRITES = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"}
PRIVATE = re.compile(r"(tensorflow\.python|keras\.src)(\.|$)")
PRIVATE_NAME = re.compile(rf"{PRIVATE.pattern}[\w.]*")


@dataclass(frozen=True)
class Module:
    """One source file under its installed name."""

    name: str
    is_package: bool
    tree: ast.Module

    @classmethod
    def parse(cls, name: str, source: str, is_package: bool = False) -> "Module":
        return cls(name, is_package, ast.parse(source))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of it, in functions too."""
        return list(ast.walk(self.tree))

    def imports(self, *, at_start_only: bool = False) -> Iterator[tuple[str, int]]:
        """(dotted name, line) of all imports; `at_start_only`: of those that run when it is imported."""
        for node in walk_start(self.tree) if at_start_only else self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(node)
                yield source, node.lineno
                yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        base = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*base, node.module] if node.module else base)


def walk_start(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs when it is imported: `ast.walk` without functions and `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.expr) and not is_typing(
            child
        ):
            yield child
            yield from walk_start(child)


def is_typing(node: ast.AST) -> bool:
    """Whether it is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in {
        getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(node.test)
    }


@cache
def list_paths() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


@cache
def load_modules() -> dict[str, Module]:
    return {
        name: Module.parse(name, path.read_text("utf-8"), path.name == "__init__.py")
        for name, path in list_paths().items()
    }


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def is_forbidden(name: str, forbidden: set[str]) -> bool:
    return any(is_within(name, each) for each in forbidden)


def list_modules(package: str) -> list[Module]:
    return [module for name, module in load_modules().items() if is_within(name, f"whale_nebula.{package}")]


def find_direct_imports(module: Module, forbidden: set[str]) -> list[str]:
    """Forbidden imports written in the module, in functions and for type checkers too."""
    found = [(name, line) for name, line in module.imports() if is_forbidden(name, forbidden)]
    return [f"{module.name}:{line} imports {name}" for name, line in found]


def find_import_chains(start: str, forbidden: set[str], known: dict[str, Module]) -> list[str]:
    """Chains by which importing `start` ends at something forbidden. A module's parent packages run too."""
    chains, queue, seen = [], [(start,)], {start}
    while queue:
        chain = queue.pop(0)
        for name in list_next_imports(known[chain[-1]]):
            if is_forbidden(name, forbidden):
                chains.append(" -> ".join([*chain, name]))
            elif name in known and name not in seen:
                seen.add(name)
                queue.append((*chain, name))
    return chains


def list_next_imports(module: Module) -> list[str]:
    """What importing the module imports next: its own parents first, then what it names and their parents."""
    names = [module.name, *(name for name, _ in module.imports(at_start_only=True))]
    parents = [".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 1)]
    return sorted({*parents, *names[1:]} - {module.name})


def find_banned_code(module: Module) -> list[str]:
    """What library code never does, and ruff does not look for, as "module:line what"."""
    found = ((node, describe_ban(node)) for node in module.nodes)
    return [f"{module.name}:{getattr(node, 'lineno', 0)} {what}" for node, what in found if what]


def describe_ban(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id="NotImplementedError"):
            return "NotImplementedError: raise NotYetError"
        case ast.Import(names=names) if {alias.name.split(".")[0] for alias in names} & PICKLE_MODULES:
            return "pickle: no code crosses a link or a disk"
        case ast.ImportFrom(module=str(source)) if source.split(".")[0] in PICKLE_MODULES:
            return "pickle: no code crosses a link or a disk"
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()) if is_environ(value):
            return "writes os.environ"
        case ast.Call():
            return describe_banned_call(node)
    return None


def describe_banned_call(call: ast.Call) -> str | None:
    if any(word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in call.keywords):
        return "allow_pickle: no code crosses a link or a disk"
    match call.func:
        case ast.Attribute(value=value, attr=attr) if attr in ENVIRON_WRITES and is_environ(value):
            return "writes os.environ"
        case ast.Attribute(value=ast.Name(id="os"), attr="putenv" | "unsetenv"):
            return "writes os.environ"
        case ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "full_load" | "unsafe_load"):
            return "yaml: only safe_load"
    return None


def is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in {"os.environ", "environ", "os.environb"}


def find_private_uses(module: Module) -> list[str]:
    """Imports of TF's and Keras's insides, by statement or by a string given to importlib."""
    found = [f"{module.name}:{line} imports {name}" for name, line in module.imports() if PRIVATE.match(name)]
    for node in module.nodes:
        if isinstance(node, ast.Constant) and PRIVATE_NAME.fullmatch(str(node.value)):
            found.append(f"{module.name}:{node.lineno} names {node.value}")
    return found


def layer_of(name: str) -> str:
    """The package or module right below the root that a dotted name is in, or ""."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "whale_nebula" and parts[1] in LAYERS else ""


def find_upward_imports(module: Module) -> list[str]:
    """Imports of a layer above, in functions too; those for type checkers alone are none."""
    own = layer_of(module.name)
    if not own:
        return []
    return [
        f"{module.name}:{line} imports {name}"
        for name, line in list_runtime_imports(module)
        if layer_of(name) and LAYERS.index(layer_of(name)) > LAYERS.index(own)
    ]


def list_runtime_imports(module: Module) -> Iterator[tuple[str, int]]:
    """What runs of a module's imports, at its start and in functions."""
    checked = {id(each) for node in module.nodes if is_typing(node) for each in ast.walk(node)}
    for node in module.nodes:
        if isinstance(node, ast.Import) and id(node) not in checked:
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and id(node) not in checked:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def find_cycles(known: dict[str, Module]) -> list[list[str]]:
    """Sets of modules that import each other, directly or in a circle (Tarjan's strongly connected components)."""
    graph = {
        name: {
            owner
            for target, _ in list_runtime_imports(module)
            if (owner := find_owner(target, known)) not in ("", name)
        }
        for name, module in known.items()
    }
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in number:
            visit(name)
    return found


def find_owner(name: str, known: dict[str, Module]) -> str:
    """The module that an imported name is, or is in; "" for what is not ours."""
    if name in known:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in known else ""


def list_own_modules() -> dict[str, Module]:
    """The package's own modules, without its root, which loads names when they are asked for."""
    return {name: module for name, module in load_modules().items() if layer_of(name)}


def test_packages_are_all_in_a_layer() -> None:
    folder = FOLDERS["whale_nebula"]
    there = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__", "py"} == set(LAYERS)


def test_architecture_page_is_up_to_date() -> None:
    """`python tools/architecture.py` writes it."""
    text = PAGE.read_text("utf-8")
    assert ARCHITECTURE["update_page"](text) == text


def test_architecture_page_names_existing_files() -> None:
    text = PAGE.read_text("utf-8")
    names = set(re.findall(r"`([\w/]+\.py)`", text)) - {"tests/unit/test_layers.py"}
    folder = FOLDERS["whale_nebula"]
    assert [name for name in sorted(names) if "/" in name and not (folder / name).exists()] == []
    dotted = {name for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", text) if name.split(".")[0] in LAYERS}
    known = {name.removeprefix("whale_nebula.") for name in load_modules()}
    assert [name for name in sorted(dotted) if name not in known and name.rpartition(".")[0] not in known] == []


def test_packages_do_not_import_higher_layers() -> None:
    assert [violation for module in list_own_modules().values() for violation in find_upward_imports(module)] == []


def test_modules_have_no_import_cycles() -> None:
    assert find_cycles(list_own_modules()) == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_light_packages_do_not_import_tensorflow(package: str) -> None:
    for module in list_modules(package):
        assert find_direct_imports(module, FORBIDDEN[package]) == []
        assert find_import_chains(module.name, FORBIDDEN[package], load_modules()) == []


@pytest.mark.parametrize("name", CLI_START_MODULES)
def test_command_line_starts_without_tensorflow(name: str) -> None:
    if (full := f"whale_nebula.{name}") in load_modules():
        assert find_import_chains(full, TENSORFLOW, load_modules()) == []


def test_grpc_is_imported_only_by_transport_and_gateway() -> None:
    may = re.compile(r"whale_nebula\.(transport\.grpc\w*|gateway)(\.|$)")
    others = [module for name, module in load_modules().items() if not may.match(name)]
    assert [violation for module in others for violation in find_direct_imports(module, {"grpc"})] == []


def test_private_tensorflow_parts_are_used_in_one_package() -> None:
    others = [module for name, module in load_modules().items() if not is_within(name, "whale_nebula.tf")]
    assert [violation for module in others for violation in find_private_uses(module)] == []


def test_library_files_have_at_most_600_lines() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in list_paths().values()}
    assert {str(path): count for path, count in lengths.items() if count > MOST_LINES} == {}


def test_library_has_no_banned_code() -> None:
    assert [violation for module in load_modules().values() for violation in find_banned_code(module)] == []


def test_library_has_no_todo_comments() -> None:
    note = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert [name for name, path in list_paths().items() if note.search(path.read_text("utf-8"))] == []


def test_importing_light_packages_loads_no_tensorflow(tmp_path: Path) -> None:
    light = [module.name for package in WITHOUT_TF for module in list_modules(package)]
    light += [full for name in CLI_START_MODULES if (full := f"whale_nebula.{name}") in load_modules()]
    code = (
        f"import importlib, sys\nfor name in {light!r}: importlib.import_module(name)\n"
        f"print(*sorted({TENSORFLOW!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "")


RULES = [
    *(
        (find_upward_imports, "whale_nebula.wire.frame", source, 1)
        for source in (
            "from whale_nebula.runtime.run import Run",
            "from whale_nebula import runtime",
            "def f():\n    import whale_nebula.cli.main",
        )
    ),
    (
        find_upward_imports,
        "whale_nebula.wire.frame",
        "if TYPE_CHECKING:\n    from whale_nebula.runtime.run import Run",
        0,
    ),
    *(
        (find_banned_code, "whale_nebula.thing", source, 1)
        for source in (
            "import pickle",
            "from pickle import loads",
            "import os; os.environ['A'] = '1'",
            "import os; del os.environ['A']",
            "import os; os.environ.setdefault('A', '1')",
            "from os import environ; environ.update(A='1')",
            "import os; os.putenv('A', '1')",
            "import yaml; yaml.load('')",
            "import numpy; numpy.load('x', allow_pickle=True)",
            "raise NotImplementedError",
        )
    ),
    *(
        (find_banned_code, "whale_nebula.thing", source, 0)
        for source in (
            "import os; os.environ['A']; os.environ.get('A')",
            "import yaml; yaml.safe_load('')",
            "model.compile('adam'); model.eval()",
            "import numpy; numpy.load('x', allow_pickle=False)",
        )
    ),
    (find_private_uses, "whale_nebula.thing", "from tensorflow.python.framework import ops", 2),
    (find_private_uses, "whale_nebula.thing", "def f():\n    import keras.src.backend", 1),
    (find_private_uses, "whale_nebula.thing", "importlib.import_module('tensorflow.python.eager.context')", 1),
    (find_private_uses, "whale_nebula.thing", "'tensorflow.python is private'", 0),
]


class TestRules:
    """Each rule finds what it is for, and leaves alone what it is not for."""

    @pytest.mark.parametrize(("rule", "name", "source", "count"), RULES)
    def test_rule_finds_only_violations(
        self, rule: Callable[[Module], list[str]], name: str, source: str, count: int
    ) -> None:
        assert len(rule(Module.parse(name, source))) == count

    def test_import_cycle_is_found(self) -> None:
        sources = {
            "whale_nebula.ir.a": "from whale_nebula.ir.b import x",
            "whale_nebula.ir.b": "def f():\n    from whale_nebula.ir import c",
            "whale_nebula.ir.c": "import whale_nebula.ir.a",
            "whale_nebula.ir.d": "from whale_nebula.ir.a import y",
        }
        known = {name: Module.parse(name, text) for name, text in sources.items()}
        assert find_cycles(known) == [["whale_nebula.ir.a", "whale_nebula.ir.b", "whale_nebula.ir.c"]]

    @pytest.mark.parametrize(
        ("source", "name"),
        [
            ("from . import frame", "whale_nebula.wire.frame"),
            ("from .. import runtime", "whale_nebula.runtime"),
            ("from ..runtime.actor import Actor", "whale_nebula.runtime.actor"),
        ],
    )
    def test_relative_imports_are_resolved(self, source: str, name: str) -> None:
        inside = Module.parse("whale_nebula.wire.session", source)
        package = Module.parse("whale_nebula.wire", source, is_package=True)
        assert name in dict(inside.imports())
        assert name in dict(package.imports())

    def test_import_chain_is_followed_through_parent_packages(self) -> None:
        sources = {
            "whale_nebula": "",
            "whale_nebula.wire": "from whale_nebula.tools import small",
            "whale_nebula.tools": "import tensorflow as tf",
            "whale_nebula.tools.small": "",
        }
        known = {name: Module.parse(name, text, is_package=True) for name, text in sources.items()}
        found = find_import_chains("whale_nebula.wire", TENSORFLOW, known)
        assert found == ["whale_nebula.wire -> whale_nebula.tools -> tensorflow"]

    @pytest.mark.parametrize(
        "source",
        [
            "def f():\n    import tensorflow",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tensorflow",
        ],
    )
    def test_imports_in_functions_and_type_checking_are_not_followed(self, source: str) -> None:
        module = Module.parse("whale_nebula.cli", source)
        assert find_import_chains("whale_nebula.cli", TENSORFLOW, {"whale_nebula.cli": module}) == []
        assert find_direct_imports(module, TENSORFLOW)
