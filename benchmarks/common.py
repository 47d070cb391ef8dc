"""Common parts of benchmarks: medians, the machine, and writing results and plots beside the script."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

OPENS, CLOSES = "<!-- measured: {}.py writes this -->", "<!-- /measured -->"
PACKAGES = ("tensorflow", "keras", "numpy", "whale-nebula")


def parser(about: str | None, quick_help: str = "few, short measurements; writes nothing") -> argparse.ArgumentParser:
    """A parser for a benchmark, with the option `--quick`."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help=quick_help)
    return made


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def describe_machine() -> dict[str, Any]:
    """A description of the machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def write(script: str, result: dict[str, Any], table: Sequence[Sequence[object]], part: str = "") -> None:
    """Write result.json beside the script, and a table (its first row is the head) into the README there; a `part` of a
    benchmark has its own file and place.
    """
    path, opens = Path(script).with_name(f"{part or 'result'}.json"), OPENS.format(part or "run")
    path.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    readme = path.with_name("README.md")
    before, _, rest = readme.read_text("utf-8").partition(opens)
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in table]
    lines.insert(1, "|---" * len(table[0]) + "|")
    about = result["machine"]
    said = f"{about['date']}, {about['processor']}, {about['cores']} cores, TensorFlow {about['tensorflow']}"
    text = "\n".join([opens, *lines, "", said, CLOSES])
    readme.write_text(before + text + rest.partition(CLOSES)[2], "utf-8")
    print(f"wrote {path} and the table in {readme}")


@contextlib.contextmanager
def picture(path: Path, columns: int = 1, size: tuple[float, float] = (5.5, 4.0)) -> Iterator[list[Any]]:
    """The axes of a row of plots, which are written to a path; as SVG equal data give equal files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = path.stem
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, columns, figsize=(size[0] * columns, size[1]), layout="constrained", squeeze=False
    )
    yield list(axes[0])
    for each in axes[0]:
        if each.get_legend_handles_labels()[0]:
            each.legend(frameon=False, fontsize=8)
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Date": None})
    pyplot.close(figure)


def read_finished_runs(path: Path) -> list[dict[str, Any]]:
    """The finished runs: a line of JSON each."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def read_text(sentences: int, words: int, length: int) -> tuple[Any, Any]:
    """A text of this number of sentences as rows of tokens of a vocabulary, and the next token of each."""
    from whale_nebula.models import text

    lines = text.monolingual("en", sentences)
    ids = text.Tokenizer(text.learn_vocabulary(lines, words)).encode(lines).flat_values.numpy()
    count = (len(ids) - 1) // length
    return ids[: count * length].reshape(count, length), ids[1 : count * length + 1].reshape(count, length)


def verdict(value: float, bar: float, *, least: bool = False) -> str:
    """'reached' or 'missed', against a bar that must not be exceeded (or, with `least`, must be)."""
    return "reached" if (value >= bar if least else value <= bar) else "missed"


def install_torch(*more: str) -> Path:
    """Install PyTorch, and more packages, in the separate environment build/torch; returns its Python."""
    folder = Path(__file__).resolve().parents[1] / "build" / "torch"
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing PyTorch in {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "torch==2.13.*", "numpy", *more]
    subprocess.run(command, check=True, capture_output=True)
    return python
