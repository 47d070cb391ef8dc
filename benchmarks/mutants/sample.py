"""Draw mutants of the package, run the tests that reach each, and report how many the tests kill.

python benchmarks/mutants/sample.py --result before.json                      # goes on where it stopped
python benchmarks/mutants/sample.py --redraw before.json --result after.json  # the same mutants, wherever they moved
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import pytest
from mutate import Mutant, apply_mutant, find_mutants, list_functions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COPIED = ("whale_nebula", "models", "strategies", "tests", "examples", "benchmarks", "docs", "deploy", "tools")
# tests that start processes or train whole matrices, and those that compare the source's texts
SKIPPED = (
    *(f"tests/{name}/" for name in ("processes", "examples", "soak", "parity", "traps")),
    *(f"tests/scripts/{name}/" for name in ("keras", "loops", "place")),
    "tests/golden/test_messages",
)
Row = dict[str, Any]
KILLED, SURVIVED, TIMED_OUT, UNREACHED, LOST = "killed", "survived", "timed out", "no test", "not found again"
BROKEN = "test fails without it"
# tests that need an installed package: `doctor` warns if the package is another one than the installed
BROKEN_HERE = tuple(
    f"tests/unit/cli/test_doctor.py::test_doctor_reports_{name}"
    for name in ("this_machine_as_good", "package_location_and_mixed_copies")
)


def find_imports(path: Path) -> set[str]:
    """The modules that a file imports, and the names it imports from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def name_module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def measure_distances(graph: dict[str, set[str]], target: str) -> dict[str, int]:
    """The number of imports from each module to the target; those through the package's `__init__` come last."""
    importers: dict[str, set[str]] = {}
    for module, imports in graph.items():
        for each in imports:
            importers.setdefault(each, set()).add(module)
    distances = {target: 0}
    front = [target]
    while front:
        near = [(distances[each] + 1, module) for each in front for module in importers.get(each, ())]
        front = [module for _, module in near if module not in distances and module != "whale_nebula"]
        for distance, module in near:
            if module != "whale_nebula":
                distances.setdefault(module, distance)
    far = max(distances.values()) + 1
    for module in importers.get("whale_nebula", ()):
        distances.setdefault(module, far)
    return distances


def choose_tests(root: Path, graph: dict[str, set[str]], target: str, most: int) -> list[str]:
    """The test files with the fewest imports to a module; among equals those in folders of the same name."""
    distances = measure_distances(graph, name_module(target))
    area, stem = target.split("/")[1], Path(target).stem
    chosen = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = str(path.relative_to(root))
        near = distances.get(name_module(name))
        if near is not None and not name.startswith(SKIPPED):
            chosen.append((near - (f"/{area}/" in name) - 3 * (f"test_{stem}.py" in name), name))
    return [name for _, name in sorted(chosen)[:most]]


def choose_by_words(root: Path, mutant: Mutant, texts: Mapping[str, str], most: int) -> list[str]:
    """The test files that mention most of what a function is called and says, where rare terms count more; first the
    examples in the docstrings of its module.
    """
    source = (root / mutant.path).read_text("utf-8")
    terms = {*mutant.function.split("."), *find_phrases(source, mutant.function)} - {"__init__", "__post_init__"}
    scores: Counter[str] = Counter()
    for term in terms:
        pattern = re.compile(rf"\b{re.escape(term)}\b")
        found = [name for name, text in texts.items() if pattern.search(text)]
        scores.update({name: 1 / len(found) for name in found})
    examples = f"tests/test_doctests.py::test_examples_in_docstrings_run[{name_module(mutant.path)}]"
    return [examples] * (">>>" in source) + [name for name, _ in scores.most_common(most)]


def find_phrases(source: str, function: str) -> set[str]:
    """Any three successive words of a function's texts, and the words of its decorators."""
    (node,) = [node for name, node in list_functions(ast.parse(source)) if name == function][:1]
    texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    words = [re.findall(r"[\w'.]+", text) for text in texts if text != ast.get_docstring(node, clean=False)]
    named = [each.value for top in node.decorator_list for each in ast.walk(top) if isinstance(each, ast.Constant)]
    found = {" ".join(each[place : place + 3]) for each in words for place in range(len(each) - 2)}
    return found | {word for text in named if isinstance(text, str) for word in text.split()}


def read_tests(root: Path) -> dict[str, str]:
    """The texts of test files that start no processes and train no whole matrices."""
    files = {str(path.relative_to(root)): path for path in sorted((root / "tests").rglob("test_*.py"))}
    return {name: path.read_text("utf-8") for name, path in files.items() if not name.startswith(SKIPPED)}


def import_graph(root: Path) -> dict[str, set[str]]:
    paths = [p for folder in ("whale_nebula", "tests") for p in (root / folder).rglob("*.py")]
    return {name_module(str(path.relative_to(root))): find_imports(path) for path in paths}


