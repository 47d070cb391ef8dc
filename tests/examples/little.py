"""Examples with reduced networks, as tracing takes most of a short run's time."""

import re
from collections.abc import Mapping
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def write_little(name: str, folder: Path, less: Mapping[str, str] | None = None, **sizes: int) -> Path:
    """A copy of an example in a folder, with other numbers for arguments that it gives once: `blocks=1`; and with `less`
    in the place of what it says once, such as `{"6000": "600"}`.
    """
    source = (EXAMPLES / f"{name}.py").read_text("utf-8")
    for written, instead in (less or {}).items():
        if source.count(written) != 1:
            raise ValueError(f"{name}.py says {written} {source.count(written)} times")
        source = source.replace(written, instead)
    for argument, size in sizes.items():
        source, count = re.subn(rf"\b{argument}=\d+", f"{argument}={size}", source)
        if count != 1:
            raise ValueError(f"{name}.py has {argument}= {count} times")
    path = folder / f"{name}.py"
    path.write_text(source, "utf-8")
    return path
