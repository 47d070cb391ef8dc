"""The short examples: each runs; without its scope lines it gives, bit for bit, the results of plain Keras or
TensorFlow; and with `nb.auto_parallel()` instead it trains the same numbers in two clusters.

With `--grid` all run in forks of one process that has loaded TensorFlow, but not whale_nebula. `make test` runs one as
it is; that uncut models run by Keras's own code, `tests/unit/capture` tests there.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from tests.processes import zygote
from whale_nebula.launch.placement import free_port

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(1200)
EXAMPLES = ["functional", "subclassed", "custom_loop", "gan", "one_to_many"]
LOOPS = ("custom_loop", "gan", "one_to_many")
SAMPLE = ("custom_loop",)
"""`make test` runs this one; `fit` under scopes, the examples of other files call."""
AUTO = {"subclassed": "700KiB", "custom_loop": "150KiB", "functional": "300KiB", "gan": "64KiB", "one_to_many": "84KiB"}
"""Memory of a worker that none of these fits into, and a half of each does."""
SCOPES = {"cluster", "stage", "pipeline", "replica", "split", "compress"}
# Only where TensorFlow itself is told to be the same twice can bits be compared.
SAME = "import tensorflow as _tf\n_tf.config.experimental.enable_op_determinism()\n"
PRINT_VARIABLES = """
import gc as _gc, hashlib as _hashlib, numpy as _np
_found = [v for v in _gc.get_objects() if isinstance(v, _tf.Variable)]
_bits = [(v.name, _hashlib.sha256(_np.ascontiguousarray(v.numpy()).tobytes()).hexdigest()) for v in _found]
print("told:", sorted(_bits))
"""


class ScopeLineRemover(ast.NodeTransformer):
    """Takes the scope lines away: what remains is the script as it was before."""

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        node.items = [item for item in node.items if not _is_ours(item.context_expr)]
        return node if node.items else node.body

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if any(_is_ours(inner) for inner in ast.walk(node)) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = [
            ast.parse("tf.function", mode="eval").body if _is_ours(each) else each for each in node.decorator_list
        ]
        return node


class ScopeRemover(ScopeLineRemover):
    """Takes the scopes away, and `nb.init`; the plan is still printed."""

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        node.items = [item for item in node.items if not _is_ours(item.context_expr, SCOPES)]
        return node if node.items else node.body

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if _is_ours(node.value, {"init"}) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        return node


def _is_ours(node: ast.AST, names: Collection[str] = ()) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    ours = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nb"
    return ours and (not names or node.attr in names)


def source(name: str) -> str:
    return (ROOT / "examples" / f"{name}.py").read_text()


def plain(name: str) -> str:
    """The example without its scope lines; `import whale_nebula` is left in it."""
    return ast.unparse(ScopeLineRemover().visit(ast.parse(source(name))))


def auto(name: str) -> str:
    """The example with one line in the place of its scopes: the planner puts it into two clusters."""
    imported = "import whale_nebula as nb\n"
    lines = "nb.init({'clusters': {'gpu': {}, 'npu': {}}})", f"nb.auto_parallel(memory={AUTO[name]!r}, micro_batch=1)"
    written = ast.unparse(ScopeRemover().visit(ast.parse(source(name))))
    return written.replace(imported, imported + "\n".join((*lines, "")), 1)


def bare(name: str) -> str:
    """The example without any trace of whale_nebula."""
    return plain(name).replace("import whale_nebula as nb\n", "")


RunResult = tuple[int, str, str]
"""Exit code, standard output and standard error."""
FORKS = """
import json, os, runpy, sys
import keras, tensorflow
ended = {}
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        for descriptor, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{kind}", os.O_CREAT | os.O_WRONLY), descriptor)
        code = 1
        try:
            sys.argv[1:], code = [], (runpy.run_path(name, run_name="__main__"), 0)[1]
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    ended[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert "whale_nebula" not in sys.modules
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def example_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, RunResult]:
    """Every example as it is, plain and bare."""
    folder = tmp_path_factory.mktemp("examples")
    if not request.config.getoption("--grid"):
        ended = {name: zygote.run(str(ROOT / "examples" / f"{name}.py"), cwd=folder) for name in SAMPLE}
        return {name: (each.returncode, each.stdout, each.stderr) for name, each in ended.items()}
    for name in EXAMPLES:
        (folder / name).write_text(source(name))
        (folder / f"{name} bare").write_text(SAME + bare(name) + PRINT_VARIABLES)
        (folder / f"{name} plain").write_text(SAME + plain(name) + PRINT_VARIABLES)
        (folder / f"{name} auto").write_text(SAME + auto(name))
    names = sorted(path.name for path in folder.iterdir())
    command = [sys.executable, "-c", FORKS, *names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1100, check=True)
    codes = json.loads(done.stdout)
    said = {name: [(folder / f"{name}.{kind}").read_text() for kind in ("out", "err")] for name in names}
    return {name: (codes[name], *said[name]) for name in names}


