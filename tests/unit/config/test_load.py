"""clusters.yaml and its dict: the parsed configuration, and errors; the device of a worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import zygote
from whale_nebula.config import Cluster, Config, InputSpec, Line, Security, WorkerSpec, load
from whale_nebula.config.schema import Restarts
from whale_nebula.errors import ConfigError, NebulaError
from whale_nebula.launch.attach import Identity
from whale_nebula.launch.placement import Placement
from whale_nebula.launch.worker_processes import create_identities

COMPLETE_CONFIG = """\
run: bert
clusters:
  gpu:
    workers: ["10.0.0.1:7101", {address: "10.0.0.2:7101", device: "/GPU:0", speed: 2, memory: 80GB, flops: 60TFLOPS}]
    gateway: "gate.example.org:443"
    kind: GPU
    cores: 8
    memory: 16GiB
    memory_rate: 900 GB/s
    flops: 5T
    price: 2.5
    inside: {rate: 10gbit, delay: 50us}
  npu:
    workers: ["[fd00::7]:7101"]
links:
  - {between: [gpu, npu], rate: 60mbit, delay: 20ms, loss: 0, cost: 0.08}
security: {ca: ca.pem, cert: gpu.pem, key: gpu.key, revoked: none, insecure: false}
inputs:
  x: {shape: [null, 64], dtype: int32}
  y: {shape: [null]}
