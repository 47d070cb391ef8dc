"""Draw mutants of the package, run the tests that reach each, and report how many the tests kill.

python benchmarks/mutants/sample.py --result before.json                      # goes on where it stopped
python benchmarks/mutants/sample.py --redraw before.json --result after.json  # the same mutants, wherever they moved
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutate import Mutant, apply_mutant, find_mutants

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COPIED = ("whale_nebula", "models", "strategies", "tests", "examples", "benchmarks", "docs", "deploy", "tools")
SKIPPED = ("tests/processes/", "tests/examples/", "tests/soak/", "tests/golden/test_messages")
KILLED, SURVIVED, TIMED_OUT, UNREACHED, LOST = "killed", "survived", "timed out", "no test", "not found again"
BROKEN = "test fails without it"
# tests that need an installed package: `doctor` warns if the package is another one than the installed
BROKEN_HERE = ("tests/unit/cli/test_doctor.py::test_doctor_reports_this_machine_as_good",)


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


def import_graph(root: Path) -> dict[str, set[str]]:
    paths = [p for folder in ("whale_nebula", "tests") for p in (root / folder).rglob("*.py")]
    return {name_module(str(path.relative_to(root))): find_imports(path) for path in paths}


def run_tests(copy: Path, tests: list[str], seconds: float, broken: Iterable[str] = ()) -> tuple[str, str]:
    """Run tests, without those known to fail; returns the outcome, and the first test that failed."""
    without = [f"--deselect={test}" for test in broken]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *without, *tests]
    variables = {**os.environ, "PYTHONPATH": str(copy), "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, cwd=copy, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            return TIMED_OUT, ""
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        output.seek(0)
        # a captured log line may begin with ERROR, too
        failed = [line for line in output if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return (SURVIVED if code == 0 else KILLED), (failed[0].split(" - ")[0].strip() if failed else "")


def draw(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draw mutants. Keys are hashes of code: the same functions give the same draw, whatever the files are called."""
    return random.Random(seed).sample(mutants, min(count, len(mutants)))


def redraw(mutants: list[Mutant], rows: Iterable[dict[str, Any]]) -> list[tuple[Mutant, bool]]:
    """The mutants of an earlier result at their current places, and whether they still exist."""
    by_key = {mutant.key: mutant for mutant in mutants}
    fields = Mutant.__dataclass_fields__
    earlier = [Mutant(**{name: row[name] for name in fields}) for row in rows]
    return [(by_key.get(mutant.key, mutant), mutant.key in by_key) for mutant in earlier]


def try_mutant(root: Path, copy: Path, graph: dict[str, set[str]], mutant: Mutant, options: Any) -> dict[str, Any]:
    """Apply a mutant in the copy, run its tests, and put the file back."""
    tests, path = choose_tests(root, graph, mutant.path, options.tests), copy / mutant.path
    source = (root / mutant.path).read_text("utf-8")
    mutated = apply_mutant(source, mutant)
    started = time.monotonic()
    if not tests or mutated is None:
        outcome, failed = (UNREACHED if mutated is not None else LOST), ""
    else:
        path.write_text(mutated, "utf-8")
        try:
            outcome, failed = run_tests(copy, tests, options.seconds, BROKEN_HERE)
        finally:
            path.write_text(source, "utf-8")
        if outcome == KILLED:
            again = [failed.split(" ", 1)[-1]] if failed else tests
            outcome = KILLED if run_tests(copy, again, options.seconds)[0] == SURVIVED else BROKEN
    seconds = round(time.monotonic() - started, 1)
    return {**asdict(mutant), "key": mutant.key, "outcome": outcome, "by": failed, "tests": tests, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--tests", type=int, default=12, help="test files for a mutant, at most")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for a mutant, at most")
    parser.add_argument("--result", type=Path, default=HERE / "before.json")
    parser.add_argument("--redraw", type=Path, help="take the mutants of this result, found again by their code")
    options = parser.parse_args()
    os.nice(10)
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
        graph = import_graph(ROOT)
        for mutant, found in drawn:
            if mutant.key in done:
                continue
            lost = {**asdict(mutant), "key": mutant.key, "outcome": LOST, "by": "", "tests": [], "seconds": 0.0}
            rows.append(try_mutant(ROOT, copy, graph, mutant, options) if found else lost)
            summary = dict(Counter(row["outcome"] for row in rows))
            document = {"seed": options.seed, "drawn": len(drawn), "of": len(mutants), "outcomes": summary}
            options.result.write_text(json.dumps({**document, "mutants": rows}, indent=1) + "\n", "utf-8")
            print(
                f"{rows[-1]['outcome']:>10}  {mutant.path} {mutant.function}: {mutant.before} -> {mutant.after}",
                flush=True,
            )


if __name__ == "__main__":
    main()
