"""Modules and files named in documentation, docstrings and comments exist."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "whale_nebula"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/*/README.md")]
)
SOURCES = sorted(
    path for folder in ("whale_nebula", "models", "strategies", "tools") for path in (ROOT / folder).rglob("*.py")
)
FILE = re.compile(
    r"(?<![\w/.*<{-])((?:whale_nebula|models|strategies|tests|tools|benchmarks|docs)/[\w/-]+\.(?:py|md))\b"
)
MODULE = re.compile(r"\bwhale_nebula(?:\.\w+)+")
SHORT = re.compile(r"`(\w+(?:/\w+)+)(?:\.py|/)?`")
"""Of a page: a module by its place in the package, such as `transport/grpc` or `plan/text.py`."""


LOGGERS = {"whale_nebula.steps"}


def is_module(path: Path) -> bool:
    return path.is_dir() or path.with_name(f"{path.name}.py").is_file()


def is_defined(dotted: str) -> bool:
    """Whether a dotted name is a module, or something that is named in one."""
    parts = dotted.split(".")[1:]
    for count in range(len(parts), -1, -1):
        top = ROOT if parts[:1] in (["models"], ["strategies"]) else PACKAGE
        path = top.joinpath(*parts[:count])
        if is_module(path):
            source = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
            return count == len(parts) or bool(re.search(rf"\b{parts[count]}\b", source.read_text("utf-8")))
    return False


def find_missing(text: str, *, page: bool) -> Iterator[str]:
    yield from (found for found in FILE.findall(text) if "NAME" not in found and not (ROOT / found).is_file())
    yield from (found for found in MODULE.findall(text) if found not in LOGGERS and not is_defined(found))
    shorts = SHORT.findall(text) if page else []
    yield from (each for each in shorts if (PACKAGE / each.split("/")[0]).is_dir() and not is_module(PACKAGE / each))


def read_docstrings_and_comments(path: Path) -> str:
    """The docstrings of a source file, and its comments."""
    return "\n".join(map("".join, re.findall(r'"""((?s:.*?))"""|#(.*)', path.read_text("utf-8"))))


IDENTIFIER = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")
EXTERNAL = frozenset(
    """tf debugging assert_less random normal copy deepcopy make_train_function train_step dispatch_for_api Concatenate
    compute_gradients fsGroup functional_1 top_k spectrum Watch step_ md""".split()  # noqa: SIM905
)
"""What docstrings and the architecture page name that is of another package, or an example."""


def find_unknown_identifiers(text: str, known: frozenset[str]) -> set[str]:
    return {found for found in IDENTIFIER.findall(text) if not known.issuperset(found.rstrip(".").split("."))}


def test_identifiers_in_docstrings_and_the_architecture_page_exist() -> None:
    texts = {path: path.read_text("utf-8") for path in SOURCES}
    code = " ".join(re.sub(r'""".*?"""', "", text, flags=re.S) for text in texts.values())
    known = (
        EXTERNAL
        | set(re.findall(r"[A-Za-z_]\w*", code))
        | {part for path in SOURCES for part in path.with_suffix("").parts}
    )
    texts = {path: text for path, text in texts.items() if PACKAGE in path.parents}
    texts[ROOT / "docs/architecture.md"] = (ROOT / "docs/architecture.md").read_text("utf-8")
    unknown = {str(path.relative_to(ROOT)): find_unknown_identifiers(text, known) for path, text in texts.items()}
    assert {path: names for path, names in unknown.items() if names} == {}
    assert find_unknown_identifiers("`Deadlines.nothing_of_that_name`", known)


def test_named_files_and_modules_exist() -> None:
    missing = {
        str(path.relative_to(ROOT)): list(find_missing(read_docstrings_and_comments(path), page=False))
        for path in SOURCES
    }
    missing |= {str(path.relative_to(ROOT)): list(find_missing(path.read_text("utf-8"), page=True)) for path in PAGES}
    assert {path: names for path, names in missing.items() if names} == {}


def test_missing_names_are_found() -> None:
    text = "`plan/paper` whale_nebula.plan.paper.page tests/unit/nothing.py whale_nebula.plan.text.sections `a/b`"
    missing = ["tests/unit/nothing.py", "whale_nebula.plan.paper.page", "plan/paper"]
    assert list(find_missing(text, page=True)) == missing
