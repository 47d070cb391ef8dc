"""All parts of this benchmark, one after the other: see the README."""

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    for name in ("saving", "kills", "day"):
        subprocess.run([sys.executable, str(Path(__file__).with_name(f"{name}.py"))], check=True)
