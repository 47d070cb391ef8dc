"""Invalid calls: the error, its place, and the line to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import whale_nebula as nb
from tests.unit.scopes.scope_trees import record_scopes
from whale_nebula.errors import NebulaError, OptionError, ScopeError
from whale_nebula.scopes import options

SCOPES = ("cluster", "replica", "pipeline", "stage", "split", "compress", "gathered")


@pytest.mark.parametrize("name", SCOPES)
def test_scope_without_parentheses_is_refused(name: str) -> None:
    with pytest.raises(ScopeError, match=f"nb.{name} is used without parentheses") as caught, getattr(nb, name):
        pass
    assert caught.value.mend.startswith(f"with nb.{name}(")
    assert "test_invalid_calls.py" in caught.value.where


@pytest.mark.parametrize("name", SCOPES[:-1])
def test_scope_as_decorator_is_refused(name: str) -> None:
    with pytest.raises(ScopeError, match="is not a decorator"):
        getattr(nb, name)(lambda x: x)
    with pytest.raises(ScopeError, match="is not a decorator"):
        nb.stage(cluster="gpu")(lambda x: x)  # type: ignore[operator]


INVALID_CALLS: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: nb.init(link="60mbit"), "no option 'link'", "did you mean 'links'? nb.init(links='60mbit')"),
    (lambda: nb.stage(clutser="gpu"), "no option", "did you mean 'cluster'? nb.stage(cluster='gpu')"),
    (lambda: nb.stage("gpu"), "takes keyword arguments only", "nb.stage(cluster='gpu')"),
    (lambda: nb.stage(cluster=None), "has no cluster", 'nb.stage(cluster="gpu"), or nb.stage()'),
    (lambda: nb.stage(cluster="my gpu"), "is not a valid name", 'cluster="gpu"'),
    (lambda: nb.stage(cluster=["gpu"]), "is not a valid name", 'cluster="gpu"'),
    (lambda: nb.cluster("gpu", "npu"), "too many positional arguments", "nb.cluster(layout='all', *, name=None)"),
    (lambda: nb.compress("int5"), "codec='int5': no codec is called 'int5'", "did you mean 'int8'?"),
    (lambda: nb.compress(int8=True, backward="int5"), "backward='int5': no codec is called", "did you mean 'int8'?"),
    (lambda: nb.compress(fp16=True, int8=True), "exclude each other", "keep one of them: fp16=..., or int8=..."),
    (lambda: nb.cluster("gpu, npu"), "neither 'all'", "nb.cluster(['gpu', 'npu'])"),
    (lambda: nb.cluster({"gpu": 4}), "neither 'all'", "nb.cluster(['gpu', 'npu'])"),
    (lambda: nb.cluster(["gpu", "gpu"]), "is not a list of cluster names", "nb.cluster(['gpu'])"),
    (lambda: nb.pipeline(4.0), "is not an integer", "micro_batch=4"),
    (lambda: nb.pipeline("four"), "is not an integer", "micro_batch=2"),
    (
        lambda: nb.compress(quantize=True),
        "no option 'quantize'",
        "remove quantize=: nb.compress(codec=None, *, svd=",
    ),
    (lambda: nb.compress(backward="fp16"), "specifies no codec", "nb.compress(fp16=True, backward='fp16')"),
    (lambda: nb.shutdown(True), "too many positional arguments", "nb.shutdown()"),
    (lambda: nb.plan(), "missing a required argument", "nb.plan(model_or_function, *example)"),
    (lambda: nb.plan("model", x=3), "no option 'x'", "remove x=: nb.plan(model_or_function, *example)"),
    (lambda: nb.verify("model", batch=3), "no option 'batch'", "nb.verify(model_or_function, *batch)"),
    (lambda: nb.loss_weight(), "missing a required argument", "nb.loss_weight(tensor)"),
    (lambda: nb.function(hole=("t",)), "no option 'hole'", "did you mean 'whole'? nb.function(whole=('t',))"),
]


@pytest.mark.parametrize(("call", "what", "mend"), INVALID_CALLS)
def test_invalid_call_is_refused_with_the_correct_call(call: Callable[[], Any], what: str, mend: str) -> None:
    with pytest.raises(OptionError) as caught:
        call()
    assert what in caught.value.what
    assert mend in caught.value.mend
    assert "test_invalid_calls.py" in caught.value.where


def test_wrapper_can_pass_default_options() -> None:
    def stage(cluster: str | None = None, name: str | None = None) -> Any:
        return nb.stage(cluster=cluster, name=name)

    with record_scopes(), nb.cluster(), stage() as frame:
        assert frame.key == "stage0"


def test_invalid_call_in_autograph_code_has_the_users_line() -> None:
    import tensorflow as tf

    @nb.function
    def step(x: Any) -> Any:
        with nb.stage("gpu"):
            return x

    with pytest.raises(NebulaError, match="takes keyword arguments only") as caught:
        step(tf.ones([2]))
    assert "test_invalid_calls.py" in caught.value.where


def test_check_signature_accepts_variadic_functions() -> None:
    @options.check_signature
    def gather(*given: int, **others: int) -> int:
        return len(given) + len(others)

    assert gather(1, 2, three=3) == 3
