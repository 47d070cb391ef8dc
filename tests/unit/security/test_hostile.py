"""Certificates, heads, lists and logs of strangers are accepted or refused with a message: a sample of
`tests.fuzz.credentials`.
"""

import pytest

from tests.fuzz import credentials

SAMPLES = {"certificates": 1500, "heads": 750, "lists": 250, "logs": 125}


def test_every_target_has_a_sample() -> None:
    assert SAMPLES.keys() == credentials.TARGETS.keys()


@pytest.mark.parametrize("target", SAMPLES)
def test_no_error_of_another_kind_leaves_a_decoder(target: str) -> None:
    report = credentials.run(target, 1, SAMPLES[target])
    assert report["failure"] is None, report["failure"]
    assert report["mutations"] == SAMPLES[target]
