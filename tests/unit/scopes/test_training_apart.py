"""`nb.replica(sync_every=...)` as it is written: what goes together, and what is refused with which mend."""

from __future__ import annotations

from typing import Any

import pytest

import whale_nebula as nb
from whale_nebula import scopes
from whale_nebula.errors import OptionError
from whale_nebula.scopes import apart_of, parsing

pytestmark = pytest.mark.filterwarnings("ignore:.*holds no step")


def said(**options: Any) -> str:
    with nb.cluster(["gpu", "npu"]), nb.compress(int4=True), nb.replica(**options):
        apart = apart_of(scopes.open_frames())
        return str(apart)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 100}, "they meet every 100 steps and have 10 steps for it, int4, average"),
        ({"sync_every": 1, "outer": "nesterov"}, "they meet every step, int4, nesterov"),
        ({"sync_every": 8, "fragments": 2}, "every 8 steps in 2 fragments that each have 1 step to arrive in"),
        ({"sync_every": 8, "delay": 0}, "they meet every 8 steps, int4"),
        ({"sync_every": 8, "outer": nb.outer.Nesterov(rate=1.0)}, "Nesterov(rate=1.0, momentum=0.9)"),
        ({"sync_every": 8, "mode": "async"}, "each pushes its difference every 8 steps, at most 1 rounds ahead"),
        ({"sync_every": 8, "mode": "async", "staleness": 3}, "at most 3 rounds ahead, int4, average"),
    ],
)  # fmt: skip
def test_what_is_said_and_what_it_comes_to(options: dict[str, Any], text: str) -> None:
    assert text in said(**options)


@pytest.mark.parametrize(
    ("options", "mend"),
    [
        ({"sync_every": 0}, "sync_every=1"),
        ({"sync_every": 2.5}, "sync_every=2"),
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
        ({"sync_every": 4, "mode": "async", "delay": 1}, "leave delay out"),
        ({"sync_every": 4, "mode": "async", "outer": nb.outer.Nesterov(rate=1.0)}, 'outer="average"'),
    ],
)
def test_what_is_refused_names_the_line_to_write(options: dict[str, Any], mend: str) -> None:
    with pytest.raises(OptionError) as refused:
        nb.replica(**options)
    assert mend in str(refused.value)


@pytest.mark.parametrize("compress", [{"svd": 0.5}, {"codec": "auto"}, {"rank": 4}, {"int8": True, "delta": "ids"}])
def test_codecs_of_samples_are_none_for_weights(compress: dict[str, Any]) -> None:
    with (
        pytest.raises(OptionError, match="cannot cross"),
        nb.cluster(),
        nb.compress(**compress),
        nb.replica(sync_every=4),
    ):
        apart_of(scopes.open_frames())


def test_it_is_drawn_with_what_is_unusual() -> None:
    with parsing() as tree, nb.cluster(), nb.replica(2, sync_every=10):
        pass
    assert str(tree) == "cluster\n  replica count=2 sync_every=10\n"
