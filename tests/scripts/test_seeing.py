"""Displays of a user's script on a terminal, during training and afterwards; Keras's progress bar is unchanged."""

from __future__ import annotations

import json
import os
import textwrap
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import zygote
from tests.unit.report.terminal import Terminal
from whale_nebula.cli.main import main
from whale_nebula.report.report import Report

DEADLINE = 120.0
STEPS, EPOCHS = 4, 2

SCRIPT = """
import keras, numpy as np, sys
import whale_nebula as nb

nb.init(links="100mbit,1ms", show="live", metrics="run.jsonl", tensorboard="logs")
inputs = keras.Input((8,))
with nb.cluster(), nb.pipeline(micro_batch=2):
    with nb.stage(cluster="gpu"):
        hidden = keras.layers.Dense(16)(inputs)
    with nb.stage(cluster="npu"):
        outputs = keras.layers.Dense(1)(hidden)
model = keras.Model(inputs, outputs, name="taught")
model.compile("sgd", "mse")
x = np.ones((32, 8), "float32")
model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=1)
nb.last_report().save("step.json")
nb.last_report().save_trace("trace.json")
print("that was it")
"""


ON_TERMINAL = """
import os, runpy, sys
from whale_nebula.cli.main import main

os.dup2(os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY), 1)
sys.stdout = open(1, "w", closefd=False)
sys.path[0], words = ".", sys.argv[2:]
sys.exit(main(words)) if words else runpy.run_path("train.py", run_name="__main__")
"""


class TerminalRun(NamedTuple):
    """What the script left: a folder, what it wrote to the terminal, and how that looked at the end."""

    folder: Path
    written: str
    shown: list[str]


@pytest.fixture(scope="module")
def terminal_run(tmp_path_factory: pytest.TempPathFactory) -> TerminalRun:
    return run_on_terminal(tmp_path_factory.mktemp("seeing"))


def run_on_terminal(folder: Path, *words: str) -> TerminalRun:
    """Run the script on a terminal of its own, to its end, or what the command line does with `words`."""
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    leader, follower = os.openpty()
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "110", "LINES": "40", "TERM": "xterm"}
    script = zygote.start(("-c", ON_TERMINAL, os.ttyname(follower), *words), env=quiet, cwd=folder)
    said: list[bytes] = []

    def close_after_end() -> None:
        said.extend(script.communicate(timeout=DEADLINE))
        os.close(follower)

    waiting = threading.Thread(target=close_after_end)
    waiting.start()
    written = _all(leader)
    waiting.join()
    assert script.returncode == 0, said
    terminal = Terminal()
    terminal.write(written)
    return TerminalRun(folder, written, terminal.shown)


def _all(leader: int) -> str:
    """What is written until the script has ended, which a pseudo-terminal tells by an error."""
    found, limit = b"", time.monotonic() + DEADLINE
    while time.monotonic() < limit:
        try:
            more = os.read(leader, 65536)
        except OSError:
            more = b""
        if not more:
            break
        found += more
    os.close(leader)
    return found.decode().replace("\r\n", "\n")


def test_keras_progress_bar_is_unchanged(terminal_run: TerminalRun) -> None:
    bars = [line for line in terminal_run.shown if line.startswith(f"{STEPS}/{STEPS} ")]
    assert len(bars) == EPOCHS
    assert [line for line in terminal_run.shown if line.startswith("Epoch")] == ["Epoch 1/2", "Epoch 2/2"]
    # from a bar's first letter to the end of its line nobody else moves the cursor up
    for epoch in terminal_run.written.split("Epoch ")[1:]:
        bar = epoch.split("\n", 1)[1].split(f"{STEPS}/{STEPS}")[0]
        first = bar.index(f"/{STEPS}")
        assert "\x1b[1A" not in bar[first:]


def test_last_step_stays_below_the_output(terminal_run: TerminalRun) -> None:
    (title,) = [number for number, line in enumerate(terminal_run.shown) if line.startswith("taught.train_step, step ")]
    assert terminal_run.shown[title].startswith(f"taught.train_step, step {STEPS * EPOCHS} ─")
    assert terminal_run.shown[title - 1] == "that was it"
    below = " ".join(terminal_run.shown[title:])
    for part in ("loss ", "steps/s", "gpu ", "npu ", "gpu->npu", "npu->gpu"):
        assert part in below
    assert below.endswith(Report.load(terminal_run.folder / "step.json").bottleneck)


def test_metrics_file_has_a_line_per_step(terminal_run: TerminalRun) -> None:
    lines = [json.loads(line) for line in (terminal_run.folder / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS * EPOCHS + 1))
    assert all(line["scalars"].keys() == {"loss"} for line in lines)
    assert [line["predicted"] is None for line in lines[:3]] == [True, True, False]
    assert lines[-1]["run"]["links"]["gpu->npu"]["bytes"] == sum(line["links"]["gpu->npu"]["bytes"] for line in lines)


def test_show_command_prints_saved_reports(terminal_run: TerminalRun, capsys: pytest.CaptureFixture) -> None:
    assert main(["show", "--report", str(terminal_run.folder / "run.jsonl")]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"taught.train_step in local/0: {STEPS * EPOCHS} steps, ")
    assert "  bottleneck: stage " in said
    assert main(["show", "--report", str(terminal_run.folder / "step.json")]) == 0
    assert capsys.readouterr().out == f"{Report.load(terminal_run.folder / 'step.json')}\n"


def test_trace_and_event_files_are_written(terminal_run: TerminalRun) -> None:
    trace = json.loads((terminal_run.folder / "trace.json").read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {"once a step", "stage gpu", "stage npu", "link gpu->npu", "link npu->gpu"}
    assert len(list((terminal_run.folder / "logs").glob("events.out.tfevents.*"))) == 1


@pytest.mark.grid
def test_several_processes_draw_one_table(tmp_path: Path) -> None:
    command = ["run", "--all", "--clusters", "gpu,npu", "train.py"]
    terminal_run = run_on_terminal(tmp_path, *command)
    (title,) = [number for number, line in enumerate(terminal_run.shown) if line.startswith("taught.train_step, step ")]
    assert terminal_run.shown[title].startswith(f"taught.train_step, step {STEPS * EPOCHS} ─")
    above, (_, head, stages, *rows) = terminal_run.shown[:title], terminal_run.shown[title:]
    assert {"[gpu/0] that was it", "[npu/0] that was it"} <= {*above, *rows}
    assert head.startswith("loss ") and "steps/s" in head and stages.split()[0] == "stage"
    words = [row.split() for row in rows]
    assert [first for first, *_ in words[:5]] == ["npu", "gpu", "link", "npu->gpu", "gpu->npu"]
    assert words[1][-2:] == ["previous", "step"]  # the lead is where the loss is; of gpu/0 it knows a step later
