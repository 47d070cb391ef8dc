"""Isolation of report tests: no published reports of other tests."""

from collections.abc import Iterator

import pytest

from whale_nebula.report.published import forget


@pytest.fixture(autouse=True)
def no_published_reports() -> Iterator[None]:
    forget()
    yield
    forget()
