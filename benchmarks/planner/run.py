"""All parts of this benchmark, one after the other.

python benchmarks/planner/run.py            # everything
python benchmarks/planner/run.py --quick    # a little of each; writes nothing
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PARTS = ("search.py", "forecast.py", "computing.py", "prediction.py", "grid.py")


def main() -> None:
    """Run each part with the given options."""
    for part in PARTS:
        print(f"== {part}", flush=True)
        subprocess.run([sys.executable, str(Path(__file__).with_name(part)), *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
