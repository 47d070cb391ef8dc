"""Every message template of the package, read from its source.

Two lists, both sorted by text, without files and lines, so that code may move: the constructed errors and warnings
(code, what, where, why, mend), and all other sentences of the source, such as reasons that are passed to a function
which raises. Computed parts are `{}`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from whale_nebula import errors

ROOT = Path(__file__).parents[2]
FOLDERS = ("whale_nebula", "models", "strategies")
PARTS = ("where", "why", "mend")
HOLE = "{}"
WARNERS = ("warn_at", "warn_once")
SENTENCE_WORDS = 4


def list_messages() -> str:
    """The text of the golden file."""
    trees = [ast.parse(path.read_text("utf-8")) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [(find_constants(tree), list(ast.walk(tree))) for tree in trees]
    classes = find_error_classes([node for _, nodes in found for node in nodes if isinstance(node, ast.ClassDef)])
    raised: set[str] = set()
    sentences: set[str] = set()
    for constants, nodes in found:
        inside: set[int] = set()
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            if (text := describe_call(call, classes, constants)) is not None:
                raised.add(text)
                inside.update(id(node) for node in ast.walk(call))
        sentences.update(find_sentences(nodes, inside))
    listed = [*sorted(raised), "", "Other sentences of the source:", "", *sorted(sentences)]
    return "\n".join(listed)


def find_error_classes(definitions: list[ast.ClassDef]) -> dict[str, str]:
    """The code of each error and warning class by name, also of those outside the public tree."""
    found = {n: c.code for n, c in vars(errors).items() if isinstance(c, type) and hasattr(c, "code")}
    size = -1
    while size != len(found):
        size = len(found)
        for node in definitions:
            for base in map(name_of, node.bases):
                if base in found and node.name not in found:
                    found[node.name] = found[base]
    return found


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def find_constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Module constants that hold text."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str()) | ast.JoinedStr() as value):
                found[name] = value
    return found


def describe_call(call: ast.Call, classes: dict[str, str], constants: dict[str, ast.expr]) -> str | None:
    """The template of a call that constructs an error, by its class or through a helper that takes its parts."""
    name, args = name_of(call.func), call.args
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in PARTS}
    if name not in classes and "mend" not in keywords:
        return None
    parts = {key: template(value, constants) for key, value in keywords.items()}
    if name in WARNERS:  # their first argument is the line of the warning, unless `where` is given
        name, args, parts = "NebulaWarning", args[1:], {"where": HOLE, **parts}
    what = " | ".join(template(argument, constants) for argument in args) or HOLE
    if all(not text.strip("{}| ") for text in (what, *parts.values())):
        return None
    return "\n".join([f"{classes.get(name, 'NB-???')} {what}", *(f"  {k}: {parts[k]}" for k in PARTS if k in parts)])


def template(node: ast.expr | None, constants: dict[str, ast.expr]) -> str:
    """The text of an expression, with `{}` for what is computed."""
    match node:
        case ast.Constant(value=str() as text):
            return text.replace("\n", "\\n")
        case ast.JoinedStr(values=values):
            return "".join(template(value, constants) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left, constants) + template(right, constants)
        case ast.IfExp(body=body, orelse=orelse):
            return f"({template(body, constants)} | {template(orelse, constants)})"
        case ast.BoolOp(values=values):
            return f"({' | '.join(template(value, constants) for value in values)})"
        case ast.Name(id=name) if name in constants:
            return template(constants[name], {})
        case _:
            return HOLE


def find_sentences(nodes: list[ast.AST], inside: set[int]) -> Iterator[str]:
    """Texts of several words that are neither docstrings nor part of a constructed error."""
    skipped = set(inside)
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(value) for value in node.values)
    for node in nodes:
        if id(node) not in skipped and isinstance(node, ast.Constant | ast.JoinedStr):
            text = template(node, {})
            if len(text.replace(HOLE, " ").split()) >= SENTENCE_WORDS:
                yield text
