"""`whale-nebula show`: scripts of every kind are planned and not run; failures tell why.

Scripts run in this process, where TensorFlow is loaded; one runs as a user would start it.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import whale_nebula as nb
from tests.processes import zygote
from tests.unit.report.sample_reports import make_full_report
from whale_nebula.cli import arguments
from whale_nebula.cli.show import _OPTIONS, main
from whale_nebula.cli.show_script import check_script
from whale_nebula.passes.pipeline import PIPELINE
from whale_nebula.report.records import RunTotals
from whale_nebula.report.saved import json_line
from whale_nebula.scopes.observer import observer

Capture = pytest.CaptureFixture[str]


class Output(NamedTuple):
    """The exit status and output of the command."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Show = Callable[..., Output]

MODEL = """
import numpy as np, keras, sys
import whale_nebula as nb
x, y = np.zeros((6, 4), "float32"), np.zeros((6, 1), "float32")
inputs = keras.Input((4,))
with nb.cluster(), nb.pipeline(2):
    with nb.stage(cluster="gpu"):
        hidden = keras.layers.Dense(3)(inputs)
    with nb.stage(cluster="npu"):
        outputs = keras.layers.Dense(1)(hidden)
model = keras.Model(inputs, outputs, name="small")
model.compile("sgd", "mse")
"""

GAN = """
import tensorflow as tf
import whale_nebula as nb

weight = tf.Variable(2.0)

@nb.function
def critic(x):
    with tf.GradientTape() as tape, nb.cluster(), nb.stage(cluster="gpu"):
        loss = tf.reduce_mean(x * weight)
    weight.assign_sub(tape.gradient(loss, weight))
    return loss

@nb.function
def generator(x, *, scale):
    with nb.cluster(), nb.stage(cluster="npu"):
        return {"sum": tf.reduce_sum(x) * scale, "rows": x + 1.0}

for _ in range(2):
    print("critic", float(critic(tf.ones([4]))))
    print("generator", generator(tf.ones([4]), scale=3.0)["rows"].numpy().tolist())
print("weight", float(weight))
"""


@pytest.fixture
def show(tmp_path: Path, capsys: Capture) -> Iterator[Show]:
    """A function that writes a script and shows it; the run is closed afterwards."""
    path = tmp_path / "train.py"

    def call(text: str, *words: str) -> Output:
        nb.shutdown()
        path.write_text(textwrap.dedent(text))
        return Output(main([str(path), *words]), *capsys.readouterr())

    yield call
    nb.shutdown()
    assert observer() is None


FIT = MODEL + "model.fit(x, y, verbose=0)"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("model.fit(x, y, verbose=0)", "small.train_step"),
        pytest.param("model.train_on_batch(x, y)", "small.train_step", marks=pytest.mark.grid),
        pytest.param("model.evaluate(x, y, verbose=0)", "small.test_step", marks=pytest.mark.grid),
        ("model.predict(x, verbose=0)", "small.predict_step"),
        ("nb.verify(model, x, y)", "small.train_step"),
        ("try:\n    model.fit(x, y, verbose=0)\nexcept Exception:\n    pass", "small.train_step"),
    ],
    ids=["fit", "train_on_batch", "evaluate", "predict", "verify", "caught"],
)
def test_script_is_stopped_at_its_first_keras_step(line: str, name: str, show: Show) -> None:
    output = show(MODEL + line + "\nprint('it went on')")
    assert output.status == arguments.DONE and output.out.startswith(f"plan of {name}\n")
    assert "schedule" in output.out and "it went on" not in output.out + output.err


def test_show_does_not_change_weights(show: Show) -> None:
    code = """
before = model.get_weights()
try:
    model.fit(x, y + 1, verbose=0)
finally:
    same = [np.array_equal(a, b) for a, b in zip(before, model.get_weights())]
    print(same, int(model.optimizer.iterations))
"""
    assert "[True, True, True, True] 0" in show(MODEL + code).err


