"""The device of a worker: its syntax, its assignment, and the error of a host without it."""

from __future__ import annotations

import pytest

from tests.processes import zygote
from whale_nebula.config import load
from whale_nebula.errors import ConfigError
from whale_nebula.launch.attach import Identity
from whale_nebula.launch.placed import identities
from whale_nebula.launch.placement import Placement


def config(*devices: str | None) -> dict[str, object]:
    workers = [
        {"address": f"127.0.0.1:{7101 + number}", **({} if device is None else {"device": device})}
        for number, device in enumerate(devices)
    ]
    return {"clusters": {"gpu": {"workers": workers}}, "security": {"insecure": True}}


@pytest.mark.parametrize(
    ("written", "read"),
    [("CPU", "CPU"), ("cpu:0", "CPU"), ("/GPU:0", "GPU:0"), ("gpu", "GPU:0"), ("/device:GPU:3", "GPU:3")],
)
def test_it_is_written_as_tensorflow_writes_it(written: str, read: str) -> None:
    assert load(config(written)).clusters["gpu"].workers[0].device == read


@pytest.mark.parametrize("written", ["TPU:0", "GPU:one", "GPU 0", ""])
def test_what_is_no_device_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        load(config(written))


def test_each_worker_is_told_its_own() -> None:
    loaded = load(config("GPU:1", None, "CPU"))
    addresses = {f"gpu/{n}": worker.address for n, worker in enumerate(loaded.clusters["gpu"].workers)}
    told = identities(Placement(tuple(addresses), addresses), loaded, {})
    assert [each.device for each in told.values()] == ["GPU:1", None, "CPU"]
    assert Identity.from_json(told["gpu/0"].to_json()).device == "GPU:1"


TAKES = """
import sys
from whale_nebula.errors import ConfigError
from whale_nebula.runtime.session.task import take
import tensorflow as tf
if "late" in sys.argv:
    tf.ones(1)
try:
    take(sys.argv[1], "gpu/0")
    print(tf.config.get_visible_devices())
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["CPU"], "'CPU'"),
        (["GPU:7"], "GPU:7, and TensorFlow finds"),
        (["GPU:7", "late"], "GPU:7, and TensorFlow"),
    ],
)
def test_a_worker_takes_it_or_says_why_not(arguments: list[str], said: str) -> None:
    done = zygote.run("-c", TAKES, *arguments)
    assert said in done.stdout, done.stderr
    assert "GPU" not in done.stdout or arguments[0] != "CPU"
