"""Two sites over mutual TLS with a compressed boundary have the results of one process, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parity.codec_step import CODECS
from tests.processes.sites import SEED, prepare_sites
from tests.processes.worker_runs import run_in_this_process
from tests.processes.workers import train

SAMPLE = ["int4", "svd", "axes", "topk", "mask and rank", "late", "ramp"]
"""The cases of one run; a second test runs every codec in every schedule."""
DEADLINE = 240.0


def check_cases(folder: Path, cases: Sequence[str]) -> None:
    with prepare_sites(folder) as found:
        found.start("train", "train_compressed", *cases)
        expected = run_in_this_process(train.train_compressed, *cases, links="10gbit,0ms", seed=SEED)
        codes = {cluster: site.wait(DEADLINE) for cluster, site in found.sites.items()}
        assert codes == {"gpu": 0, "npu": 0}, found["npu"].last_output
        for case in cases:
            assert found.get_common(case) == expected[case], case
            each = [site.reports[f"{case} sent"] for site in found.sites.values()]
            sent = {link: count for part in each for link, count in part.items() if count[0]}
            assert sent == expected[f"{case} sent"], case


@pytest.mark.grid
def test_sites_train_as_one_process(tmp_path: Path) -> None:
    check_cases(tmp_path, SAMPLE)


@pytest.mark.grid
def test_zero_bubble_sites_train_as_one_process(tmp_path: Path) -> None:
    check_cases(tmp_path, ["none,4,zero-bubble", "int8,4,zero-bubble"])


@pytest.mark.grid
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "zero-bubble"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_codec_trains_as_in_one_process_in_every_schedule(tmp_path: Path, micro_batches: int, schedule: str) -> None:
    check_cases(tmp_path, [f"{name},{micro_batches},{schedule}" for name in CODECS])
