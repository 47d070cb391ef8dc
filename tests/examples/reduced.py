"""Examples with reduced networks, as tracing takes most of a short run's time."""

import re
from pathlib import Path

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
