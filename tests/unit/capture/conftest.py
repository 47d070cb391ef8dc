"""Isolation of capture tests: no shared run, and no record of warnings given once."""

from collections.abc import Iterator

import pytest

import whale_nebula as nb
from whale_nebula import site
from whale_nebula.capture import keras_scopes
from whale_nebula.scopes import hints


@pytest.fixture(autouse=True)
def isolated_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hints, "_warned", set())
    monkeypatch.setattr(site, "_warned", set())
    monkeypatch.setattr(keras_scopes, "_scoped", set())
    monkeypatch.setattr(keras_scopes, "_cloned", set())
    nb.shutdown()
    yield
    nb.shutdown()