def test_script_receives_its_arguments(show: Show) -> None:
    code = "import sys, os\nprint(sys.argv[1:], sys.path[0] == os.path.dirname(__file__), __name__)\n" + GAN
    before = list(sys.argv), list(sys.path)
    output = show(code, "--mermaid", "--epochs", "3", "--htlm", "plan.html", "--", "--json")
    assert "['--epochs', '3', '--htlm', 'plan.html', '--json'] True __main__" in output.err
    notes = [line for line in output.err.splitlines() if line.startswith("note:")]
    assert len(notes) == 1 and "--htlm is passed to the script: did you mean --html?" in notes[0]
    assert (sys.argv, sys.path) == before


def test_shown_steps_return_zeros(show: Show) -> None:
    output = show(GAN, "--steps", "2", "--json")
    assert [plan["name"] for plan in output.document["plans"]] == ["critic", "generator"]
    assert output.err == "critic 0.0\n"
    output = show(GAN, "--all", "--text")
    assert output.out.count("plan of ") == 2
    assert "generator [0.0, 0.0, 0.0, 0.0]" in output.err and output.err.endswith("weight 2.0\n")


def test_reports_of_a_shown_script_are_empty_and_not_saved(show: Show, tmp_path: Path) -> None:
    code = f"""
report = nb.last_report()
print(report)
print(report.predicted_seconds, report.run.steps, report.bottleneck, len(report.timeline()))
print([link.bytes for link in report.links.values()], [stage.compute_seconds for stage in report.stages.values()])
report.save({str(tmp_path / "step.json")!r})
report.save_trace({str(tmp_path / "trace.json")!r})
"""
    output = show(FIT + code, "--all")
    assert output.status == arguments.DONE and output.out.startswith("plan of small.train_step")
    assert "the script is only shown, and no step was run" in output.err and "[0, 0] [0.0, 0.0]" in output.err
    assert list(tmp_path.glob("*.json")) == []


def test_saving_untrained_weights_stops_the_script(show: Show, tmp_path: Path) -> None:
    output = show(FIT + f"\nmodel.save_weights({str(tmp_path / 'w.weights.h5')!r})\nprint('saved')", "--all")
    message = "the script was about to save with Model.save_weights, although nothing is trained: stopped here"
    assert output.status == arguments.DONE and message in output.err
    assert list(tmp_path.glob("*.h5")) == []
    import keras

    assert keras.Model.save_weights.__module__.startswith("keras.")


