"""`whale-nebula show`: scripts of every kind are planned and not run; what cannot be shown says why.

Scripts run in this process, where TensorFlow is loaded already; one runs as a user would start it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import whale_nebula as nb
from tests.unit.ir.traced import inference
from whale_nebula.cli import arguments
from whale_nebula.cli.show import main
from whale_nebula.cli.show_script import check
from whale_nebula.scopes.observer import observer

Script = Callable[[str], str]

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
def script(tmp_path: Path) -> Iterator[Script]:
    """Writes a script; the run that it opens is closed afterwards."""

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    nb.shutdown()
    yield write
    nb.shutdown()
    assert observer() is None


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("model.fit(x, y, verbose=0)", "small.train_step"),
        ("model.train_on_batch(x, y)", "small.train_step"),
        ("model.evaluate(x, y, verbose=0)", "small.test_step"),
        ("model.predict(x, verbose=0)", "small.predict_step"),
        ("nb.verify(model, x, y)", "small.train_step"),
        ("try:\n    model.fit(x, y, verbose=0)\nexcept Exception:\n    pass", "small.train_step"),
    ],
    ids=["fit", "train_on_batch", "evaluate", "predict", "verify", "caught"],
)
def test_keras_is_stopped_at_its_first_step(
    line: str, name: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([script(MODEL + line + "\nprint('it went on')")]) == arguments.DONE
    told = capsys.readouterr()
    assert told.out.startswith(f"plan of {name}\n")
    assert "schedule" in told.out and "it went on" not in told.out + told.err


def test_nothing_is_trained(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    code = """
before = model.get_weights()
try:
    model.fit(x, y + 1, verbose=0)
finally:
    same = [np.array_equal(a, b) for a, b in zip(before, model.get_weights())]
    print(same, int(model.optimizer.iterations))
"""
    assert main([script(MODEL + code)]) == arguments.DONE
    assert "[True, True, True, True] 0" in capsys.readouterr().err


def test_the_script_gets_its_arguments(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("import sys, os\nprint(sys.argv[1:], sys.path[0] == os.path.dirname(__file__), __name__)\n" + GAN)
    before = list(sys.argv), list(sys.path)
    assert main(["--mermaid", path, "--epochs", "3", "--", "--json"]) == arguments.DONE
    assert "['--epochs', '3', '--json'] True __main__" in capsys.readouterr().err
    assert (sys.argv, sys.path) == before


def test_several_steps_are_answered_with_zeros(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([script(GAN), "--steps", "2", "--json"]) == arguments.DONE
    told = capsys.readouterr()
    assert [plan["name"] for plan in json.loads(told.out)["plans"]] == ["critic", "generator"]
    assert told.err == "critic 0.0\n"


def test_all_steps_until_the_script_ends(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([script(GAN), "--all", "--text"]) == arguments.DONE
    told = capsys.readouterr()
    assert told.out.count("plan of ") == 2
    assert "generator [0.0, 0.0, 0.0, 0.0]" in told.err
    assert told.err.endswith("weight 2.0\n")


def test_reports_of_a_script_that_is_only_shown_print_and_write_nothing(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = MODEL + (
        f"""
model.fit(x, y, verbose=0)
report = nb.last_report()
print(report)
print(report.predicted_seconds, report.run.steps, report.bottleneck, len(report.timeline()))
print([link.bytes for link in report.links.values()], [stage.compute_seconds for stage in report.stages.values()])
report.save({str(tmp_path / "step.json")!r})
report.save_trace({str(tmp_path / "trace.json")!r})
"""
    )
    assert main([script(code), "--all"]) == arguments.DONE
    told = capsys.readouterr()
    assert "the script is only shown, and no step was run" in told.err
    assert "[0, 0] [0.0, 0.0]" in told.err
    assert told.out.startswith("plan of small.train_step")
    assert list(tmp_path.glob("*.json")) == []


def test_an_option_that_is_nearly_ours_is_remarked_on(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([script(GAN), "--htlm", "plan.html", "--epochs", "3"]) == arguments.DONE
    told = capsys.readouterr().err
    assert "--htlm was handed to the script; did you mean --html?" in told
    assert "--epochs" not in told


def test_untrained_weights_are_never_saved(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = MODEL + f"model.fit(x, y, verbose=0)\nmodel.save_weights({str(tmp_path / 'w.weights.h5')!r})\nprint('saved')"
    assert main([script(code), "--all"]) == arguments.DONE
    told = capsys.readouterr().err
    assert "the script was about to save by Model.save_weights, with nothing trained: it was ended here" in told
    assert list(tmp_path.glob("*.h5")) == []
    import keras

    assert keras.Model.save_weights.__module__.startswith("keras.")


@pytest.mark.parametrize("words", [[], ["--all"]], ids=["first", "all"])
def test_callbacks_hear_nothing_and_files_of_an_earlier_training_stay(
    words: list[str], script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.csv"
    log.write_text("epoch,loss\n0,1.5\n")
    code = MODEL + (
        f"""
