"""The settings that must be equal in the configs of all processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from whale_nebula.config import Config, load
from whale_nebula.errors import ConfigError
from whale_nebula.launch.attach import Attachment
from whale_nebula.runtime.session import rendezvous
from whale_nebula.runtime.session.rendezvous import _agree_on_config, _host, config_sheet, host_digest

FORM = {"shape": [None, 4], "dtype": "int32"}


def told(config: Mapping[str, Any]) -> dict[str, Any]:
    return config_sheet(load(config))


def test_the_same_words_are_agreed_on() -> None:
    own = told({"inputs": {"x": FORM, "y": FORM}, "weights": "own"})
    _agree_on_config("gpu/0", own, {"npu/0": told({"inputs": {"y": FORM, "x": FORM}, "weights": "own"})})
    _agree_on_config("gpu/0", config_sheet(Config()), {})


DIFFERENT = [
    ({"results": "owner"}, "'results': gpu/0: everywhere; npu/0: owner"),
    ({"weights": "own"}, "'weights': gpu/0: everywhere; npu/0: own"),
    ({"inputs": {"x": FORM}}, "'inputs': gpu/0: {}; npu/0: {'x': ['int32', [None, 4]]}"),
]


@pytest.mark.parametrize(("other", "said"), DIFFERENT)
def test_what_differs_is_named_with_both(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _agree_on_config("gpu/0", told({}), {"npu/0": told(other)})
    assert said in caught.value.what
    assert "into the config of every cluster" in caught.value.mend


@pytest.mark.parametrize(
    ("peer", "said_by", "drawn", "everywhere", "believed"),
    [
        ("npu/0", "npu/0", True, False, True),
        ("npu/0", "gpu/0", True, False, False),  # what this worker has said of itself proves nothing of another
        ("npu/0", "npu/0", False, False, False),
        ("npu/0", "npu/0", False, True, True),
        ("gpu/1", "gpu/1", False, False, True),
    ],
)
def test_who_shares_a_folder_proves_it(
    monkeypatch: pytest.MonkeyPatch, peer: str, said_by: str, drawn: bool, everywhere: bool, believed: bool
) -> None:
    if not drawn:
        monkeypatch.setattr(rendezvous, "_BOOT", Path("/there/is/none"))
    launched = Attachment("gpu/0", "gpu", {"gpu/1": "gpu", "npu/0": "npu"}, {}, "mt", everywhere=everywhere)
    found = _host(launched, peer, {"host": host_digest("mt", said_by)})
    assert found == (host_digest("mt", "gpu/0") if believed else "")


def test_another_folder_of_the_same_name_is_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two containers of one host have them."""
    folder = tmp_path / "work"
    said = []
    for kept in ("first", "second"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        said.append(host_digest("mt", "gpu/0"))
        assert host_digest("mt", "gpu/0") == said[-1]
        folder.rename(tmp_path / kept)
    assert len(set(said)) == 2
