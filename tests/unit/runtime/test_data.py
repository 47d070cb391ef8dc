"""`nb.data`: rows of a published dataset in a `fit`, in the owner's cluster and from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.datasets.conftest import Owner, Site, certify, owner, site  # noqa: F401 - fixtures
from whale_nebula.config import Links, load
from whale_nebula.errors import AccessError, AccountError, ConfigError, OptionError
from whale_nebula.launch.attach import Attachment
from whale_nebula.runtime.data import _open_client, _read_ahead
from whale_nebula.runtime.run import Run


@pytest.fixture
def config(site: Site) -> Iterator[dict[str, Any]]:  # noqa: F811
    """The same data by two names: over a line as an account, and as its owner."""
    site.owner.publish()
    site.owner.grant("ana")
    certify(site.owner, "ana", site.tmp / "of-ana")
    elsewhere = {"at": f"127.0.0.1:{site.port}", "folder": str(site.tmp / "of-ana")}
    yield {"run": "mt", "data": {"gpu": elsewhere}}
    nb.shutdown()


def make_local_config(site: Site) -> dict[str, Any]:  # noqa: F811
    return {"run": "mt", "data": {"gpu": {"registry": str(site.owner.home / "certs")}}}


def fail() -> Iterator[int]:
    raise OSError("it is gone")


def test_error_of_a_source_that_cannot_be_opened_is_raised() -> None:
    with pytest.raises(OSError, match="it is gone"):
        list(_read_ahead(fail, 2))


def ages(dataset: tf.data.Dataset) -> list[list[int]]:
    return [batch["age"].numpy().tolist() for batch in dataset]


def test_batches_are_equal_locally_and_remotely(site: Site, config: dict[str, Any]) -> None:  # noqa: F811
    nb.init(config)
    remote = nb.data("gpu://corpus", batch=30, seed=4)
    assert (len(remote), remote.element_spec["age"]) == (4, tf.TensorSpec((None,), tf.int64, "age"))
    first, second = ages(remote), ages(remote)
    nb.shutdown()
    nb.init(make_local_config(site))
    direct = nb.data("gpu://corpus", batch=30, seed=4)
    assert (ages(direct), ages(direct)) == (first, second)
    assert first != second and sorted(age for batch in second for age in batch) == list(range(100))
    assert ages(nb.data("gpu://corpus", batch=60)) == [[*range(60)], [*range(60, 100)]]
    whole = nb.data("gpu://corpus", batch=60, drop_remainder=True)
    assert (ages(whole), whole.element_spec["age"].shape) == ([[*range(60)]], (60,))


def test_skipped_batches_are_not_read(site: Site, config: dict[str, Any]) -> None:  # noqa: F811
    nb.init(config)
    found = nb.data("gpu://corpus", batch=30, seed=4)
    whole = ages(found)
    before = len(site.access_records)
    assert ages(nb.data("gpu://corpus", batch=30, seed=4).skip(3)) == whole[3:]
    assert len(site.access_records) == before + 1
    assert ages(found.skip(9)) == []


def test_strings_are_received_unchanged(site: Site, config: dict[str, Any]) -> None:  # noqa: F811
    column = {"dtype": "string", "raw": True}
    site.owner.publish(transform=[], schema={"age": {"dtype": "int64"}, "name": column})
    nb.init(config)
    (batch,) = nb.data("gpu://corpus", batch=100)
    assert batch["name"].numpy()[:2].tolist() == [b"n0", b"n1"]
    site.owner.publish(name="empty", transform=[], schema={"age": {"dtype": "int64"}, "name": column})
    site.owner.publish(
        name="few",
        transform=[{"aggregate": {"by": "name", "least": 2}}],
        schema={"name": column},
    )
    site.owner.grant("ana", "few")
    assert list(nb.data("gpu://few", batch=10)) == []


def train(folder: Path | None, config: dict[str, Any], epochs: int) -> list[np.ndarray]:
    keras.utils.clear_session(free_memory=False)  # as in a process of its own
    keras.utils.set_random_seed(1)
    nb.init(config, checkpoint=None if folder is None else {"folder": str(folder), "every": 1})
    inputs = keras.Input((1,))
    with nb.cluster():
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(4, name="hidden")(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1, name="answer")(hidden)
    model = keras.Model(inputs, outputs, name="mine")
    model.compile(keras.optimizers.SGD(1e-5), "mse")

    def pair(row: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        age = tf.cast(row["age"], tf.float32)[:, None]
        return age, 2 * age

    dataset = nb.data("gpu://corpus", batch=40, seed=2).map(pair)
    model.fit(dataset, epochs=epochs, verbose=0)
    values = [np.array(value) for value in model.get_weights()]
    nb.shutdown()
    return values


def test_resumed_fit_is_bit_identical(site: Site, config: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    """Trained in one go on the owner's side; and elsewhere, broken off after an epoch."""
    whole = train(None, make_local_config(site), 3)
    train(tmp_path / "saved", config, 1)
    assert all(map(np.array_equal, train(tmp_path / "saved", config, 3), whole))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nb.data("corpus", batch=1), OptionError, "does not name a dataset"),
        (lambda: nb.data("gpu://../x", batch=1), OptionError, "does not name a dataset"),
        (lambda: nb.data("gpu://corpus"), OptionError, "batch"),
        (lambda: nb.data("gpu://corpus", batch=0), OptionError, "is out of range"),
        (lambda: nb.data("gpu://corpus", batch="8"), OptionError, "is not an integer"),
        (lambda: nb.data("gpu://corpus", batch=8, seed=-1), OptionError, "negative"),
        (lambda: nb.data("gpu://corpus", batch=8, purpose=3), OptionError, "is not a string"),
        (lambda: nb.data("gpux://corpus", batch=8), ConfigError, "has no 'data' entry"),
        (lambda: nb.data("gpu://corpsu", batch=8), AccessError, "may not read|unknown dataset"),
        (lambda: nb.data("gpu://corpus", batch=8, purpose="other"), AccessError, "may not read"),
    ],
)
def test_invalid_data_calls_are_refused(config: dict[str, Any], call: Any, error: Any, message: str) -> None:
    nb.init(config)
    with pytest.raises(error, match=message):
        call()


