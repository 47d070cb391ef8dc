"""Shapes that the config declares for inputs: the same signature with and without the values."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.capture.arguments import Declared
from whale_nebula.capture.step import fill_layout, signature
from whale_nebula.config import InputSpec
from whale_nebula.errors import AbsentInputError, InputMismatchError
from whale_nebula.feed.checks import Missing

FORMS = {"x/source": InputSpec((None, None), "int32"), "x/target": InputSpec((None, 3)), "y": InputSpec((8,))}
TWO = Declared(FORMS, alone=False)
SOURCE, TARGET, Y = np.ones((4, 2), "int32"), np.ones((4, 3), "float32"), np.ones(4, "float32")
GIVEN: dict[str, list[tuple[str, Any]]] = {
    "all": [("x", {"source": SOURCE, "target": TARGET}), ("y", Y)],
    "source": [("x", {"source": SOURCE, "target": None}), ("y", None)],
    "target": [("x", {"source": None, "target": TARGET}), ("y", Y)],
    "y": [("x", None), ("y", Y)],
}
ABSENT = {"all": (), "source": (1, 2), "target": (0,), "y": (0, 1)}


@pytest.mark.parametrize("here", GIVEN)
def test_every_process_has_the_same_signature(here: str) -> None:
    layout, tensors = signature(GIVEN[here], declared=TWO)
    assert layout.key == signature(GIVEN["all"], declared=TWO)[0].key
    assert layout.names == ("x/source", "x/target", "y")
    assert [spec.shape.as_list() for spec in layout.specs] == [[None, None], [None, 3], [None]]
    assert layout.absent == ABSENT[here]
    assert [isinstance(tensor, Missing) for tensor in tensors] == [n in ABSENT[here] for n in range(3)]


def test_a_none_that_the_config_does_not_name_is_a_none() -> None:
    layout, tensors = signature([("x", {"other": None, "source": SOURCE})], declared=TWO)
    assert fill_layout(layout, tensors)[0]["other"] is None
    assert layout.absent == ()


def test_a_part_that_is_none_as_a_whole_has_the_names_in_the_config() -> None:
    forms = Declared({"x/0": FORMS["y"], "x/1/a": FORMS["y"]}, alone=False)
    assert forms.unfold("x", None) == (None, {"a": None})
    assert forms.unfold("y", None) is None
    assert forms.unfold("x", 3) == 3


def test_in_one_process_everything_is_here() -> None:
    with pytest.raises(AbsentInputError, match=r"input 'y' is None, and all clusters are in this process") as caught:
        signature(GIVEN["source"][1:], declared=Declared(FORMS))
    assert "nb.here()" in caught.value.mend
    assert signature(GIVEN["all"], declared=Declared(FORMS))[0].absent == ()


BAD = {
    "type": (np.ones((4, 3)), "float64[None, 3]", "dtype: float64"),
    "width": (np.ones((4, 5), "float32"), "float32[None, 5]", "shape: [null, 5]"),
    "rank": (np.ones(4, "float32"), "float32[None]", "shape: [null]"),
}


@pytest.mark.parametrize(("given", "said", "mend"), BAD.values(), ids=BAD)
def test_what_is_here_must_be_as_the_config_says(given: Any, said: str, mend: str) -> None:
    with pytest.raises(InputMismatchError) as caught:
        signature([("x", {"target": given})], declared=TWO)
    assert f"'x/target' is {said}, and the config says float32[None, 3]" in caught.value.what
    assert mend in caught.value.mend


def test_a_whole_argument_keeps_its_first_axis() -> None:
    layout, _ = signature([("y", None)], frozenset({"y"}), TWO)
    assert layout.specs == (tf.TensorSpec([8], tf.float32),)
    assert layout.batched == (False,)
