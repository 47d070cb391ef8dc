"""Generates the diagram and the table of `docs/architecture.md` from the source.

`python tools/architecture.py` rewrites the page; a test fails if it is out of date.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, PAGE = ROOT / "whale_nebula", ROOT / "docs" / "architecture.md"

# Layers from bottom to top: a package imports only packages before it. Packages of a group belong together.
GROUPS = {
    "base": ("errors", "site", "spec", "plain", "faults"),
    "data": ("config", "hardware", "wire", "tf", "checkpoint", "codec", "ir", "schedule", "scopes"),
    "connections": ("security", "transport", "accounts", "datasets"),
    "operations": ("report", "gateway", "launch"),
    "compiler": ("feed", "passes", "capture", "plan", "planner"),
    "execution": ("runtime", "measure"),
    "top": ("cli", "__main__"),
}
LAYERS = tuple(name for group in GROUPS.values() for name in group)
_DRAWN = tuple(name for name in LAYERS if name not in ("__main__", "errors", "site", "spec", "plain", "faults"))


def update_page(text: str) -> str:
    """Replace the generated parts of the page's text by current ones."""
    for name, part in (("diagram", draw_diagram()), ("packages", make_table())):
        before, rest = text.split(f"<!-- {name}: generated -->")
        after = rest.split(f"<!-- end of {name} -->")[1]
        text = f"{before}<!-- {name}: generated -->\n{part}\n<!-- end of {name} -->{after}"
    return text


def draw_diagram() -> str:
    """Draw a Mermaid flowchart of imports between packages, without those that follow from others."""
    imports = {name: list_imports(name) & set(_DRAWN) for name in _DRAWN}
    lines = ["```mermaid", "flowchart TB"]
    for group, names in reversed(GROUPS.items()):
        drawn = [name for name in names if name in _DRAWN]
        if drawn:
            lines += [f"    subgraph {group}", *(f"        {name}" for name in drawn), "    end"]
    for name, others in sorted(imports.items(), key=lambda item: -LAYERS.index(item[0])):
        indirect = set().union(*(find_reachable(other, imports) for other in others))
        lines += [f"    {name} --> {other}" for other in sorted(others - indirect)]
    return "\n".join([*lines, "```"])


def find_reachable(name: str, imports: dict[str, set[str]]) -> set[str]:
    """All packages that a package imports, directly or indirectly."""
    return imports[name].union(*(find_reachable(other, imports) for other in imports[name]))


def make_table() -> str:
    """Create a table with the first paragraph of each package's docstring."""
    rows = ["| package | what it is |", "|---|---|"]
    for name in reversed(LAYERS):
        if name == "__main__":
            continue
        text = ast.get_docstring(ast.parse(list_sources(name)[0].read_text("utf-8"))) or ""
        rows.append(f"| `{name}` | {' '.join(text.split(chr(10) * 2)[0].split())} |")
    return "\n".join(rows)


def list_sources(name: str) -> list[Path]:
    """The files of a package, `__init__.py` first, or the file of a module."""
    folder = PACKAGE / name
    if not folder.is_dir():
        return [folder.with_suffix(".py")]
    return [folder / "__init__.py", *sorted(path for path in folder.rglob("*.py") if path != folder / "__init__.py")]


def list_imports(name: str) -> set[str]:
    """The top-level packages that a package imports when it is loaded."""
    found = set()
    for path in list_sources(name):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("whale_nebula"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {each.split(".")[1] for each in names}
    return found - {name}


if __name__ == "__main__":
    PAGE.write_text(update_page(PAGE.read_text("utf-8")), "utf-8")
