"""Options: what they become, and what is said of those that do not exist."""

from typing import Any

import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.codec import BF16, FP16, INT8, SVD, TopK
from whale_nebula.errors import OptionError
from whale_nebula.scopes import parsing


def options(scope: Any) -> dict[str, Any]:
    with parsing(), scope as frame:
        return dict(frame.options)


def test_a_pipelines_options_are_those_of_a_program() -> None:
    from dataclasses import asdict

    from whale_nebula.ir.program import Pipeline

    assert Pipeline(**options(nb.pipeline())) == Pipeline()
    chosen = nb.pipeline(4, schedule="gpipe", in_flight=2, recompute=True, coupled="allow")
    assert asdict(Pipeline(**options(chosen))) == options(chosen)


def test_numbers_of_numpy_are_numbers() -> None:
    assert options(nb.pipeline(np.int64(3)))["micro_batch"] == 3


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
def test_layouts(written: Any, layout: object) -> None:
    assert options(nb.cluster(written))["layout"] == layout


BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("pipeline", (), {"shedule": "gpipe"}, "no option 'shedule'"),
    ("pipeline", (0,), {}, "is not a count"),
    ("pipeline", (-1,), {}, "is not a count"),
    ("pipeline", (1.5,), {}, "no whole number"),
    ("pipeline", (True,), {}, "no whole number"),
    ("pipeline", (None,), {}, "no whole number"),
    ("pipeline", (), {"schedule": "1f1B"}, "did you mean '1f1b'"),
    ("pipeline", (), {"schedule": None}, "choose one of 'gpipe'"),
    ("pipeline", (), {"schedule": ["gpipe"]}, "is not known"),
    ("pipeline", (), {"in_flight": 0}, "is not a count"),
    ("pipeline", (), {"recompute": "yes"}, "neither True nor False"),
    ("pipeline", (), {"coupled": "allowed"}, "did you mean 'allow'"),
    ("stage", (), {"cluster": 3}, "is no name"),
    ("stage", (), {"cluster": ""}, "is no name"),
    ("stage", (), {"name": "a->b"}, "is no name"),
    ("cluster", ([],), {}, "no list of clusters"),
    ("cluster", (["all", "gpu"],), {}, "no list of clusters"),
    ("cluster", ([1],), {}, "is no name"),
    ("cluster", (["gpu", "npu"],), {"name": "npuu"}, "did you mean 'npu'"),
    ("replica", (0,), {}, "is not a count"),
    ("split", (), {"axis": "last"}, "no whole number"),
    ("split", (), {"axes": 1}, "did you mean 'axis'"),
    ("compress", (), {}, "names no codec"),
    ("compress", (), {"fp61": True}, "did you mean 'fp16'"),
    ("compress", ("auto",), {"fp16": True}, "has flags as well"),
    ("compress", (FP16(),), {"svd": 0.6}, "has flags as well"),
    ("compress", (3,), {}, "is no codec"),
    ("compress", (), {"fp16": True, "backward": 3}, "is no codec"),
    ("compress", (), {"fp16": True, "start_step": -1}, "before the first step"),
    ("compress", (), {"fp16": True, "delta": 3}, "is no name"),
    ("compress", (), {"fp16": True, "delta": "ids"}, "goes with integers .int8, int4., not with 'fp16'"),
    ("compress", (), {"topk": 0.1, "int4": True, "delta": "ids"}, "goes with integers"),
    ("compress", (), {"mask": np.ones(3)}, "mask=ndarray is neither True nor a name"),
    ("compress", (), {"mask": 3}, "mask=int is neither"),
    ("compress", (), {"mask": "a, b"}, "is no name"),
    ("compress", (), {"svd": 0.6, "rank": 8}, "svd and rank exclude each other"),
    ("compress", (), {"svd": 1.5}, "share of the tensor"),
    ("compress", (), {"rank": 0}, "is no rank"),
    ("compress", (), {"basis": "learned", "fp16": True}, "without a rank"),
    ("compress", (), {"int8": True, "ramp": 1.5}, "is no bound"),
    ("compress", (), {"int8": True, "ramp": []}, "is no ramp"),
    ("compress", (), {"int8": True, "ramp": ["svd(0.6)"]}, "a ramp climbs precisions"),
    ("compress", (), {"int8": True, "ramp": ["fp61"]}, "did you mean 'fp16'"),
    ("compress", (), {"int8": True, "zstd": 1}, "zstd=1 is neither True nor False"),
    ("compress", (), {"int8": True, "nonfinite": "skpi"}, "did you mean 'skip'"),
    ("compress", (), {"int8": True, "forward": 3}, "is no codec"),
    ("compress", (), {"int8": True, "backward": "int9"}, "no codec is called 'int9'"),
    ("compress", (), {"int8": True, "backward": TopK(0.1) >> INT8()}, "has a topk that the forward has not"),
    ("compress", ("bits",), {}, "is no codec to choose"),
    ("place", ("model", "gpu"), {}, "are a dict"),
]


@pytest.mark.parametrize(("scope", "args", "words", "said"), BAD)
def test_what_does_not_exist_is_refused_where_it_is_written(
    scope: str, args: tuple[Any, ...], words: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said) as caught:
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
def test_flags_objects_and_texts_become_one_codec(scope: Any, codec: object) -> None:
    assert options(scope())["codec"] == codec


@pytest.mark.parametrize(("word", "meant"), [("float16", "fp16"), ("half", "fp16"), ("bfloat16", "bf16")])
def test_what_others_call_an_option_is_understood(word: str, meant: str) -> None:
    with pytest.raises(OptionError) as caught:
        nb.compress(**{word: True})
    assert caught.value.mend == f"did you mean {meant!r}? nb.compress({meant}=True)"
    assert caught.value.why.startswith("its options are 'codec', 'svd', 'rank', 'topk', 'fp16'")
