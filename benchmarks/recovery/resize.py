"""What a change of the number of workers costs, part by part: npu 2 -> 1 -> 2 workers, under `nb.auto_parallel`.

    python benchmarks/recovery/resize.py            # writes resize.json
    python benchmarks/recovery/resize.py --quick    # the same; writes nothing

The parts are seconds of a core of one worker, which other processes of the machine hardly change, and wall-clock
seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, parser, write

from whale_nebula.launch.placement import free_port

HERE, DEADLINE = Path(__file__).parent, 2400.0


def measure() -> list[dict[str, Any]]:
    """The parts of each start of each worker."""
    with tempfile.TemporaryDirectory() as folder:
        gpu, *npu = (f"127.0.0.1:{free_port()}" for _ in range(3))
        config = {"clusters": {"gpu": {"workers": [gpu]}, "npu": {"workers": npu}}, "seed": 5}
        path, control = Path(folder) / "clusters.yaml", f"{folder}/run.sock"
        path.write_text(json.dumps({**config, "elastic": {"npu": {"min": 1}}, "patience": "600s"}), "utf-8")
        command = ["-m", "whale_nebula.cli.main", "run", "--all", "--config", str(path), "--control", control]
        script = [str(HERE / "resize_worker.py"), f"{folder}/saved", control]
        done = subprocess.run(
            [sys.executable, *command, *script], env={**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stdout[-4000:])
    lines = [line[line.index("PARTS ") :].split(maxsplit=3) for line in done.stdout.splitlines() if "PARTS " in line]
    return [{"worker": worker, "epoch": int(epoch), "parts": json.loads(text)} for _, worker, epoch, text in lines]


def main() -> None:
    """Measure, and write medians over the workers of the starts after a change."""
    quick = parser(__doc__).parse_args().quick
    starts = measure()
    later = [each["parts"] for each in starts if each["epoch"]]
    rows = [["part of a start", "seconds of a core", "seconds"]]
    for name in later[0]:
        wall, used = (statistics.median(parts[name][place] for parts in later if name in parts) for place in (0, 1))
        rows.append([name, f"{used:.2f}", f"{wall:.2f}"])
    for row in rows:
        print(*row, sep="\t")
    if not quick:
        write(__file__, {"machine": describe_machine(), "starts": starts}, rows, "resize")


if __name__ == "__main__":
    main()
