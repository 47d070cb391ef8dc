"""Runs: opened once, optional, closed in order."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.config import Config, Links
from whale_nebula.launch.attach import Attachment
from whale_nebula.runtime.run import Here, Run, current_run, find_open_run


def test_second_init_is_refused() -> None:
    nb.init()
    with pytest.raises(nb.errors.StateError, match="open already"):
        nb.init()


def test_repr_of_a_run_names_its_clusters() -> None:
    run = nb.init({"clusters": {"gpu": {}, "npu": {}}})
    assert repr(run) == "<run of clusters gpu, npu; all of them in this process>"
    attachment = Attachment("gpu/0", "gpu", {"npu/0": "npu"}, {}, "run", None)
    attached = Run(Config(), Links(), attachment=attachment)
    assert repr(attached) == "<run of clusters gpu, npu; this is gpu/0>"


def test_run_without_init_has_free_links() -> None:
    run = current_run()
    assert current_run() is run
    assert run.links.between("gpu", "npu").rate is None
    assert run.alone


def test_run_is_a_context_manager() -> None:
    with nb.init(links="1mbit,5ms") as run:
        assert run.links.between("a", "b").delay == 0.005
    assert current_run() is not run


def test_links_default_to_those_of_the_config() -> None:
    link = {"between": ["gpu", "npu"], "rate": "60mbit", "delay": "20ms"}
    run = nb.init({"clusters": {"gpu": {}, "npu": {}}, "links": [link]})
    assert run.links.between("npu", "gpu").rate == 60e6
    assert nb.here().clusters == ("gpu", "npu")


def test_link_of_an_unconfigured_cluster_is_refused() -> None:
    with pytest.raises(nb.errors.ConfigError, match="unknown cluster 'zpu'") as caught:
        nb.init({"clusters": {"gpu": {}, "npu": {}}}, links={("gpu", "zpu"): "60mbit"})
    assert caught.value.mend == "did you mean 'npu'?"
    assert "test_run.py" in caught.value.where


def test_link_of_a_cluster_without_stages_is_refused_by_the_first_plan() -> None:
    run = nb.init(links={("gpu", "zpu"): "60mbit"})
    run.register_clusters(["gpu"])
    with pytest.raises(nb.errors.ConfigError, match="name cluster 'zpu', but no stage is on it") as caught:
        run.register_clusters(["gpu", "npu"])
    assert "did you mean 'npu'?" in caught.value.mend
    assert "nb.init({'clusters': {'gpu': {}, 'npu': {}, 'zpu': {}}}, links=...)" in caught.value.mend
    assert "test_run.py" in caught.value.where


def test_link_of_a_configured_cluster_without_stages_is_accepted() -> None:
    run = nb.init({"clusters": {"gpu": {}, "npu": {}, "tpu": {}}}, links={("gpu", "tpu"): "60mbit"})
    run.register_clusters(["gpu", "npu"])
    assert run.links.names == ("gpu", "tpu")


@pytest.mark.parametrize(
    ("given", "what", "mend"),
    [
        ({"config": "60mbit,20ms"}, "not the options of a link", "nb.init(links='60mbit,20ms')"),
        ({"config": ["gpu", "npu"]}, "is not a mapping", "clusters: {gpu: {}, npu: {}}"),
        ({"config": {"clusters": ["gpu"]}}, "is not a mapping", "clusters: {gpu: {}}"),
        ({"config": {"clutsers": {}}}, "unknown key", "did you mean 'clusters'?"),
        ({"links": "60mbits"}, "'60mbits' is not a rate", 'did you mean "60mbit"?'),
        ({"links": {"gpu->npu": "60mbit"}}, "is not a pair of clusters", '{("gpu", "npu"): "60mbit,20ms"}'),
        ({"seed": "1"}, "is not an integer", "seed=1"),
        ({"ids": 3}, "is not the name of an input", 'ids="x/id"'),
    ],
)
def test_invalid_init_is_refused_with_a_fix(given: dict[str, object], what: str, mend: str) -> None:
    with pytest.raises(nb.errors.NebulaError, match=what) as caught:
        nb.init(**given)
    assert mend in caught.value.mend
    assert "test_run.py" in caught.value.where
    assert current_run().links.between("gpu", "npu").rate is None


def test_second_init_error_has_both_lines() -> None:
    run = nb.init()
    with pytest.raises(nb.errors.StateError) as caught:
        nb.init()
    first, second = (int(site.rpartition(":")[2]) for site in (run.site, caught.value.where))
    assert "test_run.py" in caught.value.where
    assert caught.value.what == f"a run is open already, since {run.site}"
    assert second == first + 2
    assert not caught.value.why


def test_second_init_error_names_implicit_openers() -> None:
    nb.here()
    with pytest.raises(nb.errors.StateError) as caught:
        nb.init()
    assert caught.value.why is not None and "nb.here()" in caught.value.why


CLUSTERS = {"clusters": {"gpu": {}, "npuu": {}}, "links": [{"between": ["gpu", "npuu"], "rate": "60mbit"}]}


def test_unknown_cluster_error_names_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "clusters.yaml"
    path.write_text("clusters: {gpu: {}, edge: {}}")
    run = nb.init(path)
    with pytest.raises(nb.errors.ConfigError) as caught:
        run.register_clusters(["gpu", "npu"], {"gpu": "train.py:3", "npu": "train.py:5"})
    assert caught.value.why == f"the clusters of {path}, which nb.init reads at {run.site}, are 'gpu', 'edge'"


def test_stage_on_an_unconfigured_cluster_is_refused() -> None:
    run = nb.init(CLUSTERS)
    with pytest.raises(nb.errors.ConfigError, match="on cluster 'npu', which is not in the config") as caught:
        run.register_clusters(["gpu", "npu"], {"gpu": "train.py:3", "npu": "train.py:5"})
    assert caught.value.where == "train.py:5"
    assert "'gpu', 'npuu'" in caught.value.why
    assert caught.value.mend.splitlines()[0] == "did you mean 'npuu'?"
    run.register_clusters(["gpu", "npuu"], {"gpu": "train.py:3", "npuu": "train.py:5"})


def test_stage_created_before_init_gets_a_specific_fix() -> None:
    run = nb.init(CLUSTERS)
    with pytest.raises(nb.errors.ConfigError) as caught:
        run.register_clusters(["local"], {"local": "train.py:5"})
    assert "call nb.init before the model is built" in caught.value.mend


def test_unscoped_step_needs_no_configured_cluster() -> None:
    nb.init(CLUSTERS).register_clusters(["local"], {"local": ""})


def test_config_without_clusters_admits_any() -> None:
    run = nb.init({"seed": 1})
    run.register_clusters(["gpu", "npu"], {"gpu": "train.py:3", "npu": "train.py:5"})
    assert nb.here().clusters == ("gpu", "npu")


def test_step_with_a_misspelt_cluster_is_refused_at_the_stage() -> None:
    nb.init(CLUSTERS)

    @nb.function
    def double(x: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = x + 1.0
        with nb.stage(cluster="npu"):
            return 2.0 * hidden

    with pytest.raises(nb.errors.ConfigError, match="did you mean 'npuu'") as caught:
        double(np.ones((4, 2), "float32"))
    assert "test_run.py" in caught.value.where


def test_clusters_are_created_by_name() -> None:
    run = nb.init()
    run.register_clusters(["gpu", "npu"])
    run.register_clusters(["npu", "tpu"])
    assert nb.here() == Here("local", "local/0", True, ("gpu", "npu", "tpu"), alone=True)
    assert all(nb.here().runs(name) for name in ("gpu", "anything"))


def test_shutdown_calls_closers_in_reverse_order() -> None:
    closed: list[int] = []
    run = nb.init()
    run.closers += [lambda: closed.append(1), lambda: closed.append(2)]
    nb.shutdown()
    assert closed == [2, 1]


def test_shutdown_calls_all_closers_even_if_one_fails() -> None:
    closed: list[int] = []
    run = nb.init({"clusters": {"gpu": {"workers": ["a:1", "b:1"]}}})
    run.close_at_end(lambda: closed.append(1), lambda: 1 // 0, lambda: closed.append(2))
    with pytest.raises(ZeroDivisionError):
        nb.shutdown()
    assert closed == [2, 1] and find_open_run() is None
    nb.init()


def test_shutdown_closes_the_run_even_if_the_last_saving_fails() -> None:
    closed: list[int] = []
    run = nb.init()
    run.close_at_end(lambda: closed.append(1))
    run.checkpoints = SimpleNamespace(end=lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        nb.shutdown()
    assert closed == [1]
    assert find_open_run() is None


def test_gathered_does_nothing_in_one_process() -> None:
    with nb.gathered():
        assert nb.here().lead


def test_last_report_after_uncut_steps_raises_with_the_reason() -> None:
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="small")
    with pytest.warns(nb.errors.NebulaWarning, match="runs uncut"), nb.cluster(), nb.stage(cluster="gpu"):
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    with pytest.raises(nb.errors.StateError, match="there is no report: no step has run with a plan") as caught:
        nb.last_report()
    assert caught.value.why == "small's train_step ran uncut: its trace contained no scope"
    nb.shutdown()
    with pytest.raises(nb.errors.StateError, match="no step has run yet"):
        nb.last_report()


def create_worker_run(has_one_launcher: bool, *clusters: str) -> Run:
    """The run of one of several processes, one for each cluster."""
    own, *others = (f"{cluster}/0" for cluster in clusters)
    peers = {worker: worker.partition("/")[0] for worker in others}
    attachment = Attachment(own, clusters[0], peers, {}, "run", None, has_one_launcher=has_one_launcher)
    return Run(Config(), Links(), attachment=attachment)


def test_cluster_misspelt_on_the_command_line_gets_a_fix() -> None:
    with pytest.raises(nb.errors.ConfigError, match="no process runs cluster 'beta'") as caught:
        create_worker_run(True, "alpha", "gamma").register_clusters(["alpha", "beta"], {"beta": "train.py:3"})
    assert "alpha/0, gamma/0, and no stage is on cluster 'gamma'" in caught.value.why
    assert caught.value.mend.startswith("whale-nebula run --all --clusters alpha,beta, or ")


def test_cluster_without_a_worker_gets_another_fix() -> None:
    with pytest.raises(nb.errors.ConfigError, match="no process runs cluster 'beta'") as caught:
        create_worker_run(False, "alpha", "gamma").register_clusters(["alpha", "gamma", "beta"])
    assert "no stage is on" not in caught.value.why
    assert caught.value.mend == "start a worker of 'beta', or name another cluster in the stage"


def test_step_without_a_cluster_gets_its_own_error() -> None:
    with pytest.raises(nb.errors.ConfigError, match="a step names no cluster") as caught:
        create_worker_run(True, "alpha", "gamma").register_clusters(["local"])
    assert caught.value.mend == 'put its operations into stages: with nb.stage(cluster="alpha"): ...'


def test_plan_of_several_processes_names_its_creator(monkeypatch: pytest.MonkeyPatch) -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return 2.0 * x

    alone = nb.plan(step, np.ones(3, "float32"))
    nb.shutdown()
    monkeypatch.setattr("whale_nebula.runtime.run._run", create_worker_run(True, "a", "b"))
    one = nb.plan(step, np.ones(3, "float32"))
    monkeypatch.undo()
    assert "a/0" not in alone.to_text() and alone.digest
    assert "this plan was created by a/0" in one.to_text()


def test_init_draws_no_random_numbers() -> None:
    keras.utils.set_random_seed(4)
    expected = random.random(), np.random.rand(), float(keras.random.uniform(()))
    keras.utils.set_random_seed(4)
    nb.init(links="60mbit,20ms")
    assert (random.random(), np.random.rand(), float(keras.random.uniform(()))) == expected


@pytest.mark.parametrize("given", [{"seed": 4}, {"config": {"seed": 4}}, {"config": {"seed": 9}, "seed": 4}])
def test_seed_of_init_seeds_all_generators(given: dict[str, Any]) -> None:
    keras.utils.set_random_seed(4)
    expected = random.random(), np.random.rand(), float(keras.random.uniform(()))
    nb.init(**given)
    assert (random.random(), np.random.rand(), float(keras.random.uniform(()))) == expected


@nb.function
def doubled(names: Any, rows: Any) -> Any:
    with nb.stage(cluster="a"):
        hidden = 2.0 * rows
    with nb.stage(cluster="b"):
        return tf.reduce_sum(hidden), names


@pytest.mark.parametrize(
    ("ids", "mend"), [("nams", "did you mean 'names'?"), (["q", "z"], "choose one of 'names', 'rows'")]
)
def test_ids_of_no_input_are_refused_by_the_first_step(ids: Any, mend: str) -> None:
    nb.init(ids=ids)
    with pytest.raises(nb.errors.OptionError, match=r"ids=.* names no input of this step") as caught:
        doubled(np.arange(4), np.ones((4, 2), "float32"))
    assert "its inputs are 'names', 'rows'" in caught.value.why
    assert caught.value.mend == mend
    assert "test_run.py:" in caught.value.where


def test_ids_may_name_inputs_of_another_step() -> None:
    nb.init(ids=["nothing", "names"])
    assert float(doubled(np.arange(4), np.ones((4, 2), "float32"))[0]) == 16.0
    assert float(halved(np.ones((4, 2), "float32"))) == 4.0


@nb.function
def halved(rows: Any) -> Any:
    with nb.stage(cluster="a"):
        return tf.reduce_sum(0.5 * rows)


@pytest.mark.parametrize(
    ("seed", "mend"), [("x", "nb.init(seed=1)"), ("42", "nb.init(seed=42)"), (1.5, "nb.init(seed=1)")]
)
def test_invalid_seed_is_refused_with_a_fix(seed: Any, mend: str) -> None:
    with pytest.raises(nb.errors.OptionError, match="is not an integer") as caught:
        nb.init(seed=seed)
    assert caught.value.mend == mend and str(caught.value).endswith(mend)
