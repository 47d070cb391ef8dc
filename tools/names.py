"""Checks names: a function is a verb with an object, so its name is no bare participle (`made`, `told`, `encoded`).

`python tools/names.py` lists those that are; `make lint` runs it. Names that begin with a verb pass (`describe_sent`),
and so do properties, which are values. Methods that a protocol calls when something has happened are in `EVENTS`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "whale_nebula"
PARTICIPLE = re.compile(
    r"_?([a-z]+ed|begun|bound|broken|built|chosen|come|drawn|given|gone|grown|heard|held|kept|known|left|lost|made|met|"
    r"said|seen|sent|shown|shut|spoken|taken|told|written)$"
)
NO_PARTICIPLES = {"embed", "feed", "need", "seed", "speed"}
PUBLIC = {"gathered", "resumed"}  # names of the public interface
EVENTS = {"broken", "carried", "connected", "disconnected", "ended", "entered", "gone", "lost", "opened", "refused"}
MOST_METHODS = 55
"""How many methods are still named so. This number only falls."""


def functions() -> Iterator[tuple[str, str, bool]]:
    """(place, name, whether it is a method) of every function, without properties."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        owners = [(tree, False), *((node, True) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
        for owner, method in owners:
            for node in owner.body:
                value = any("property" in ast.unparse(each) for each in getattr(node, "decorator_list", ()))
                if isinstance(node, ast.FunctionDef) and not value:
                    yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}", node.name, method


def is_participle(name: str) -> bool:
    """Whether a name is a participle and nothing else.

    >>> [name for name in ("made", "_encoded", "encode", "feed", "describe_sent") if is_participle(name)]
    ['made', '_encoded']
    """
    return PARTICIPLE.match(name) is not None and name.lstrip("_") not in NO_PARTICIPLES


def main() -> int:
    """Print what should have another name; 1 if there is anything."""
    wrong = [each for each in functions() if is_participle(each[1])]
    plain = [f"{place} {name}" for place, name, method in wrong if not method and name not in PUBLIC]
    methods = [f"{place} {name}" for place, name, method in wrong if method and name.lstrip("_") not in EVENTS]
    if len(methods) > MOST_METHODS:
        plain += methods
    for line in plain:
        print(f"{line}: name what it does: a verb and its object", file=sys.stderr)
    return 1 if plain else 0


if __name__ == "__main__":
    sys.exit(main())
