"""Options: their values, and errors for unknown ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import whale_nebula as nb
from tests.unit.scopes.scope_trees import record_scopes
from whale_nebula.codec import BF16, FP16, INT8, SVD, TopK
from whale_nebula.errors import OptionError
from whale_nebula.scopes.compress_options import find_local_sgd_options
from whale_nebula.scopes.frames import open_frames


def read_options(scope: Any) -> dict[str, Any]:
    with record_scopes(), scope as frame:
        return dict(frame.options)


def test_pipeline_options_match_the_programs_pipeline() -> None:
    from dataclasses import asdict

    from whale_nebula.ir.program import Pipeline

    assert read_options(nb.pipeline())["micro_batch"] is None  # whole, or as many as a planner chooses
    assert Pipeline(**{**read_options(nb.pipeline()), "micro_batch": 1}) == Pipeline()
    chosen = nb.pipeline(4, schedule="gpipe", in_flight=2, recompute=True, coupled="allow")
    assert asdict(Pipeline(**read_options(chosen))) == read_options(chosen)


def test_numpy_integers_are_accepted() -> None:
    assert read_options(nb.pipeline(np.int64(3)))["micro_batch"] == 3


@pytest.mark.parametrize(
    ("written", "layout"),
    [
        ("all", "all"),
        ({"all"}, "all"),
        (["all"], "all"),
        (["npu", "gpu"], ("npu", "gpu")),
        (("gpu",), ("gpu",)),
        ({"npu", "gpu"}, ("gpu", "npu")),
        (frozenset({"gpu"}), ("gpu",)),
    ],
)
def test_cluster_layout_is_normalised(written: Any, layout: object) -> None:
    assert read_options(nb.cluster(written))["layout"] == layout


@pytest.mark.parametrize("written", ["all", ["all"], ("all",), {"all"}])
def test_auto_parallel_on_all_clusters_is_not_limited(written: Any) -> None:
    with nb.auto_parallel(clusters=written) as limits:
        assert repr(limits) == "nb.auto_parallel()"


INVALID_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("pipeline", (), {"shedule": "gpipe"}, "no option 'shedule'"),
    ("pipeline", (0,), {}, "is not a valid count"),
    ("pipeline", (-1,), {}, "is not a valid count"),
    ("pipeline", (1.5,), {}, "is not an integer"),
    ("pipeline", (True,), {}, "is not an integer"),
    ("pipeline", (), {"schedule": "1f1B"}, "did you mean '1f1b'"),
    ("pipeline", (), {"schedule": None}, "choose one of 'gpipe'"),
    ("pipeline", (), {"schedule": ["gpipe"]}, "is not a valid value"),
    ("pipeline", (), {"in_flight": 0}, "is not a valid count"),
    ("pipeline", (), {"recompute": "yes"}, "neither True nor False"),
    ("pipeline", (), {"coupled": "allowed"}, "did you mean 'allow'"),
    ("stage", (), {"cluster": 3}, "is not a valid name"),
    ("stage", (), {"cluster": ""}, "is not a valid name"),
    ("stage", (), {"name": "a->b"}, "is not a valid name"),
    ("stage", (), {"cluster": "site/gpu"}, 'cluster="site-gpu"'),
    ("cluster", (["site/gpu"],), {}, "is not a valid cluster name"),
    ("cluster", ([],), {}, "is not a list of cluster names"),
    ("cluster", (["all", "gpu"],), {}, "is not a list of cluster names"),
    ("cluster", ([1],), {}, "is not a valid name"),
    ("cluster", (["gpu", "npu"],), {"name": "npuu"}, "did you mean 'npu'"),
    ("replica", (0,), {}, "is not a valid count"),
    ("split", (), {"axis": "last"}, "is not an integer"),
    ("split", (), {"axes": 1}, "did you mean 'axis'"),
    ("compress", (), {}, "specifies no codec"),
    ("compress", (), {"fp61": True}, "did you mean 'fp16'"),
    ("compress", ("auto",), {"fp16": True}, "also has flags"),
    ("compress", (FP16(),), {"svd": 0.6}, "also has flags"),
    ("compress", (3,), {}, "is not a codec"),
    ("compress", (), {"fp16": True, "backward": 3}, "is not a codec"),
    ("compress", (), {"fp16": True, "start_step": -1}, "is negative"),
    ("compress", (), {"fp16": True, "delta": 3}, "is not a valid name"),
    ("compress", (), {"fp16": True, "delta": "ids"}, "requires an integer codec .int8, int4., not 'fp16'"),
    ("compress", (), {"topk": 0.1, "int4": True, "delta": "ids"}, "requires an integer codec"),
    ("compress", (), {"mask": np.ones(3)}, "mask=ndarray is neither True nor a name"),
    ("compress", (), {"mask": 3}, "mask=int is neither"),
    ("compress", (), {"mask": "a, b"}, "is not a valid name"),
    ("compress", (), {"svd": 0.6, "rank": 8}, "svd and rank exclude each other"),
    ("compress", (), {"fp16": True, "int8": True}, "fp16 and int8 exclude each other"),
    ("compress", (), {"fp16": 1}, "neither True nor False"),
    ("compress", (), {"rank": 8, "basis": "lerned"}, "did you mean 'learned'"),
    ("compress", (), {"svd": 1.5}, "fraction of the tensor"),
    ("compress", (), {"rank": 0}, "is not a positive integer"),
    ("compress", (), {"basis": "learned", "fp16": True}, "without a rank"),
    ("compress", (), {"int8": True, "ramp": 1.5}, "is not a valid bound"),
    ("compress", (), {"int8": True, "ramp": []}, "is not a valid ramp"),
    ("compress", (), {"int8": True, "ramp": ["svd(0.6)"]}, "ramp= lists precisions"),
    ("compress", (), {"int8": True, "ramp": ["fp61"]}, "did you mean 'fp16'"),
    ("compress", (), {"int8": True, "zstd": 1}, "zstd=1 is neither True nor False"),
    ("compress", (), {"int8": True, "nonfinite": "skpi"}, "did you mean 'skip'"),
    ("compress", (), {"int8": True, "forward": 3}, "is not a codec"),
    ("compress", (), {"int8": True, "backward": "int9"}, "no codec is called 'int9'"),
    (
        "compress",
        (),
        {"int8": True, "backward": TopK(0.1) >> INT8()},
        "has the structure topk, which the forward codec does not have",
    ),
    ("compress", ("bits",), {}, "cannot be chosen"),
    ("place", ("model", "gpu"), {}, "takes a dict"),
    ("auto_parallel", (), {"clusters": "gpu"}, "clusters='gpu' is not a list of cluster names"),
    ("auto_parallel", (), {"clusters": 3}, "is not a list of cluster names"),
    ("auto_parallel", (), {"clusters": {"gpu": 1}}, "is not a list of cluster names"),
    ("auto_parallel", (), {"clusters": []}, "is empty"),
    ("auto_parallel", (), {"clusters": ["gpu", "gpu"]}, "names a cluster twice"),
    ("auto_parallel", (), {"clusters": [1]}, "is not a valid name"),
    ("auto_parallel", (), {"micro_batch": 0}, "is not a valid count"),
    ("auto_parallel", (), {"replica": "all"}, "is not an integer"),
    ("auto_parallel", (), {"recompute": 1}, "neither True nor False"),
    ("auto_parallel", (), {"compress": "fp61"}, "compress='fp61': no codec is called"),
    ("auto_parallel", (), {"compress": 3}, "compress=3 is not a codec"),
    ("auto_parallel", (), {"memori": "16GiB"}, "did you mean 'memory'"),
    ("auto_parallel", (), {"memory": "16 apples"}, "memory='16 apples' is not a memory size"),
    ("auto_parallel", ("gpu",), {}, "takes keyword arguments only"),
]


@pytest.mark.parametrize(("scope", "args", "words", "message"), INVALID_CALLS)
def test_invalid_option_is_refused_at_the_users_line(
    scope: str, args: tuple[Any, ...], words: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        getattr(nb, scope)(*args, **words)
    assert caught.value.where.startswith(f"{__file__}:")
    assert caught.value.mend


@pytest.mark.parametrize(
    ("scope", "codec"),
    [
        (lambda: nb.compress(fp16=True), FP16()),
        (lambda: nb.compress(BF16()), BF16()),
        (lambda: nb.compress("bf16"), BF16()),
        (lambda: nb.compress(svd=0.6, fp16=True), SVD(0.6) >> FP16()),
        (lambda: nb.compress(nb.codec.SVD(0.6) >> nb.codec.FP16()), SVD(0.6) >> FP16()),
        (lambda: nb.compress("auto"), "auto"),
        (lambda: nb.compress(mask="tokens"), None),
    ],
)
def test_codec_from_flags_objects_and_text(scope: Any, codec: object) -> None:
    assert read_options(scope())["codec"] == codec


pytestmark = pytest.mark.filterwarnings("ignore:.*contains no step")


def describe_local_sgd(**options: Any) -> str:
    with nb.cluster(["gpu", "npu"]), nb.compress(int4=True), nb.replica(**options):
        apart = find_local_sgd_options(open_frames())
        return str(apart)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 100}, "differences are exchanged every 100 steps with 10 steps to arrive, int4, average"),
        ({"sync_every": 1, "outer": "nesterov"}, "differences are exchanged every step, int4, nesterov"),
        ({"sync_every": 8, "fragments": 2}, "every 8 steps in 2 fragments with 1 step each to arrive"),
        ({"sync_every": 8, "delay": 0}, "differences are exchanged every 8 steps, int4"),
        ({"sync_every": "auto"}, 'each cluster trains a copy, sync_every="auto", int4, average'),
        ({"sync_every": 8, "outer": nb.outer.Nesterov(rate=1.0)}, "Nesterov(rate=1.0, momentum=0.9)"),
        ({"sync_every": 8, "mode": "async"}, "each sends its difference every 8 steps, at most 1 round ahead"),
        ({"sync_every": 1, "mode": "async"}, "each sends its difference every step, at most 1 round ahead"),
        ({"sync_every": 8, "mode": "async", "staleness": 3}, "at most 3 rounds ahead, int4, average"),
    ],
)  # fmt: skip
def test_local_sgd_options_are_described(options: dict[str, Any], text: str) -> None:
    assert text in describe_local_sgd(**options)


@pytest.mark.parametrize(
    ("options", "mend"),
    [
        ({"sync_every": 0}, "sync_every=1"),
        ({"sync_every": 2.5}, "sync_every=2"),
        ({"sync_every": "often"}, "sync_every="),
        ({"sync_every": "auto", "delay": 500}, "delay=499"),
        ({"outer": "nesterov"}, "nb.replica(sync_every=100, outer='nesterov')"),
        ({"delay": 3}, "nb.replica(sync_every=100, delay=3)"),
        ({"mode": "async"}, "nb.replica(sync_every=100, mode='async')"),
        ({"sync_every": 4, "outer": "nestorov"}, "did you mean 'nesterov'?"),
        ({"sync_every": 4, "outer": 3}, "nb.outer.Nesterov()"),
        ({"sync_every": 4, "mode": "asynch"}, "did you mean 'async'?"),
        ({"sync_every": 4, "delay": 4}, "delay=3"),
        ({"sync_every": 4, "delay": -1}, "delay=0"),
        ({"sync_every": 4, "fragments": 5}, "fragments=4"),
        ({"sync_every": 4, "staleness": 2}, 'mode="async"'),
        ({"sync_every": 4, "mode": "async", "delay": 1}, "remove delay="),
        ({"sync_every": 4, "mode": "async", "outer": nb.outer.Nesterov(rate=1.0)}, 'outer="average"'),
    ],
)
def test_invalid_local_sgd_option_has_a_fix(options: dict[str, Any], mend: str) -> None:
    with pytest.raises(OptionError) as refused:
        nb.replica(**options)
    assert mend in str(refused.value)


@pytest.mark.parametrize("compress", [{"svd": 0.5}, {"codec": "auto"}, {"rank": 4}, {"int8": True, "delta": "ids"}])
def test_sample_codecs_are_refused_for_weight_differences(compress: dict[str, Any]) -> None:
    with (
        pytest.raises(OptionError, match="cannot be encoded"),
        nb.cluster(),
        nb.compress(**compress),
        nb.replica(sync_every=4),
    ):
        find_local_sgd_options(open_frames())


def test_replica_is_described_with_non_default_options() -> None:
    with record_scopes() as tree, nb.cluster(), nb.replica(2, sync_every=10):
        pass
    assert str(tree) == "cluster\n  replica count=2 sync_every=10\n"