def test_refusal_during_a_pass_is_raised_with_its_reason(site: Site, config: dict[str, Any]) -> None:  # noqa: F811
    site.owner.publish(limits={"account": {"rows": 250}})
    nb.init(config)
    with pytest.raises(AccessError, match="has reached the total limit of dataset 'corpus'"):
        for _ in range(3):
            list(nb.data("gpu://corpus", batch=100).map(lambda batch: batch["age"]))
    nb.shutdown()
    with pytest.raises(AccessError, match="has reached the total limit of dataset 'corpus'"):
        train(None, config, 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"gpu": {}}, "missing address of the data service of 'gpu'"),
        ({"gpu": {"at": "nowhere"}}, "is not an address"),
        ({"gpu": {"att": "a:1"}}, "unknown key 'att'"),
        ({"gpu": "a:1"}, "is not a mapping"),
    ],
)
def test_invalid_data_config_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        nb.init({"data": data})


def test_folder_without_certificates_is_refused(tmp_path: Path) -> None:
    nb.init({"data": {"gpu": {"at": "127.0.0.1:1", "folder": str(tmp_path)}}})
    with pytest.raises(AccessError, match="missing certificate of an account of gpu") as caught:
        nb.data("gpu://corpus", batch=8)
    assert "whale-nebula login --cluster gpu" in caught.value.mend
    nb.shutdown()


def test_unreachable_data_service_is_reported(site: Site, config: dict[str, Any]) -> None:  # noqa: F811
    config["data"]["gpu"]["at"] = "127.0.0.1:1"
    nb.init(config)
    with pytest.raises(AccountError, match="is unreachable"):
        nb.data("gpu://corpus", batch=8)


@pytest.mark.parametrize("account", ["ana", "bob"])
def test_account_on_the_owners_machine_needs_a_grant(site: Site, account: str) -> None:  # noqa: F811
    """It is the account that the worker's certificate names."""
    site.owner.publish()
    site.owner.grant("ana")
    home = site.owner.home / "certs"
    paths = certify(site.owner, account, site.tmp / "worker")._replace(revoked=home / "revoked.json")
    attached = Attachment("gpu/0", "gpu", {}, listen="127.0.0.1:1", security=paths)
    run = Run(load(make_local_config(site)), Links(), attachment=attached)
    run.clusters = ["gpu"]
    reading = _open_client(run, "gpu", None, "")
    if account == "ana":
        assert reading.describe("corpus").count == 100
    else:
        with pytest.raises(AccessError, match="bob may not read"):
            reading.describe("corpus")
    for close in run.closers:
        close()
    (access_records,) = (home / "audit").glob("data-gpu-worker-0.jsonl")
    message = [json.loads(line) for line in access_records.read_text().splitlines()]
    assert message[0]["certificate"] and [each["account"] for each in message if each["action"] == "read"] == (
        ["bob"] if account == "bob" else []
    )
