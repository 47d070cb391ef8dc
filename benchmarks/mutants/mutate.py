"""Mutations of Python source: small edits that a good test suite detects.

A mutant is identified by text, not by place: the body of its function, the line, and the replacement. So the same
mutant is found again after a function has moved to another file.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One edit of one function. `body` is the digest of the function's source, independent of its place."""

    path: str
    function: str
    body: str
    kind: str
    number: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """The identity of a mutant, independent of its function's place."""
        return hashlib.sha256(f"{self.body} {self.kind} {self.number} {self.after}".encode()).hexdigest()[:12]


def digest_body(function: Function) -> str:
    return hashlib.sha256(ast.dump(function).encode()).hexdigest()[:16]


def list_functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Functions and methods with their qualified names; nested ones belong to the outer one."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, Function):
                yield f"{prefix}{node.name}", node

    yield from walk(tree.body, "")


def list_edits(function: Function) -> Iterator[tuple[str, ast.AST, ast.AST | None]]:
    """Kind, node, and replacement of each edit; None removes a statement."""
    for statement in function.body:
        for node in ast.walk(statement):
            match node:
                case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
                    yield "comparison", node, replaced(node, ops=[COMPARISONS[type(operator)]()])
                case ast.BoolOp(op=operator):
                    other = ast.Or() if isinstance(operator, ast.And) else ast.And()
                    yield "boolean operator", node, replaced(node, op=other)
                case ast.UnaryOp(op=ast.Not(), operand=operand):
                    yield "negation", node, operand
                case ast.BinOp(op=operator) if type(operator) in ARITHMETIC:
                    yield "arithmetic", node, replaced(node, op=ARITHMETIC[type(operator)]())
                case ast.Constant(value=bool() as value):
                    yield "constant", node, ast.Constant(not value)
                case ast.Constant(value=int() as value):
                    yield "constant", node, ast.Constant(value + 1)
                case ast.Return(value=ast.expr()):
                    yield "return", node, ast.Return(ast.Constant(None))
                case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
                    yield "removed statement", node, ast.Pass()
                case ast.Call(args=[ast.expr() as first, ast.expr() as second, *rest]) if not isinstance(
                    first, ast.Starred
                ) and not isinstance(second, ast.Starred):
                    yield "swapped arguments", node, replaced(node, args=[second, first, *rest])
                case _:
                    continue


def replaced(node: ast.AST, **changes: object) -> ast.AST:
    made = copy.copy(node)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def list_mutants(path: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a file."""
    for name, function in list_functions(ast.parse(source)):
        body = digest_body(function)
        for number, (kind, node, other) in enumerate(list_edits(function)):
            after = ast.unparse(ast.fix_missing_locations(copy.deepcopy(other))) if other is not None else ""
            before = ast.unparse(node)
            if before != after:
                yield Mutant(path, name, body, kind, number, before[:200], after[:200])


def apply_mutant(source: str, mutant: Mutant) -> str | None:
    """The source with this edit; None if the file no longer has such a function."""
    tree = ast.parse(source)
    for _, function in list_functions(tree):
        if digest_body(function) != mutant.body:
            continue
        for number, (kind, node, other) in enumerate(list_edits(function)):
            if number == mutant.number and kind == mutant.kind and other is not None:
                return replace_lines(source, node, ast.unparse(ast.fix_missing_locations(other)))
    return None


def replace_lines(source: str, node: ast.AST, text: str) -> str:
    """Replace a node by text; parentheses keep an expression whole."""
    lines = source.splitlines(keepends=True)
    start, end = getattr(node, "lineno") - 1, getattr(node, "end_lineno") - 1  # noqa: B009
    head = lines[start].encode()[: getattr(node, "col_offset")].decode()  # noqa: B009
    tail = lines[end].encode()[getattr(node, "end_col_offset") :].decode()  # noqa: B009
    text = f"({text})" if isinstance(node, ast.expr) else text
    return "".join([*lines[:start], head + text + tail, *lines[end + 1 :]])


def find_mutants(root: Path, folder: str = "whale_nebula") -> list[Mutant]:
    """All mutants of a package, in an order that does not depend on files."""
    found = [
        mutant
        for path in sorted((root / folder).rglob("*.py"))
        for mutant in list_mutants(str(path.relative_to(root)), path.read_text("utf-8"))
    ]
    return sorted(found, key=lambda mutant: (mutant.key, mutant.path))