@pytest.mark.parametrize("words", [pytest.param([], marks=pytest.mark.grid), ["--all"]], ids=["first", "all"])
def test_callbacks_are_not_called_and_csv_log_is_kept(words: list[str], show: Show, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("epoch,loss\n0,1.5\n")
    code = f"""
class Loud(keras.callbacks.Callback):
    def on_train_begin(self, logs=None): print("trains")
    def on_test_begin(self, logs=None): print("tests")
    def on_epoch_end(self, epoch, logs=None): print("an epoch")

found = model.fit(x, y, verbose=0, callbacks=[keras.callbacks.CSVLogger({str(log)!r}), Loud()])
model.evaluate(x, y, verbose=0, callbacks=[Loud()])
print(found.history["loss"])
"""
    output = show(MODEL + code, *words)
    assert output.out.startswith("plan of small.train_step") and output.err == "[0.0]\n" * len(words)
    assert log.read_text() == "epoch,loss\n0,1.5\n"
    import keras

    assert keras.callbacks.CallbackList.on_train_begin.__module__.startswith("keras.")


def test_plan_is_saved_drawn_and_shown_again(show: Show, tmp_path: Path, capsys: Capture) -> None:
    saved, page = tmp_path / "plan.json", tmp_path / "plan.html"
    output = show(GAN, "--save", str(saved), "--html", str(page))
    assert output.out == "" and f"wrote {page}" in output.err and f"saved {saved}" in output.err
    assert page.read_text().startswith("<!doctype html>")
    assert main([str(saved)]) == arguments.DONE
    assert capsys.readouterr().out == nb.Plan.load(saved).to_text() + "\n"


def test_links_and_config_options_override_the_script(show: Show, tmp_path: Path) -> None:
    code, metrics = MODEL + "nb.init(links='60mbit', metrics={!r})\nmodel.fit(x, y, verbose=0)", tmp_path / "m.jsonl"
    config = tmp_path / "clusters.yaml"
    config.write_text(
        f"clusters: {{gpu: {{}}, npu: {{}}}}\nlinks: [{{between: [gpu, npu], rate: 2mbit}}]\nmetrics: {metrics}\n"
    )
    document = show(code.format(None), "--links", "1mbit,5ms", "--json").document
    assert (document["links"]["gpu->npu"]["rate"], document["links"]["gpu->npu"]["delay"]) == (1e6, 0.005)
    assert document["predicted"]["seconds"] > 0
    assert show(code.format(None), "--json").document["links"]["gpu->npu"]["rate"] == 60e6
    never = str(tmp_path / "never.jsonl")
    assert show(code.format(never), "--config", str(config), "--json").document["links"]["gpu->npu"]["rate"] == 2e6
    assert list(tmp_path.glob("*.jsonl")) == []


# ---------------------------------------------------------------------- what cannot be shown
def test_failing_script_shows_its_traceback(show: Show, tmp_path: Path) -> None:
    code, path = "def f():\n    raise ValueError('bad luck')\n\nf()", tmp_path / "train.py"
    output = show(code)
    lines = [line for line in output.err.splitlines() if line.startswith("  File ")]
    assert [line.split(",")[0] for line in lines] == [f'  File "{path}"'] * 2
    assert output.status == arguments.FAILED and "ValueError: bad luck" in output.err
    assert output.err.endswith(f"whale-nebula: {path} raised ValueError before its first step with scopes\n")
    document = show(code, "--json").document
    assert (document["where"], document["why"]) == (str(path), "bad luck")


def test_library_error_shows_only_script_lines(show: Show) -> None:
    code = MODEL.replace("nb.pipeline(2)", "nb.pipeline(2), nb.stage(cluster='x')")
    output = show(code)
    assert output.status == arguments.FAILED and output.err.count("  File ") == 1 and "NB-101" in output.err
    assert show(code, "--json").document["code"] == "NB-101"


EARLY, NOTHING = "before its first step with scopes", "ran no step with scopes, so there is nothing to show"
UNSCOPED = GAN.replace(', nb.cluster(), nb.stage(cluster="gpu")', "")


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("x = (", 1, EARLY),
        ("import sys; sys.exit('enough')", 1, EARLY),
        ("exit(3)", 1, EARLY),
        ("raise KeyboardInterrupt", arguments.INTERRUPTED, ""),
        ("print('nothing')", arguments.NOTHING, NOTHING),
        ("import sys; sys.exit(0)", arguments.NOTHING, NOTHING),
        ("import whale_nebula as nb\n@nb.function\ndef f(x):\n    return x\nf(1.0)", arguments.NOTHING, NOTHING),
        (UNSCOPED, arguments.NOTHING, "critic has no scopes and was about to be trained"),
    ],
)
def test_script_without_steps_is_reported(code: str, status: int, message: str, show: Show) -> None:
    output = show(code)
    assert output.status == status and message in output.err


PLAIN = """
import keras, numpy as np
import whale_nebula as nb
class Own(keras.Model):
    def __init__(self):
        super().__init__(name="plain")
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x)
plain = Own() if {own} else keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="plain")
plain.compile("sgd", "mse")
print("rows", len(plain.predict(np.zeros((3, 4)), verbose=0)))
plain.fit(np.zeros((6, 4)), np.zeros((6, 1)), epochs=1000, verbose=0)
print("trained")
"""


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.grid), True])
def test_model_without_scopes_predicts_but_is_not_trained(own: bool, show: Show) -> None:
    output = show(PLAIN.format(own=own), "--json")
    assert output.status == arguments.NOTHING and "rows 3" in output.err and "trained" not in output.err
    assert output.document["why"] == "plain has no scopes and was about to be trained"