class Failure:
    """A pytest plugin that writes the first test that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid, "utf-8")


def run_tests(copy: Path, tests: Sequence[str], seconds: float, broken: Iterable[str] = ()) -> tuple[str, str]:
    """Run tests, without those known to fail; returns the outcome, and the first test that failed.

    They run in a fork of this process, which has loaded TensorFlow but nothing of the package. `seconds` limits the
    processor time, so that a busy machine times nothing out; the wall time is limited to twenty times as much.
    """
    without = [f"--deselect={test}" for test in broken]
    command = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={copy}", *without, *tests]
    failed = copy.parent / "failed"
    failed.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        run_pytest(copy, command, seconds, failed)
    ended, status, deadline = 0, 0, time.monotonic() + 20 * seconds
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    if not ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
        return TIMED_OUT, ""
    return (SURVIVED if status == 0 else KILLED), (failed.read_text("utf-8") if failed.exists() else "")


def run_pytest(copy: Path, command: list[str], seconds: float, failed: Path) -> NoReturn:
    """Run pytest in this process, a fork, and end it."""
    code = 70
    try:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.chdir(copy)
        os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() not in (HERE, ROOT))]
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
        code = int(pytest.main(command, plugins=[Failure(failed)]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def draw(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draw mutants: those whose keys have the smallest hashes. An edit of the package only exchanges mutants of the
    functions that it touches.
    """
    return sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())[:count]


def redraw(mutants: list[Mutant], rows: Iterable[dict[str, Any]]) -> list[tuple[Mutant, bool]]:
    """The mutants of an earlier result at their current places, and whether they still exist."""
    by_key = {mutant.key: mutant for mutant in mutants}
    fields = Mutant.__dataclass_fields__
    earlier = [Mutant(**{name: row[name] for name in fields}) for row in rows]
    return [(by_key.get(mutant.key, mutant), mutant.key in by_key) for mutant in earlier]


def try_mutant(root: Path, copy: Path, mutant: Mutant, choices: Sequence[Sequence[str]], seconds: float) -> Row:
    """Apply a mutant in the copy, run each choice of tests until one fails, and put the file back."""
    path, source = copy / mutant.path, (root / mutant.path).read_text("utf-8")
    mutated, started, outcomes, failed = apply_mutant(source, mutant), time.monotonic(), [], ""
    if mutated is None:
        outcomes = [LOST]
    for tests in choices if mutated is not None else ():
        path.write_text(mutated or source, "utf-8")
        try:
            outcome, failed = run_tests(copy, tests, seconds, BROKEN_HERE) if tests else (UNREACHED, "")
        finally:
            path.write_text(source, "utf-8")
        if outcome == KILLED and run_tests(copy, [failed] if failed else tests, seconds)[0] != SURVIVED:
            outcome = BROKEN
        outcomes.append(outcome)
        if outcome == KILLED:
            break
    outcome = outcomes[-1] if outcomes[-1] != UNREACHED else outcomes[0]
    row = {**asdict(mutant), "key": mutant.key, "outcome": outcome, "near": outcomes[0], "by": failed}
    return {**row, "tests": list(choices), "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--tests", type=int, default=12, help="test files for a mutant, at most")
    parser.add_argument("--seconds", type=float, default=300.0, help="processor time of a run of tests, at most")
    parser.add_argument("--more", type=int, default=0, help="test files for a survivor, chosen by words, at most")
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument("--result", type=Path, default=HERE / "before.json")
    parser.add_argument("--redraw", type=Path, help="take the mutants of this result, found again by their code")
    options = parser.parse_args()
    os.nice(options.nice)
    for name in ("tensorflow", "keras", "grpc"):
        importlib.import_module(name)  # for the forks

    mutants = find_mutants(ROOT)
    if options.redraw:
        drawn = redraw(mutants, json.loads(options.redraw.read_text("utf-8"))["mutants"])
    else:
        drawn = [(mutant, True) for mutant in draw(mutants, options.count, options.seed)]
    rows = json.loads(options.result.read_text("utf-8"))["mutants"] if options.result.exists() else []
    done = {row["key"] for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        copy.mkdir()
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.iterdir():
            if path.is_file() and path.name != ".git":
                shutil.copy(path, copy)
        compileall.compile_dir(copy / "whale_nebula", quiet=2)  # the forks write no bytecode
        graph, texts = import_graph(ROOT), read_tests(ROOT)
        for mutant, found in drawn:
            if mutant.key in done:
                continue
            choices = [choose_tests(ROOT, graph, mutant.path, options.tests)] if found else []
            if found and options.more:
                by_words = choose_by_words(ROOT, mutant, texts, options.more)
                choices.append([name for name in by_words if name not in choices[0]])
            rows.append(try_mutant(ROOT, copy, mutant, choices, options.seconds))
            summary = dict(Counter(row["outcome"] for row in rows))
            document = {"seed": options.seed, "drawn": len(drawn), "of": len(mutants), "outcomes": summary}
            if options.more:
                document["near"] = dict(Counter(row["near"] for row in rows))
            options.result.write_text(json.dumps({**document, "mutants": rows}, indent=1) + "\n", "utf-8")
            print(
                f"{rows[-1]['outcome']:>10}  {mutant.path} {mutant.function}: {mutant.before} -> {mutant.after}",
                flush=True,
            )


if __name__ == "__main__":
    main()
