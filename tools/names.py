"""Checks that names of functions are a verb with an object.

A name must not be a bare participle (`made`, `told`, `encoded`), or start with a preposition, an adverb or a
pronoun (`without_rows`, `again`, `what`). A test is named after its subject and what that does:
`test_late_ack_is_resent`, not `test_what_comes_late_is_told`.

`python tools/names.py` lists violations; `make lint` runs it. Names that start with a verb pass (`describe_sent`), and
so do properties, which are values, and functions that create an error (`late_error`). Methods that a protocol calls on
an event are in `EVENTS`. Rules of ops (passes/rules) are named after what the op does.
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
NO_VERB = re.compile(
    r"_?(again|alike|all|alone|along|among|apart|around|at|away|back|before|beside|besides|between|both|down|each|"
    r"elsewhere|half|here|in|late|less|new|of|on|once|only|other|others|over|own|same|there|together|under|unlike|up|"
    r"what|when|where|who|whole|why|with|without)(?!\w*_error)(_|$)"
)
RULES = "whale_nebula/passes/rules/"
PUBLIC = {"gathered", "here", "resumed"}  # names of the public interface
EVENTS = {"broken", "carried", "connected", "disconnected", "ended", "entered", "gone", "lost", "opened", "refused"}
TESTS = PACKAGE.parent / "tests"
NO_SUBJECT = re.compile(
    r"test_(it|its|itself|this|that|these|those|they|them|their|who|whose|whoever|what|whatever|which|one_that|ones|"
    r"nothing|nobody|none|something|somebody|anything|everything|others|there|where|why|so|such|and|but|only_what)(_|$)"
)
NO_WORD = re.compile(r"_(told|tells|said|says|nobody|somebody|whoever|whatever|strangers?|mend|mends|mended)(_|$)")


def iterate_functions() -> Iterator[tuple[str, str, bool]]:
    """Yield (place, name, whether it is a method) for every function and method of the library, except properties and
    functions inside functions.
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        owners = [(tree, False), *((node, True) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
        for owner, method in owners:
            for node in owner.body:
                is_property = any("property" in ast.unparse(each) for each in getattr(node, "decorator_list", ()))
                if isinstance(node, ast.FunctionDef) and not is_property:
                    yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}", node.name, method


def is_participle(name: str) -> bool:
    """Whether a name is a participle and nothing else.

    >>> [name for name in ("made", "_encoded", "encode", "feed", "describe_sent") if is_participle(name)]
    ['made', '_encoded']
    """
    return PARTICIPLE.match(name) is not None and name.lstrip("_") not in NO_PARTICIPLES


def lacks_verb(place: str, name: str, method: bool) -> bool:
    """Whether the name of a function, or of a private method, starts with a preposition, an adverb or a pronoun.

    >>> lacks_verb("a.py:1", "without_rows", False), lacks_verb("a.py:1", "late_error", False)
    (True, False)
    """
    checked = not place.startswith(RULES) and (not method or (name.startswith("_") and not name.startswith("__")))
    return checked and NO_VERB.match(name) is not None and name not in PUBLIC


def find_unclear_tests() -> Iterator[str]:
    """Yield the tests whose names are unclear, with their places."""
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and is_unclear(node.name):
                yield f"{path.relative_to(TESTS.parent)}:{node.lineno} {node.name}"


def is_unclear(name: str) -> bool:
    """Whether the name of a test has a pronoun for its subject, or words such as "told".

    >>> [name for name in ("test_it_is_sent", "test_errors_are_told", "test_late_ack_is_resent") if is_unclear(name)]
    ['test_it_is_sent', 'test_errors_are_told']
    """
    return NO_SUBJECT.match(name) is not None or NO_WORD.search(name) is not None


def main() -> int:
    """Print the names to change; return 1 if there are any."""
    functions = list(iterate_functions())
    wrong = [
        f"{place} {name}"
        for place, name, method in functions
        if is_participle(name) and (name.lstrip("_") not in EVENTS if method else name not in PUBLIC)
    ]
    wrong += [f"{place} {name}" for place, name, method in functions if lacks_verb(place, name, method)]
    for line in wrong:
        print(f"{line}: a function's name must be a verb with an object", file=sys.stderr)
    unclear = list(find_unclear_tests())
    for line in unclear:
        print(f"{line}: a test's name must begin with its subject and say what is checked", file=sys.stderr)
    return 1 if wrong or unclear else 0


if __name__ == "__main__":
    sys.exit(main())
