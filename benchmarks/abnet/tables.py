"""The table, the bootstraps and the plots of the results so far."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import picture
from rows import ROWS

Found = dict[str, Any]
DIRECTIONS = ("source->target", "target->source")
BLEU_TARGET = 25.0
"""The BLEU of validation that times are told to: most rows come to it, and it is well above what a start gives."""


def list_runs(name: str, runs: Sequence[Found]) -> list[Found]:
    """The runs of a row, seed by seed."""
    return sorted((each for each in runs if each["row"] == name), key=lambda each: each["seed"])


def list_losses(name: str, runs: Sequence[Found]) -> list[float]:
    """The difference in BLEU to the same seed without a codec, seed by seed."""
    other = {each["seed"]: each["bleu"] for each in list_runs(ROWS[name].beside, runs)}
    return [each["bleu"] - other[each["seed"]] for each in list_runs(name, runs) if each["seed"] in other]


def table(runs: Sequence[Found], times: Found) -> list[list[object]]:
    """The table's head and lines."""
    head: list[object] = ["what crosses as", "BLEU, seed by seed", "beside nothing", "kB a step there", "and back"]
    head += ["fewer bytes in all", "s a step", "faster", "of the prediction", f"time to a BLEU of {BLEU_TARGET:g}"]
    return [[*head, "the paper: BLEU, a step"], *(line(name, runs, times) for name in ROWS if list_runs(name, runs))]


def line(name: str, runs: Sequence[Found], times: Found) -> list[object]:
    """A row of the table."""
    own, deltas = list_runs(name, runs), list_losses(name, runs)
    cells: list[object] = [ROWS[name].said, " ".join(f"{each['bleu']:.2f}" for each in own)]
    cells += [f"{statistics.mean(deltas):+.2f}" if deltas and name != ROWS[name].beside else ""]
    there, back = (count_sent_bytes(own, way) for way in DIRECTIONS)
    raw = sum(count_sent_bytes(list_runs(ROWS[name].beside, runs), way) for way in DIRECTIONS)
    cells += [f"{there:.0f}", f"{back:.0f}", f"{raw / (there + back):.1f}"]
    if name not in times or "none" not in times:
        return [*cells, "", "", "", "", ROWS[name].paper]
    step, plain = times[name]["step"], times["none"]["step"]
    taken, longest = (steps_to(BLEU_TARGET, list_runs(row, runs)) for row in (name, "none"))
    sooner = f"{longest * plain / (taken * step):.1f} x sooner" if taken and longest else "not reached"
    cells += [f"{step:.2f}", f"{plain / step:.1f}", f"{times[name]['predicted'] / step:.2f}", sooner]
    return [*cells, ROWS[name].paper]


def count_sent_bytes(runs: Sequence[Found], way: str) -> float:
    """Thousands of bytes that a step sends one way, averaged over the runs that counted them."""
    counted = [each["bytes"][way] / each["steps"] / 1e3 for each in runs if "bytes" in each]
    return statistics.mean(counted) if counted else math.nan


def steps_to(bleu: float, runs: Sequence[Found]) -> float | None:
    """The steps until validation reaches this BLEU, averaged over seeds; None if one did not."""
    found = [first_above(bleu, each["curve"]) for each in runs]
    known = [steps for steps in found if steps is not None]
    return statistics.mean(known) if known and len(known) == len(found) else None


def first_above(bleu: float, curve: Sequence[Sequence[float]]) -> float | None:
    """The position at which a curve crosses a value, by linear interpolation."""
    before = (0.0, 0.0)
    for steps, _, value in curve:
        if value >= bleu:
            return before[0] + (steps - before[0]) * (bleu - before[1]) / (value - before[1])
        before = (steps, value)
    return None


def differences(asked: argparse.Namespace, runs: Sequence[Found]) -> list[str]:
    """The bootstrap over sentences of each row and seed against the same seed without a codec."""
    from whale_nebula.models import text

    source, target = asked.languages
    meant = text.read_folder(asked.text, asked.test, source=source, target=target, sides=["target"])
    said, folder = [], asked.kept / "found"
    for each in runs:
        if each["row"] not in ROWS:  # a codec that was removed
            continue
        other = ROWS[each["row"]].beside
        files = [folder / f"{name}-{each['seed']}.txt" for name in (other, each["row"])]
        if each["row"] == other or not all(file.exists() for file in files):
            continue
        found = [file.read_text("utf-8").split("\n")[:-1] for file in files]
        said.append(f"{each['row']}, seed {each['seed']}: {text.paired_bootstrap(*found, list(meant.target))}")
    return said


def plot(runs: Sequence[Found], times: Found, folder: Path) -> None:
    """Plot BLEU by compression ratio, and validation BLEU by hours on the line."""
    with picture(folder / "bleu.svg", columns=2, size=(6, 4.5)) as (left, right):
        by_bytes(left, runs)
        by_time(right, runs, times)


def by_bytes(axes: Any, runs: Sequence[Found]) -> None:
    """Plot a point for each row, with the range of its seeds."""
    raw = sum(count_sent_bytes(list_runs("none", runs), way) for way in DIRECTIONS)
    for name in ROWS:
        own = list_runs(name, runs)
        if not own or (ROWS[name].model, ROWS[name].beside) != ("causal", "none"):
            continue
        fewer, scores = raw / sum(count_sent_bytes(own, way) for way in DIRECTIONS), [each["bleu"] for each in own]
        color = "tab:gray" if name == "none" else "tab:orange" if "svd" in name or name == "fp16" else "tab:blue"
        axes.plot([fewer] * 2, [min(scores), max(scores)], color=color)
        axes.plot(fewer, statistics.mean(scores), "o", color=color)
        axes.annotate(name, (fewer, statistics.mean(scores)), (5, 4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", xlim=(0.8, 80), xlabel="times fewer bytes, both ways together", ylabel="BLEU of the test")
    axes.set_title("grey: nothing, orange: the paper's, blue: ours", fontsize=9)


def by_time(axes: Any, runs: Sequence[Found], times: Found) -> None:
    """Plot the curves of the first seeds over the slow line."""
    for name in (name for name in ROWS if name in times and list_runs(name, runs)):
        curve = list_runs(name, runs)[0]["curve"]
        minutes = [steps * times[name]["step"] / 60 for steps, *_ in curve]
        axes.plot(minutes, [each[2] for each in curve], marker=".", label=f"{name}", linewidth=1)
    axes.set(xscale="log", xlabel="minutes over the slow line", ylabel="BLEU of validation (greedy)")
