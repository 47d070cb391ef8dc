"""The environment variable that tells a worker who it is."""

import json
from dataclasses import replace
from typing import Any

import pytest

from whale_nebula.errors import ConfigError
from whale_nebula.launch.attach import VARIABLE, Identity, attach
from whale_nebula.security import Files
from whale_nebula.security import Identity as Owner

FILES = Files.in_folder("/certs", Owner("mt", "gpu"))
ADDRESSED = Identity(
    worker="gpu/0",
    cluster="gpu",
    peers={"npu/0": "npu", "npu/1": "npu"},
    addresses={"npu/0": "10.77.0.2:7101", "npu/1": "[::1]:7101"},
    run_id="mt",
    seed=7,
    launcher_pipe=6,
    launcher=1,
    listen="10.77.0.1:7101",
    security=FILES,
    gateway="10.77.0.9:7100",
    heartbeat_pipe=7,
    patience=20.5,
    config="/srv/clusters.yaml",
)
IDENTITY = Identity("gpu/0", "gpu", {}, {}, "run-1", None, launcher_pipe=6, launcher=1)


@pytest.mark.parametrize(
    "identity",
    [IDENTITY, ADDRESSED, replace(ADDRESSED, security=None, insecure=True, gateway=None, heartbeat_pipe=None)],
)
def test_identity_round_trips_through_json(identity: Identity) -> None:
    assert Identity.from_json(identity.to_json()) == identity


def test_descriptors_lists_inherited_file_descriptors() -> None:
    assert IDENTITY.descriptors == (6,)
    assert ADDRESSED.descriptors == (6, 7)


INVALID_CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("an unknown key", {"listens": "a:1"}, "unexpected keyword argument 'listens'"),
    ("peers in a list", {"peers": []}, "has no attribute 'keys'"),
    ("a peer without an address", {"addresses": {"npu/0": "a:1"}}, "peers and addresses name different workers"),
    ("its own peer", {"peers": {"gpu/0": "gpu"}, "addresses": {"gpu/0": "a:1"}}, "its own peer"),
    ("nobody listens", {"listen": None, "security": None}, "no address to listen on"),
    ("no certificates", {"security": None}, "needs either certificates or insecure=true"),
    ("certificates and insecure", {"insecure": True}, "needs either certificates or insecure=true"),
    ("insecure in words", {"security": None, "insecure": "true"}, "needs either certificates or insecure=true"),
    ("a certificate without a key", {"security": {"ca": "a", "cert": "b"}}, "missing file names: key"),
]


@pytest.mark.parametrize(
    ("change", "why"), [case[1:] for case in INVALID_CHANGES], ids=[case[0] for case in INVALID_CHANGES]
)
def test_inconsistent_identity_is_refused(change: dict[str, Any], why: str) -> None:
    text = json.dumps({**json.loads(ADDRESSED.to_json()), **change})
    with pytest.raises(ConfigError, match=VARIABLE) as refused:
        Identity.from_json(text)
    assert why in refused.value.what


@pytest.mark.parametrize(
    "text",
    ["", "gpu/0", "[]", "{}", '{"peers": {}}', '{"peers": 3}', IDENTITY.to_json().replace('"peers"', '"others"')],
)
def test_invalid_variable_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        Identity.from_json(text)


def test_attach_returns_none_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    attach.cache_clear()
    assert attach() is None


def test_identity_of_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's own children inherit the variable, but they are not that worker."""
    monkeypatch.setenv(VARIABLE, IDENTITY.to_json())
    attach.cache_clear()
    with pytest.raises(ConfigError, match="not worker 'gpu/0'"):
        attach()
    monkeypatch.delenv(VARIABLE)
    assert attach() is None
    attach.cache_clear()
