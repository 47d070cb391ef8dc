"""`whale-nebula plan`, and the outputs of the planner's plans: text, JSON, files, pages."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.unit.ir.test_plan_text import Page
from whale_nebula.cli import arguments, plan, show
from whale_nebula.errors import StateError
from whale_nebula.scopes.auto import Limits, get_current_limits, use_base_limits
from whale_nebula.site import Site

CONFIG = """
clusters:
  gpu: {flops: 1G, memory: 1GiB}
  npu: {flops: 1G, memory: 1GiB}
links:
  - {between: [gpu, npu], rate: 60mbit, delay: 1ms}
"""
MODEL = """
import numpy as np, keras, sys
import whale_nebula as nb
x, y = np.zeros((64, 32), "float32"), np.zeros((64, 4), "float32")
layers = [keras.layers.Dense(256, activation="relu", name=f"d{n}") for n in range(4)]
model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(4, name="head")], name="small")
model.compile("sgd", "mse")
"""
FIT = MODEL + "print(sys.argv[1:])\nmodel.fit(x, y, batch_size=32, verbose=0)\nprint('it went on')"


class Output(NamedTuple):
    """The exit status and output of a command."""

    status: int
    out: str
    err: str


Call = Callable[..., Output]


@pytest.fixture
def run_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """A function that writes a script and runs a command with it and the config."""
    config = tmp_path / "clusters.yaml"
    config.write_text(CONFIG)

    def run(text: str, *words: str, command: Callable[[list[str]], int] = plan.main) -> Output:
        nb.shutdown()
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return Output(command([str(path), "--config", str(config), *words]), *capsys.readouterr())

    yield run
    nb.shutdown()
    assert get_current_limits() is None


def test_script_without_scopes_is_planned_and_explained(run_command: Call, tmp_path: Path) -> None:
    output = run_command(
        FIT, "--epochs", "3", "--html", str(tmp_path / "plan.html"), "--save", str(tmp_path / "plan.json")
    )
    assert output.status == arguments.DONE and output.out == ""
    assert "['--epochs', '3']" in output.err and "it went on" not in output.err
    page, saved = Page((tmp_path / "plan.html").read_text()), nb.Plan.load(tmp_path / "plan.json")
    assert page.tags.count("h2") > 3 and all(each.stages in page.words for each in saved.considered)
    assert {"Candidates", "as configured", "best plan at each rate"} <= set(page.words.split("\n")) or all(
        word in page.words for word in ("Candidates", "as configured", "60 Mbit/s", "best plan at each rate")
    )
    assert saved.predicted == saved.considered[0].predicted and saved.predicted.seconds > 0
    output = run_command(FIT)
    assert (
        output.out.startswith("chosen: ") and "what if" in output.out and "\nplan of small.train_step\n" in output.out
    )


def test_json_contains_prediction_and_candidates(run_command: Call, tmp_path: Path) -> None:
    document = json.loads(run_command(FIT, "--json", "--micro-batch", "4").out)
    best = document["considered"][0]
    assert document["micro_batch"] == 4 and {each["micro_batches"] for each in document["considered"]} == {4}
    assert document["predicted"].items() >= best["predicted"].items()
    assert best["predicted"]["memory"].keys() <= {"gpu/0", "npu/0"}


@pytest.mark.parametrize(
    ("line", "words", "clusters", "micro"),
    [
        pytest.param("nb.auto_parallel(clusters=['npu'])", ("--micro-batch", "2"), {"npu"}, 2, marks=pytest.mark.grid),
        ("nb.auto_parallel(micro_batch=8)", ("--micro-batch", "2", "--clusters", "gpu"), {"gpu"}, 8),
        pytest.param("nb.shutdown()", ("--micro-batch", "2", "--clusters", "gpu"), {"gpu"}, 2, marks=pytest.mark.grid),
    ],
)
def test_options_of_the_script_override_the_command_line(
    line: str, words: tuple[str, ...], clusters: set[str], micro: int, run_command: Call
) -> None:
    document = json.loads(run_command(FIT.replace("print(sys.argv[1:])", line), "--json", *words).out)
    assert {stage["cluster"] for stage in document["stages"].values()} == clusters
    assert document["micro_batch"] == micro


def test_show_reports_plan_chosen_by_auto_parallel(run_command: Call) -> None:
    output = run_command(FIT.replace("print(sys.argv[1:])", "nb.auto_parallel()"), command=show.main)
    assert output.status == arguments.DONE
    assert "\n  chosen by nb.auto_parallel: predicted step time " in output.out and "what if" not in output.out


def test_step_with_scopes_is_planned_as_fixed(run_command: Call) -> None:
    scoped = FIT.replace("model = ", "with nb.cluster(), nb.stage(cluster='npu'): model = ")
    output = run_command(scoped)
    assert output.status == arguments.DONE and output.out.startswith("chosen: npu runs d0 to head")
    assert "The scopes fix: nb.stage(cluster='npu')" in output.out


INVALID_COMMANDS: list[tuple[str, tuple[str, ...], int, str]] = [
    (FIT, ("--memory", "16Gi"), arguments.USAGE, "did you mean '16GiB'?"),
    (FIT, ("--micro-batch", "0"), arguments.USAGE, "micro_batch=0 is not a valid count"),
    (FIT, ("--micro-batch", "many"), arguments.USAGE, "needs a number"),
    (FIT, ("--clusters", "gpu,gpu"), arguments.USAGE, "has one twice"),
    (FIT, ("--memory", "1MB"), arguments.FAILED, "no plan fits: "),
    (MODEL, (), arguments.NOTHING, "ran no step, so there is nothing to plan"),
    (MODEL + "raise KeyError(3)", (), arguments.FAILED, "raised KeyError before its first step\n"),
]


@pytest.mark.parametrize(("text", "words", "status", "message"), INVALID_COMMANDS)
def test_invalid_plan_command_is_reported(
    text: str, words: tuple[str, ...], status: int, message: str, run_command: Call
) -> None:
    try:
        output = run_command(text, *words)
    except SystemExit as end:
        assert (end.code, status) == (arguments.USAGE, arguments.USAGE)
        return
    assert output.status == status and message in output.err


@pytest.mark.parametrize(("words", "message"), [([], "missing script"), (["plan.json"], "is not a script")])
def test_plan_needs_a_script(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.main(words)
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def chosen_plan() -> Iterator[nb.Plan]:
    """A plan that the planner has chosen for two clusters with a slow link."""
    nb.shutdown()
    nb.init({"clusters": {"gpu": {"flops": "1G"}, "npu": {"flops": "1G"}}}, links="60mbit,1ms")
    nb.auto_parallel()
    layers = [keras.layers.Dense(256, activation="relu", name=f"d{number}") for number in range(4)]
    model = keras.Sequential([keras.Input((32,)), *layers], name="small")
    model.compile("sgd", "mse")
    yield nb.plan(model, np.zeros((32, 32), "float32"), np.zeros((32, 256), "float32"))
    nb.shutdown()


def test_saved_plan_keeps_candidates_but_not_the_decision(chosen_plan: nb.Plan, tmp_path: Path) -> None:
    chosen_plan.save(tmp_path / "plan.json")
    loaded = nb.Plan.load(tmp_path / "plan.json")
    assert (loaded.considered, loaded.predicted, loaded.digest) == (
        chosen_plan.considered,
        chosen_plan.predicted,
        chosen_plan.digest,
    )
    with pytest.raises(StateError, match="loaded from a file"):
        loaded.explain()
    page = Page(loaded.to_html())
    assert "Candidates" in page.words and "as configured" not in page.words
    assert chosen_plan.difference(loaded) is None


@pytest.mark.grid
def test_page_draws_best_plans_by_link_rate(chosen_plan: nb.Plan) -> None:
    page = Page(chosen_plan.to_html())
    curves = chosen_plan.decision.curves()
    assert page.attributes.count(("class", "best")) == 1 + 7
    assert [value for name, value in page.attributes if name == "class" and value.startswith("curve ")] == [
        f"curve c{number + 1}" for number in range(len(curves.plans))
    ]
    assert all(name in page.words for name in (*curves.plans, *curves.best_plans[::4]))


def test_plan_not_chosen_by_planner_has_no_candidates(chosen_plan: nb.Plan) -> None:
    plain = replace(chosen_plan, decision=None, considered=())
    assert "considered" not in json.loads(plain.to_json()) and "Candidates" not in plain.to_html()
    assert plain.predicted is None and "nb.auto_parallel" not in plain.to_text()
    with pytest.raises(StateError, match="was not chosen by the planner"):
        plain.explain()


def test_limits_are_completed_from_standing_limits() -> None:
    limits, standing = Limits(Site("a.py", 1), memory=5), Limits(Site("b.py", 2), memory=7, micro_batch=3)
    with use_base_limits(standing):
        assert get_current_limits() == standing
    assert limits.complete_from(standing) == Limits(Site("a.py", 1), memory=5, micro_batch=3)
    assert get_current_limits() is None
