"""The cost of starting: the import relative to TensorFlow's own, and the commands that need no TensorFlow.

    python benchmarks/start/run.py            # everything; writes result.json
    python benchmarks/start/run.py --quick    # a few, to see that it runs; writes nothing

Every start is a new process. Imports are timed inside it, after TensorFlow and Keras are loaded, as the first import
pays for common dependencies. Commands are timed as a whole, from outside.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, parser, verdict, write

IMPORT = "import time, tensorflow, keras; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
IMPORTS = {
    "import whale_nebula": ("import whale_nebula", 100.0),
    "with the first use of nb.init, nb.stage and nb.function": (
        "import whale_nebula as nb; nb.init, nb.stage, nb.function", None,
    ),
}  # fmt: skip
COMMANDS = (("--help",), ("show", "--help"), ("doctor",), ("certs", "--help"))
TIMES, COMMAND_BAR = 11, 1000.0


def imports(times: int) -> list[dict[str, Any]]:
    """Milliseconds beyond TensorFlow."""
    return [
        _row(what, [1e3 * _time_import(IMPORT.format(code)) for _ in range(times)], bar)
        for what, (code, bar) in IMPORTS.items()
    ]


def commands(times: int) -> list[dict[str, Any]]:
    """Milliseconds of a whole command."""
    return [
        _row(f"whale-nebula {' '.join(c)}", [1e3 * _time_command(c) for _ in range(times)], COMMAND_BAR)
        for c in COMMANDS
    ]


def _row(what: str, taken: list[float], bar: float | None) -> dict[str, Any]:
    middle = statistics.median(taken)
    return {
        "what": what,
        "ms": round(middle, 1),
        "worst_ms": round(max(taken), 1),
        "bar_ms": bar or "",
        "verdict": verdict(middle, bar) if bar else "",
    }


def _time_import(code: str) -> float:
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120, env=quiet
    )
    return float(done.stdout.split()[-1])


def _time_command(arguments: tuple[str, ...]) -> float:
    command = [str(Path(sys.executable).with_name("whale-nebula")), *arguments]
    start = time.perf_counter()
    subprocess.run(command, check=False, capture_output=True, timeout=60)
    return time.perf_counter() - start


def main() -> int:
    """Measure, print and write the result."""
    quick = parser(__doc__, "two starts each; writes nothing").parse_args().quick
    times = 2 if quick else TIMES
    rows = [*imports(times), *commands(times)]
    for row in rows:
        print(row)
    if not quick:
        keys = tuple(rows[0])
        write(
            __file__,
            {"machine": describe_machine(), "rows": rows},
            [keys, *([row[key] for key in keys] for row in rows)],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