class Loud(keras.callbacks.Callback):
    def on_train_begin(self, logs=None): print("trains")
    def on_test_begin(self, logs=None): print("tests")
    def on_epoch_end(self, epoch, logs=None): print("an epoch")

found = model.fit(x, y, verbose=0, callbacks=[keras.callbacks.CSVLogger({str(log)!r}), Loud()])
model.evaluate(x, y, verbose=0, callbacks=[Loud()])
print(found.history["loss"])
"""
    )
    assert main([script(code), *words]) == arguments.DONE
    told = capsys.readouterr()
    assert told.out.startswith("plan of small.train_step") and told.err == "[0.0]\n" * len(words)
    assert log.read_text() == "epoch,loss\n0,1.5\n"
    import keras

    assert keras.callbacks.CallbackList.on_train_begin.__module__.startswith("keras.")


def test_a_plan_is_saved_drawn_and_shown_again(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, page = tmp_path / "plan.json", tmp_path / "plan.html"
    assert main([script(GAN), "--save", str(saved), "--html", str(page)]) == arguments.DONE
    told = capsys.readouterr()
    assert told.out == "" and f"wrote {page}" in told.err and f"saved {saved}" in told.err
    assert page.read_text().startswith("<!doctype html>")
    assert main([str(saved)]) == arguments.DONE
    assert capsys.readouterr().out == nb.Plan.load(saved).to_text() + "\n"


# ---------------------------------------------------------------------- what the run is opened with
def test_the_line_of_the_command_goes_before_that_of_the_script(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(MODEL + "nb.init(links='60mbit')\nmodel.fit(x, y, verbose=0)")
    assert main([path, "--links", "1mbit,5ms", "--json"]) == arguments.DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["links"]["gpu->npu"]["rate"], found["links"]["gpu->npu"]["delay"]) == (1e6, 0.005)
    assert found["predicted"]["seconds"] > 0
    nb.shutdown()
    assert main([path, "--json"]) == arguments.DONE
    assert json.loads(capsys.readouterr().out)["links"]["gpu->npu"]["rate"] == 60e6


def test_a_config_of_the_command_goes_before_that_of_the_script(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "clusters.yaml"
    config.write_text(
        "clusters: {gpu: {}, npu: {}}\nlinks: [{between: [gpu, npu], rate: 2mbit}]\n"
        f"metrics: {tmp_path / 'metrics.jsonl'}\n"
    )
    path = script(MODEL + "nb.init(links='60mbit', metrics='never.jsonl')\nmodel.fit(x, y, verbose=0)")
    assert main([path, "--config", str(config), "--json"]) == arguments.DONE
    assert json.loads(capsys.readouterr().out)["links"]["gpu->npu"]["rate"] == 2e6
    assert not (tmp_path / "metrics.jsonl").exists() and not Path("never.jsonl").exists()


# ---------------------------------------------------------------------- what cannot be shown
def test_a_script_that_fails_shows_its_own_traceback(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("def f():\n    raise ValueError('bad luck')\n\nf()")
    assert main([path]) == arguments.FAILED
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if line.startswith("  File ")]
    assert [line.split(",")[0] for line in lines] == [f'  File "{path}"'] * 2
    assert "ValueError: bad luck" in told.err
    assert told.err.endswith(f"whale-nebula: {path} raised ValueError before its first step with scopes\n")
    assert main([path, "--json"]) == arguments.FAILED
    found = json.loads(capsys.readouterr().out)
    assert (found["where"], found["why"]) == (path, "bad luck")


def test_an_error_of_ours_comes_with_the_scripts_lines_alone(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(MODEL.replace("nb.pipeline(2)", "nb.pipeline(2), nb.stage(cluster='x')"))
    assert main([path]) == arguments.FAILED
    told = capsys.readouterr().err
    assert told.count("  File ") == 1 and "NB-101" in told
    assert main([path, "--json"]) == arguments.FAILED
    assert json.loads(capsys.readouterr().out)["code"] == "NB-101"


@pytest.mark.parametrize(("code", "status"), [("x = (", 1), ("import sys; sys.exit('enough')", 1), ("exit(3)", 1)])
def test_scripts_that_end_early(code: str, status: int, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([script(code)]) == status
    assert "before its first step with scopes" in capsys.readouterr().err


def test_an_interrupt_is_one(script: Script) -> None:
    assert main([script("raise KeyboardInterrupt")]) == arguments.INTERRUPTED


@pytest.mark.parametrize(
    "code",
    [
        "print('nothing')",
        "import sys; sys.exit(0)",
        "import whale_nebula as nb\n@nb.function\ndef f(x):\n    return x\nf(1.0)",
    ],
)
def test_a_script_without_a_step_says_so(code: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([script(code)]) == arguments.NOTHING
    assert "made no step with scopes, so there is nothing to show" in capsys.readouterr().err


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


@pytest.mark.parametrize("own", [False, True])
def test_a_model_without_scopes_predicts_but_is_not_trained(
    own: bool, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([script(PLAIN.format(own=own)), "--json"]) == arguments.NOTHING
    told = capsys.readouterr()
    assert "rows 3" in told.err and "trained" not in told.err
    assert json.loads(told.out)["why"] == "plain has no scopes, and was about to be trained"


def test_a_function_without_scopes_is_not_trained_either(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    code = GAN.replace(', nb.cluster(), nb.stage(cluster="gpu")', "")
    assert main([script(code)]) == arguments.NOTHING
    assert "critic has no scopes, and was about to be trained" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "mend"),
    [
        ("page.html", "<!doctype html>\n<style>a { b: c }</style>", "whale-nebula show train.py --html page.html"),
        ("run.jsonl", '{"step": 1}\n{"step": 2}\nno', "whale-nebula show --report run.jsonl"),
        ("book.ipynb", '{"cells": []}', "jupyter nbconvert"),
        ("notes.txt", "some words", "whale-nebula show train.py"),
    ],
)
def test_what_is_no_script_is_not_run(
    name: str, text: str, mend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert main([name]) == arguments.NO_DATA
    told = capsys.readouterr().err
    assert f"{name} is no script: it holds no Python" in told and mend in told
    assert "Traceback" not in told


@pytest.mark.parametrize("name", ["train", "train.py", "train.pyw"])
def test_a_script_may_have_any_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("x = 1\n")
    check(str(path))


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
def test_files_that_are_wrong(
    words: list[str], status: int, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    path = script(GAN)
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
        ["train.py", "--steps", "2", "--all"],
        ["train.py", "--html"],
        ["--report", "a", "train.py"],
    ],
)
def test_command_lines_that_are_wrong(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == arguments.USAGE


def test_a_program_is_shown_as_a_pass_leaves_it(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(MODEL + "model.fit(x, y)\n")
    assert main([path, "--after", "fold"]) == arguments.DONE
    said = capsys.readouterr().out
    assert said.startswith("== fold\n") and "MatMul: rows(0)" in said
    with pytest.raises(SystemExit) as ended:
        main([path, "--after", "fuse"])
    assert ended.value.code == arguments.USAGE
    assert "no pass is called 'fuse'; choose one of 'capture'" in capsys.readouterr().err


def test_as_a_user_starts_it(tmp_path: Path) -> None:
    """In a process of its own; what a process that the script starts prints does not come between, either."""
    path = tmp_path / "train.py"
    path.write_text("import os\nos.system('echo from below')\n" + MODEL + "model.fit(x, y)\n")
    done = subprocess.run(
        [sys.executable, "-m", "whale_nebula.cli.main", "show", str(path), "--json"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0
    assert json.loads(done.stdout)["name"] == "small.train_step"
    assert "from below" in done.stderr


def test_a_saved_plan_is_shown_without_tensorflow(tmp_path: Path) -> None:
    inference().save(tmp_path / "plan.json")
    code = (
        "import sys; from whale_nebula.cli.main import main\n"
        "codes = [main(['show', 'plan.json', *how]) for how in (['--text'], ['--json'], ['--html', 'p.html'])]\n"
        "sys.exit(any(codes) or 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan of predict\n")
