"""Two sites over mutual TLS with a compressed boundary have the results of one process, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parity.crossing import CODECS
from tests.processes.sites import SEED, sites
from tests.processes.worker_runs import told_alone
from tests.processes.workers import train

SAMPLE = ["int4", "svd", "axes", "topk", "mask and rank", "late", "ramp"]
"""What `make test` runs, one after the other in one run; `--grid` runs every codec in every schedule."""
DEADLINE = 240.0


def check(folder: Path, cases: Sequence[str]) -> None:
    with sites(folder) as found:
        found.start("train", "compressed", *cases)
        expected = told_alone(train.compressed, *cases, links="10gbit,0ms", seed=SEED)
        codes = {cluster: site.wait(DEADLINE) for cluster, site in found.started.items()}
        assert codes == {"gpu": 0, "npu": 0}, found["npu"].said
        for case in cases:
            assert found.same(case) == expected[case], case
            each = [site.told[f"{case} sent"] for site in found.started.values()]
            sent = {link: count for part in each for link, count in part.items() if count[0]}
            assert sent == expected[f"{case} sent"], case


@pytest.mark.grid
def test_two_sites_leave_what_one_process_leaves(tmp_path: Path) -> None:
    check(tmp_path, SAMPLE)


@pytest.mark.grid
def test_gradients_of_weights_that_come_later_leave_what_one_process_leaves(tmp_path: Path) -> None:
    check(tmp_path, ["none,4,zero-bubble", "int8,4,zero-bubble"])


@pytest.mark.grid
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "zero-bubble"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_codec_in_every_schedule(tmp_path: Path, micro_batches: int, schedule: str) -> None:
    check(tmp_path, [f"{name},{micro_batches},{schedule}" for name in CODECS])
