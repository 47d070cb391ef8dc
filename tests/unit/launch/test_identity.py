"""The environment variable that tells a worker who it is."""

import pytest

from whale_nebula.errors import ConfigError
from whale_nebula.launch.attach import attach
from whale_nebula.launch.identity import VARIABLE, Identity, Peer

IDENTITY = Identity("gpu/0", "gpu", {"npu/0": Peer("npu", 5)}, "run-1", None, leash=6, launcher=1)


def test_an_identity_comes_back() -> None:
    assert Identity.from_json(IDENTITY.to_json()) == IDENTITY


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpu/0",
        "[]",
        "{}",
        '{"peers": {}}',
        '{"peers": 3}',
        IDENTITY.to_json().replace('"fd"', '"socket"'),
    ],
)
def test_what_no_launcher_wrote_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        Identity.from_json(text)


def test_a_process_that_no_launcher_started_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    attach.cache_clear()
    assert attach() is None


def test_the_identity_of_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's own children inherit the variable, but they are not that worker."""
    monkeypatch.setenv(VARIABLE, IDENTITY.to_json())
    attach.cache_clear()
    with pytest.raises(ConfigError, match="not the worker 'gpu/0'"):
        attach()
    monkeypatch.delenv(VARIABLE)
    assert attach() is None
    attach.cache_clear()
