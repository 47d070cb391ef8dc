"""Comparison with golden files, and their regeneration by `pytest --regenerate tests/golden`."""

import difflib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LONGEST_DIFFERENCE = 60


def check_golden(request: pytest.FixtureRequest, name: str, text: str) -> None:
    """Compare a text with the golden file of that name; with `--regenerate`, write the file instead."""
    path, text = FOLDER / name, text.rstrip("\n") + "\n"
    if request.config.getoption("--regenerate"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return
    golden = path.read_text("utf-8") if path.exists() else ""
    if text != golden:
        lines = difflib.unified_diff(golden.splitlines(), text.splitlines(), "golden", "now", lineterm="", n=1)
        shown = "\n".join(list(lines)[:LONGEST_DIFFERENCE])
        message = f"{name} is out of date; if that is meant: pytest --regenerate tests/golden\n{shown}"
        pytest.fail(message, pytrace=False)