results: owner
weights: own
patience: 2min
seed: 7
"""


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "clusters.yaml"
        path.write_text(text, "utf-8")
        return path

    return write


def test_complete_config_file_is_parsed(write_config: Callable[[str], Path]) -> None:
    config = load(write_config(COMPLETE_CONFIG))
    assert config.run == "bert"
    assert config.clusters == {
        "gpu": Cluster(
            "gpu",
            (WorkerSpec("10.0.0.1:7101"), WorkerSpec("10.0.0.2:7101", "GPU:0", 2.0, 80_000_000_000, 6e13)),
            "gate.example.org:443",
            memory=2**34,
            flops=5e12,
            price=2.5,
            inside=Line(1e10, 50e-6),
            kind="gpu",
            cores=8,
            memory_rate=9e11,
        ),
        "npu": Cluster("npu", (WorkerSpec("[fd00::7]:7101"),)),
    }
    assert config.links.pairs == {("gpu", "npu"): Line(60e6, 0.02, 0.0, 0.08)}
    assert config.security == Security("ca.pem", "gpu.pem", "gpu.key", False, "none")
    assert config.inputs == {"x": InputSpec((None, 64), "int32"), "y": InputSpec((None,), "float32")}
    assert (config.results, config.weights, config.patience, config.seed) == ("owner", "own", 120.0, 7)


def test_dict_and_file_give_the_same_config(write_config: Callable[[str], Path]) -> None:
    import yaml

    assert (
        load(yaml.safe_load(COMPLETE_CONFIG))
        == load(write_config(COMPLETE_CONFIG))
        == load(str(write_config(COMPLETE_CONFIG)))
    )


@pytest.mark.parametrize("nothing", [None, {}])
def test_empty_source_gives_default_config(nothing: Any) -> None:
    assert load(nothing) == Config()


def test_empty_file_gives_default_config(write_config: Callable[[str], Path]) -> None:
    assert load(write_config("")) == load(write_config("# only words\n")) == Config()


def test_config_object_is_returned_unchanged() -> None:
    config = Config(seed=3)
    assert load(config) is config


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, Restarts(3)), (0, Restarts()), ({"most": 3}, Restarts(3)), ({"most": 2, "wait": "5s"}, Restarts(2, 5.0))],
    ids=str,
)
def test_restarts_accepts_a_number_or_a_table(value: Any, expected: Restarts) -> None:
    assert load({"restarts": value}).restarts == expected


def test_empty_sections_are_accepted() -> None:
    config = load({"clusters": {"gpu": None, "npu": {}}, "links": None, "security": None, "inputs": {}})
    assert list(config.clusters) == ["gpu", "npu"]


def test_smallest_values_are_accepted() -> None:
    config = load(
        {
            "clusters": {"gpu": {"cores": 1, "price": 0}, "npu": {}},
            "links": [{"between": ["gpu", "npu"], "delay": "0s", "loss": 0, "cost": 0}],
            "elastic": {"gpu": {"min": 0, "max": 1}},
            "inputs": {"x": {"shape": [0]}},
            "checkpoint": {"folder": "a", "keep": 1, "every": 1, "memory": 1},
            "seed": 0,
            "measure": "0s",
            "gateway_grace": "0s",
        }
    )
    checkpointing, elastic = config.checkpoint, config.elastic["gpu"]
    assert checkpointing is not None
    assert (checkpointing.keep, checkpointing.steps, checkpointing.memory_steps) == (1, 1, 1)
    assert (checkpointing.seconds, checkpointing.memory_seconds, checkpointing.memory) == (None, None, True)
    assert (config.clusters["gpu"].cores, config.clusters["gpu"].price, config.seed) == (1, 0.0, 0)
    assert (elastic.least, elastic.most, config.inputs["x"].shape) == (0, 1, (0,))
    assert (config.measure, config.gateway_grace) == (0.0, 0.0)


INVALID_CONFIGS: list[tuple[Any, str, str]] = [
    ({"clutsers": {}}, "clutsers", "did you mean 'clusters'"),
    ({3: 4}, "", "is not a string"),
    ({"run": 3}, "run", "is not a string"),
    ({"run": ""}, "run", "'' is an empty string"),
    ({"clusters": ["gpu"]}, "clusters", "is not a mapping"),
    ({"clusters": {"gpu": {"wrokers": []}}}, "clusters.gpu.wrokers", "did you mean 'workers'"),
    ({"clusters": {"a->b": {}}}, "clusters.a->b", "not a valid cluster name"),
    ({"clusters": {"site/gpu": {}}}, "clusters.site/gpu", "clusters: {site-gpu: {}}"),
    ({"clusters": {"gpu": {"workers": ["h:1", "h:2", "h:1"]}}}, "clusters.gpu.workers[2]", "gpu/0 and gpu/2 have"),
    ({"clusters": {"a": {"workers": ["h:1"]}, "b": {"workers": ["h:1"]}}}, "clusters.b.workers[0]", "a different port"),
    ({"clusters": {"gpu": {"workers": "h:1"}}}, "clusters.gpu.workers", "workers: [h:1]"),
    ({"clusters": {"gpu": {"workers": 2}}}, "clusters.gpu.workers", "workers: [10.77.0.2:7101]"),
    ({"clusters": {"gpu": {"workers": ["h:1", "h:2"], "gateway": "h:2"}}}, "clusters.gpu.gateway", "same address, h:2"),
    ({"clusters": {"gpu": {"workers": ["host"]}}}, "clusters.gpu.workers[0]", "is not an address"),
    ({"clusters": {"gpu": {"workers": ["h:1", "h:70000"]}}}, "clusters.gpu.workers[1]", "is not an address"),
    ({"clusters": {"gpu": {"workers": ["fd00::7:7101"]}}}, "clusters.gpu.workers[0]", "is not an address"),
    ({"clusters": {"gpu": "h:1"}}, "clusters.gpu", "clusters.gpu: {workers: ...}"),
    ({"clusters": {"gpu": {"workers": [7101]}}}, "clusters.gpu.workers[0]", "workers[0]: {address: ...}"),
    (
        {"clusters": {"gpu": {"workers": [{"device": "/GPU:0"}]}}},
        "clusters.gpu.workers[0].address",
        "is not an address",
    ),
    (
        {"clusters": {"gpu": {"workers": [{"address": "h:1", "sped": 2}]}}},
        "clusters.gpu.workers[0].sped",
        "did you mean 'speed'",
    ),
    ({"clusters": {"gpu": {"workers": [{"address": "h:1", "speed": 0}]}}}, "clusters.gpu.workers[0].speed", "number"),
    ({"clusters": {"gpu": {"memory": 16}}}, "clusters.gpu.memory", "16GiB"),
    ({"clusters": {"gpu": {"memory": "16G"}}}, "clusters.gpu.memory", "memory: 16GiB"),
    ({"clusters": {"gpu": {"memory": "0.5B"}}}, "clusters.gpu.memory", "powers of 1024"),
    ({"clusters": {"gpu": {"flops": 5}}}, "clusters.gpu.flops", "5T"),
    ({"clusters": {"gpu": {"flops": "0T"}}}, "clusters.gpu.flops", "positive number"),
    ({"clusters": {"gpu": {"price": "2.5 EUR"}}}, "clusters.gpu.price", "at least 0"),
    ({"clusters": {"gpu": {"kind": "npu"}}}, "clusters.gpu.kind", "kind: gpu, or kind: cpu"),
    ({"clusters": {"gpu": {"cores": 0}}}, "clusters.gpu.cores", "not an integer"),
    ({"clusters": {"gpu": {"memory_rate": "20gbit"}}}, "clusters.gpu.memory_rate", "bytes per second"),
    ({"clusters": {"gpu": {"memory_rate": 20}}}, "clusters.gpu.memory_rate", "20GB/s"),
    ({"clusters": {"gpu": {"memoryrate": "20GB/s"}}}, "clusters.gpu.memoryrate", "did you mean 'memory_rate'"),
    (
        {"clusters": {"gpu": {"workers": [{"address": "h:1", "device": "CPU", "kind": "gpu"}]}}},
        "clusters.gpu.workers[0].kind",
        "kind: cpu, or remove kind:",
    ),
    ({"clusters": {"gpu": {"inside": "10gbit"}}}, "clusters.gpu.inside", "is not a mapping"),
    ({"clusters": {"gpu": {"inside": {"loss": 0.1}}}}, "clusters.gpu.inside.loss", "unknown key"),
    (
        {"clusters": {"gpu": {"workers": [{"address": "h:1", "flops": "5TB"}]}}},
        "clusters.gpu.workers[0].flops",
        "flops: 5T",
    ),
    ({"links": [{"between": ["a", "b"], "cost": -1}]}, "links[0].cost", "at least 0"),
    ({"clusters": {"gpu": {"gateway": "gate"}}}, "clusters.gpu.gateway", "is not an address"),
    ({"links": {"gpu": "npu"}}, "links", "is not a list"),
    ({"links": [{"between": ["gpu"]}]}, "links[0].between", "is not a pair"),
    ({"links": [{"between": ["gpu", "gpu"]}]}, "links[0].between", "is not a pair"),
    ({"links": [{"rate": "60mbit"}]}, "links[0].between", "is not a pair"),
    (
        {"clusters": {"gpu": {}, "npu": {}}, "links": [{"between": ["gpu", "npuu"]}]},
        "links[0].between",
        "did you mean 'npu'",
    ),
    (
        {"clusters": {"gpu": {}}, "links": [{"between": ["gpu", "npu"]}]},
        "links[0].between",
        "Otherwise, add it: clusters: {npu: {}}",
    ),
    ({"links": [{"between": ["a", "b"]}, {"between": ["b", "a"]}]}, "links[1]", "duplicate link"),
    ({"links": [{"between": ["a", "b"], "rate": 60}]}, "links[0].rate", "60mbit"),
    ({"links": [{"between": ["a", "b"], "rate": "60mbps"}]}, "links[0].rate", "is not a rate"),
    ({"links": [{"between": ["a", "b"], "rate": "0mbit"}]}, "links[0].rate", "positive number"),
    ({"links": [{"between": ["a", "b"], "delay": "20"}]}, "links[0].delay", "is not a time"),
    ({"links": [{"between": ["a", "b"], "loss": 1}]}, "links[0].loss", "loss: 0.01"),
    ({"checkpoint": {"folder": "a", "overhead": 2}}, "checkpoint.overhead", "overhead: 0.01"),
    ({"checkpoint": {"folder": "a", "overhead": 0}}, "checkpoint.overhead", "overhead is zero"),
    ({"checkpoint": {"keep": 3}}, "checkpoint", "missing checkpoint folder"),
    ({"checkpoint": {"folder": "a", "keep": 0}}, "checkpoint.keep", "not an integer"),
    ({"checkpoint": {"folder": "a", "every": 0}}, "checkpoint.every", "not an integer"),
    ({"checkpoint": {"folder": "a", "every": "30"}}, "checkpoint.every", "neither a number of steps nor a time"),
    ({"clusters": {"gpu": {}}, "elastic": {"gpu": {"min": 3, "max": 2}}}, "elastic.gpu", "min: 3 is greater than max"),
    ({"clusters": {"gpu": {}}, "elastic": {"gpu": {"min": 2}}}, "elastic.gpu", "gpu: {min: 1, max: 1}"),
    ({"clusters": {"gpu": {}}, "elastic": {"npu": {}}}, "elastic.npu", "did you mean 'gpu'"),
    ({"links": [{"between": ["a", "b"], "latency": "1ms"}]}, "links[0].latency", "choose one of"),
    ({"security": {"insecure": "no"}}, "security.insecure", "neither true nor false"),
    ({"security": {"revoke": "none"}}, "security.revoke", "did you mean 'revoked'"),
    ({"security": {"certs": "x"}}, "security.certs", "did you mean 'cert'"),
    ({"inputs": {"x": {}}}, "inputs.x", "missing shape"),
    ({"inputs": {"x": {"shape": 64}}}, "inputs.x.shape", "is not a list"),
    ({"inputs": {"x": {"shape": [-1, 64]}}}, "inputs.x.shape[0]", "shape: [null, 64]"),
    ({"inputs": {"x": {"shape": [None], "dtype": "flaot32"}}}, "inputs.x.dtype", "did you mean 'float32'"),
    ({"results": "here"}, "results", "choose one of 'everywhere', 'owner'"),
    ({"weights": "mine"}, "weights", "choose one of 'everywhere', 'own'"),
    ({"patience": 120}, "patience", "120s"),
    ({"patience": "0s"}, "patience", "patience is zero"),
    ({"restarts": -1}, "restarts", "restarts: 1"),
    ({"restarts": True}, "restarts", "not an integer"),
    ({"restarts": "3"}, "restarts", "not an integer"),
    ({"restarts": {"mots": 3}}, "restarts.mots", "did you mean 'most'"),
    ({"restarts": {"wait": "1s"}}, "restarts", "{most: 3, wait: 1s}"),
    ({"restarts": {"most": 3, "wait": 1}}, "restarts.wait", "1s"),
    ({"seed": "seven"}, "seed", "not an integer"),
    ({"seed": -1}, "seed", "not an integer"),
    ({"seed": 2**32}, "seed", "not an integer"),
    ({"seed": True}, "seed", "not an integer"),
    (["clusters"], "", "is not a mapping"),
    (3, "", "is not a mapping"),
]


@pytest.mark.parametrize(("config", "place", "message"), INVALID_CONFIGS)
def test_config_error_reports_place_and_fix(config: Any, place: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config)
    assert caught.value.where == place
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("config", "mend"),
    [
        ({"links": "60mbit,20ms"}, "links: [{between: [gpu, npu], rate: 60mbit, delay: 20ms}]"),
        ({"links": [{"between": "alpha"}]}, "between: [gpu, npu]"),
        ({"clusters": {"a": {}, "b": {}}, "links": [{"between": ["c"]}]}, "between: [a, b]"),
        ({"clusters": {"a": {}, "b": {}}, "links": "fast"}, "links: [{between: [a, b], rate: 60mbit, delay: 20ms}]"),
        ({"security": {"insecure": "maybe"}}, "insecure: false"),
    ],
)
def test_suggested_fix_is_valid_config(config: Any, mend: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config)
    import yaml

    assert caught.value.mend == mend
    mended = yaml.safe_load(mend)
    if "insecure" in mended or "between" in mended:
        mended = {"security": mended} if "insecure" in mended else {"links": [mended]}
    load(config | mended)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"seed": "one"}, "'one' is not an integer from 0 to 4294967295"),
        ({"clusters": {"g": {"workers": [{"address": "h:1", "speed": -1}]}}}, "-1 is not a number of at least 1e-06"),
        ({"clusters": {"g": {"price": float("inf")}}}, "inf is not a number of at least 0"),
        ({"inputs": {"x": {"shape": [-1]}}}, "-1 is neither null nor an integer of at least 0"),
    ],
)
def test_number_error_shows_value_and_bounds(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config)
    assert caught.value.what == message


def test_error_in_config_file_reports_the_file(write_config: Callable[[str], Path]) -> None:
    path = write_config("clusters: {gpu: {worker: []}}")
    with pytest.raises(ConfigError, match="did you mean 'workers'") as caught:
        load(path)
    assert caught.value.where == f"{path}:1: clusters.gpu.worker"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("clusters:\n  gpu: {}\n  npu: {}\nlinks:\n  - between: [gpu, npu]\n    rate: 60MB\n", "6: links[0].rate"),
        ("clusters:\n  gpu: {}\nlinks:\n  - {between: [gpu, tpu]}\n", "4: links[0].between"),
        ("clusters:\n  gpu:\n    workers:\n    - 10.77.0.2\n", "4: clusters.gpu.workers[0]"),
        ("clusters:\n  gpu:\n    workers:\n    - device: CPU\n", "4: clusters.gpu.workers[0].address"),
        ("seed: 3\npatience: soon\n", "2: patience"),
        ("clutsers:\n  gpu: {}\n", "1: clutsers"),
        ("results: nowhere", "1: results"),
    ],
)
def test_error_in_config_file_reports_the_line(write_config: Callable[[str], Path], text: str, place: str) -> None:
    path = write_config(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.where == f"{path}:{place}"


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("clusters: {gpu: [", ":1:18", "is not valid YAML"),
        ("[a]: 1", ":1:1", "is not valid YAML"),
        ("run: a\nrun: b\n", ":2", "duplicate key 'run'"),
        ("clusters:\n  gpu: {}\n  gpu: {}\n", ":3", "duplicate key"),
        ("links: [{rate: 1mbit, rate: 2mbit}]", ":1", "duplicate key"),
        ("- a\n- b\n", "", "the config is not a mapping"),
        ("run: !!python/object/apply:os.system ['true']", ":1:6", "is not valid YAML"),
        ("\x00", "", "is not valid YAML"),
    ],
)
def test_invalid_yaml_is_refused_with_its_position(
    write_config: Callable[[str], Path], text: str, where: str, message: str
) -> None:
    path = write_config(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert caught.value.where == f"{path}{where}"


def test_missing_config_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_config_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "clusters.yaml"
    path.write_bytes(b"\xff\xfe\x00run")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["run", "clusters", "links", "security", "inputs", "results", "weights", "patience", "seed", "plan"]


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_dict_gives_a_config_or_an_error_with_a_fix(config: dict[str, Any]) -> None:
    try:
        assert isinstance(load(config), Config)
    except NebulaError as error:
        assert error.mend


def test_data_address_defaults_to_the_gateway() -> None:
    data = {"gpu": {"folder": "of-gpu"}, "npu": {"registry": "certs"}, "tpu": {"at": "10.0.0.9:7300"}}
    clusters = {"gpu": {"gateway": "10.0.0.1:7100"}, "npu": {"gateway": "10.0.0.2:7100"}, "tpu": {}}
    homes = load({"clusters": clusters, "data": data}).data
    assert [homes[name].at for name in data] == ["10.0.0.1:7100", None, "10.0.0.9:7300"]
    with pytest.raises(ConfigError, match="missing address of the data service of 'tpu'"):
        load({"clusters": clusters, "data": {"tpu": {"folder": "of-tpu"}}})


def make_worker_config(*devices: str | None) -> dict[str, object]:
    workers = [
        {"address": f"127.0.0.1:{7101 + number}", **({} if device is None else {"device": device})}
        for number, device in enumerate(devices)
    ]
    return {"clusters": {"gpu": {"workers": workers}}, "security": {"insecure": True}}


@pytest.mark.parametrize(
    ("device", "expected"),
    [("CPU", "CPU"), ("cpu:0", "CPU"), ("/GPU:0", "GPU:0"), ("gpu", "GPU:0"), ("/device:GPU:3", "GPU:3")],
)
def test_device_accepts_tensorflow_spellings(device: str, expected: str) -> None:
    assert load(make_worker_config(device)).clusters["gpu"].workers[0].device == expected


@pytest.mark.parametrize("device", ["TPU:0", "GPU:one", "GPU 0", ""])
def test_invalid_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        load(make_worker_config(device))


def test_worker_identity_contains_its_device() -> None:
    loaded = load(make_worker_config("GPU:1", None, "CPU"))
    addresses = {f"gpu/{n}": worker.address for n, worker in enumerate(loaded.clusters["gpu"].workers)}
    worker_identities = create_identities(Placement(tuple(addresses), addresses), loaded, {})
    assert [each.device for each in worker_identities.values()] == ["GPU:1", None, "CPU"]
    assert Identity.from_json(worker_identities["gpu/0"].to_json()).device == "GPU:1"


DEVICE_SCRIPT = """
import sys
from whale_nebula.errors import ConfigError
from whale_nebula.runtime.session.task import select_device
import tensorflow as tf
if "late" in sys.argv:
    tf.ones(1)
try:
    select_device(sys.argv[1], "gpu/0")
    print(tf.config.get_visible_devices())
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CPU"], "'CPU'"),
        (["GPU:7"], "GPU:7, but TensorFlow finds"),
        (["GPU:7", "late"], "GPU:7, but TensorFlow"),
    ],
)
def test_worker_takes_its_device_or_reports_why_not(arguments: list[str], message: str) -> None:
    result = zygote.run("-c", DEVICE_SCRIPT, *arguments)
    assert message in result.stdout, result.stderr
    assert "GPU" not in result.stdout or arguments[0] != "CPU"
