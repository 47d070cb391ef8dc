"""The documentation's user-defined codecs: its programs run, and the codecs train."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import whale_nebula as nb
from tests.parity.codec_step import StepResults, train_with_codec
from whale_nebula.codec import CODECS

PAGE = Path(__file__).parents[3] / "docs" / "codecs.md"


@pytest.fixture(autouse=True)
def documented_codecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The programs of the section run, one after the other, as those of one module."""
    before = dict(CODECS)
    nb.shutdown()
    nb.init(links="10gbit,0ms")
    section = PAGE.read_text("utf-8").partition("## Your own codec")[2].partition("\n## ")[0]
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    programs = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        exec(compile(program, str(PAGE), "exec"), vars(page))
    yield
    nb.shutdown()
    CODECS.clear()
    CODECS.update(before)


@functools.cache
def train_uncompressed() -> StepResults:
    """What is left where nothing is compressed, once for all."""
    return train_with_codec({})


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("sign", marks=pytest.mark.grid),
        "pooled(4) >> int8",
        pytest.param("pooled(2) >> sign", marks=pytest.mark.grid),
    ],
)
def test_user_codec_trains_with_the_planned_bytes(text: str) -> None:
    found, plain = train_with_codec({"codec": text}, plan=True), train_uncompressed()
    assert found.codecs[-1]["b0 gpu->npu"] == text
    assert np.isfinite(found.losses).all()
    assert found.losses == pytest.approx(plain.losses, rel=0.5)
    assert found.plan is not None
    for link in ("gpu->npu", "npu->gpu"):
        assert found.links[-1][link].payload_bytes == found.plan.links[link].bytes
        assert found.links[-1][link].payload_bytes < 0.6 * plain.links[-1][link].payload_bytes


def test_gradient_uses_the_same_pooled_codec() -> None:
    found = train_with_codec({"codec": "pooled(4)", "backward": None}, plan=True)
    assert found.codecs == [{"b0 gpu->npu": "pooled(4)", "b0 npu->gpu": "pooled(4)"}] * 3
