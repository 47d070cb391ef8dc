"""Documentation hook that replaces a line `<!-- table: replica -->` by the table that benchmarks/replica measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
_HERE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
_MEASURED = re.compile(r"<!-- measured.*?-->\n(.*?)<!-- /measured -->", re.DOTALL)


def find_tables(text: str) -> list[str]:
    """The benchmarks whose tables a page includes.

    >>> find_tables("before\\n<!-- table: replica -->\\nafter")
    ['replica']
    """
    return _HERE.findall(text)


def read_measured(name: str) -> str:
    """The measured part of a benchmark's README: the table, and the machine."""
    found = _MEASURED.search((BENCHMARKS / name / "README.md").read_text())
    if found is None:
        raise SystemExit(f"benchmarks/{name}/README.md has no measured table")
    return found[1].strip()


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called for each page."""
    return _HERE.sub(lambda match: read_measured(match[1]), markdown)