@pytest.mark.parametrize(
    ("name", "text", "mend"),
    [
        ("page.html", "<!doctype html>\n<style>a { b: c }</style>", "whale-nebula show train.py --html page.html"),
        ("run.jsonl", '{"step": 1}\n{"step": 2}\nno', "whale-nebula show --report run.jsonl"),
        ("book.ipynb", '{"cells": []}', "jupyter nbconvert"),
        ("notes.txt", "some words", "whale-nebula show train.py"),
    ],
)
def test_file_that_is_no_script_is_refused(
    name: str, text: str, mend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert main([name]) == arguments.NO_DATA
    err = capsys.readouterr().err
    assert f"{name} is not a script: it contains no Python code" in err and mend in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["train", "train.py", "train.pyw"])
def test_script_name_may_have_any_suffix(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("x = 1\n")
    check_script(str(path))


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["nothing.py"], arguments.NO_FILE),
        (["--report", "nothing.jsonl"], arguments.NO_FILE),
        (["{script}", "--config", "nothing.yaml"], arguments.CONFIG),
        (["{script}", "--links", "10mbut"], arguments.CONFIG),
        (["{other}"], arguments.NO_DATA),
        (["{script}", "--html", "/no/such/folder/plan.html"], arguments.NO_DATA),
    ],
)
def test_missing_or_invalid_file_exit_status(
    words: list[str], status: int, show: Show, tmp_path: Path, capsys: Capture
) -> None:
    other, path = tmp_path / "other.json", tmp_path / "train.py"
    other.write_text("{}")
    path.write_text(GAN)
    assert main([word.format(script=path, other=other) for word in words]) == status
    assert "mend:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--jsn", "train.py"],
        ["train.py", "--json", "--mermaid"],
        ["train.py", "--steps", "none"],
        ["train.py", "--steps", "0"],
        ["train.py", "--steps", "²"],
        ["train.py", "--steps", "2", "--all"],
        ["train.py", "--html"],
        ["--report", "a", "train.py"],
    ],
)
def test_invalid_show_command_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == arguments.USAGE


def test_after_option_shows_program_after_a_pass(show: Show) -> None:
    output = show(FIT, "--after", "fold")
    assert output.out.startswith("== fold\n") and "MatMul: rows(0)" in output.out
    unknown = show(FIT, "--after", "fuse")
    assert unknown.status == arguments.USAGE and "no pass is called 'fuse'" in unknown.err


def test_help_of_the_after_option_lists_all_passes() -> None:
    assert _OPTIONS["--after"][1].endswith(f": capture, {', '.join(each.name for each in PIPELINE)}")


def test_show_prints_only_json_in_its_own_process(tmp_path: Path) -> None:
    """Output of processes that the script starts goes to stderr, too."""
    path = tmp_path / "train.py"
    path.write_text("import os\nos.system('echo from below')\n" + MODEL + "model.fit(x, y)\n")
    result = zygote.run("-m", "whale_nebula.cli.main", "show", str(path), "--json", cwd=tmp_path)
    assert result.returncode == 0
    assert json.loads(result.stdout)["name"] == "small.train_step"
    assert "from below" in result.stderr


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json_line(replace(make_full_report(), step=n, run=RunTotals(n))) + "\n" for n in (1, 2, 3)))
    return path


def test_report_option_shows_saved_reports(metrics: Path, tmp_path: Path, capsys: Capture) -> None:
    make_full_report().save(tmp_path / "step.json")
    assert main(["--report", str(tmp_path / "step.json")]) == arguments.DONE
    assert capsys.readouterr().out == f"{make_full_report()}\n"
    assert main(["--report", str(metrics)]) == arguments.DONE
    out = capsys.readouterr().out
    assert out.startswith("fit in gpu/0: 3 steps, ")
    assert "last step:\nstep 3 of fit in gpu/0: " in out
    assert main(["--report", str(metrics), "--json"]) == arguments.DONE
    assert json.loads(capsys.readouterr().out)["programs"][0]["steps"] == 3


def test_invalid_report_file_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("{}")
    assert main(["--report", str(tmp_path / "file")]) == arguments.NO_DATA
    assert "contains no report" in capsys.readouterr().err
    assert main(["--report", "nothing.jsonl"]) == arguments.NO_FILE
    err = capsys.readouterr().err
    assert "file 'nothing.jsonl' does not exist" in err and "show --report FILE reads a file of a run" in err
