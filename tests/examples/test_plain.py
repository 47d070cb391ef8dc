"""The short examples: each runs; without its scope lines it is, bit for bit, what plain Keras or TensorFlow gives."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ["functional", "subclassed", "custom_loop", "gan"]
# Only where TensorFlow itself is told to be the same twice can bits be compared.
SAME = "import tensorflow as _tf\n_tf.config.experimental.enable_op_determinism()\n"
TELL = """
import gc as _gc, hashlib as _hashlib, numpy as _np
_found = [v for v in _gc.get_objects() if isinstance(v, _tf.Variable)]
_bits = [(v.name, _hashlib.sha256(_np.ascontiguousarray(v.numpy()).tobytes()).hexdigest()) for v in _found]
print("told:", sorted(_bits))
"""


class Without(ast.NodeTransformer):
    """Takes the scope lines away: what remains is the script as it was before."""

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        node.items = [item for item in node.items if not _ours(item.context_expr)]
        return node if node.items else node.body

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if any(_ours(inner) for inner in ast.walk(node)) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = [
            ast.parse("tf.function", mode="eval").body if _ours(each) else each for each in node.decorator_list
        ]
        return node


def _ours(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nb"


def source(name: str) -> str:
    return (ROOT / "examples" / f"{name}.py").read_text()


def run(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs(name: str, tmp_path: Path) -> None:
    assert "loss" in run(tmp_path, source(name))


@pytest.mark.parametrize("name", EXAMPLES)
def test_without_its_scope_lines_it_is_the_original(name: str, tmp_path: Path) -> None:
    """Once with `import whale_nebula` left in it, and once without any trace of it."""
    plain = ast.unparse(Without().visit(ast.parse(source(name))))
    assert "nb." not in plain
    bare = plain.replace("import whale_nebula as nb\n", "")
    assert "whale_nebula" not in bare.split('"""')[-1]
    assert run(tmp_path, SAME + plain + TELL) == run(tmp_path, SAME + bare + TELL)
