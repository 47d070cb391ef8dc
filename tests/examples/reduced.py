"""Examples with reduced networks, as tracing takes most of a short run's time; and their errors."""

import re
from collections.abc import Sequence
from pathlib import Path

from tests.processes import zygote

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def write_reduced_example(name: str, folder: Path, **sizes: int) -> Path:
    """A copy of an example in a folder, with other numbers for arguments that it gives once: `blocks=1`."""
    source = (EXAMPLES / f"{name}.py").read_text("utf-8")
    for argument, size in sizes.items():
        source, count = re.subn(rf"\b{argument}=\d+", f"{argument}={size}", source)
        if count != 1:
            raise ValueError(f"{name}.py has {argument}= {count} times")
    path = folder / f"{name}.py"
    path.write_text(source, "utf-8")
    return path


def assert_option_error(name: str, words: Sequence[str], message: str, folder: Path) -> None:
    """An example reports its options with this message, and without a traceback of its own."""
    result = zygote.run(str(EXAMPLES / f"{name}.py"), *words, cwd=folder)
    assert result.returncode == 2 and f"{name}.py: error: {message}" in result.stderr
    assert f'{name}.py", line' not in result.stderr
