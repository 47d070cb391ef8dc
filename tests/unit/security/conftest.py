"""An authority and the credentials of two gateways, for the tests of a module."""

import pytest

from tests.unit.security.authorities import GATE, OTHER_GATE, Home
from whale_nebula.security import Credentials


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home.at(tmp_path_factory.mktemp("authority") / "certs")


@pytest.fixture(scope="module")
def gate(home: Home) -> Credentials:
    return home.credentials(GATE)


@pytest.fixture(scope="module")
def other(home: Home) -> Credentials:
    return home.credentials(OTHER_GATE)