def said(example_runs: Mapping[str, RunResult], name: str) -> str:
    """What an example printed, if it went well."""
    code, out, err = example_runs[name]
    assert code == 0, err[-3000:]
    return out


@pytest.mark.grid
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(example_runs: Mapping[str, RunResult], name: str) -> None:
    assert "loss" in said(example_runs, name)


@pytest.mark.grid
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_without_scopes_equals_plain_tensorflow(example_runs: Mapping[str, RunResult], name: str) -> None:
    """Once with `import whale_nebula` left in it, and once without any trace of it."""
    assert "nb." not in plain(name)
    assert "whale_nebula" not in bare(name).split('"""')[-1]
    told = said(example_runs, f"{name} plain")
    assert "told: [(" in told
    assert told == said(example_runs, f"{name} bare")


def numbers(told: str) -> list[float]:
    """Those of the last line that says a loss."""
    return [float(found) for found in re.findall(r"\d+\.\d+", told.split("told:")[0].splitlines()[-1])]


@pytest.mark.grid
@pytest.mark.parametrize("name", EXAMPLES)
def test_planned_example_trains_the_same_numbers(example_runs: Mapping[str, RunResult], name: str) -> None:
    told = said(example_runs, f"{name} auto")
    assert "chosen by nb.auto_parallel" in told
    assert re.search(r"gpu +gpu ", told)
    assert re.search(r"npu +npu ", told)
    assert numbers(told) == pytest.approx(numbers(said(example_runs, f"{name} plain")), rel=2e-3)


@pytest.mark.grid
@pytest.mark.parametrize("name", EXAMPLES)
def test_planned_example_trains_the_same_in_two_processes(
    example_runs: Mapping[str, RunResult], name: str, tmp_path: Path
) -> None:
    (tmp_path / "auto.py").write_text(re.sub(r"(?m)^nb\.init\(.*\n", "", auto(name)))
    workers = {cluster: {"workers": [f"127.0.0.1:{free_port()}"]} for cluster in ("gpu", "npu")}
    (tmp_path / "two.yaml").write_text(json.dumps({"clusters": workers}))
    command = [sys.executable, "-m", "whale_nebula", "run", "--all", "--config", "two.yaml", "auto.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ends = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
    assert len(ends) == 2
    for line in ends:
        assert numbers(line) == pytest.approx(numbers(said(example_runs, f"{name} plain")), rel=2e-3)


@pytest.mark.grid
@pytest.mark.parametrize("name", LOOPS)
def test_example_with_scopes_gives_the_same_numbers(example_runs: Mapping[str, RunResult], name: str) -> None:
    assert len(numbers(said(example_runs, name))) == 3
    assert numbers(said(example_runs, name)) == pytest.approx(numbers(said(example_runs, f"{name} plain")), rel=2e-3)


def test_custom_loop_prints_its_plan_and_learns(example_runs: Mapping[str, RunResult]) -> None:
    told = said(example_runs, "custom_loop")
    assert all(word in told for word in ("gpu", "npu", "eager-1f1b"))
    loss, _, accuracy = numbers(told)
    assert loss < 0.5
    assert accuracy > 0.8


@pytest.mark.grid
def test_gan_example_has_two_phases(example_runs: Mapping[str, RunResult]) -> None:
    told = said(example_runs, "gan")
    assert all(word in told for word in ("gpu", "npu", "phase 1"))
    _, _, radius = numbers(told)
    assert 0.3 < radius < 2.0


@pytest.mark.grid
def test_faster_replica_takes_more_micro_batches(example_runs: Mapping[str, RunResult]) -> None:
    told = said(example_runs, "one_to_many")
    assert "npu: replicas take 1 : 1 : 2 of 4 micro-batches, in the order 2 0 1 2 (speeds 1 : 1 : 2)" in told
