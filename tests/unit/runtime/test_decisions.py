"""Reasons of a plan that `nb.auto_parallel` has chosen."""

from whale_nebula.hardware.clusters import ClusterInfo, Clusters, LinkRate, Provenance
from whale_nebula.runtime.decisions import describe_measured


def test_plan_states_the_dates_of_measured_links_among_other_measurements() -> None:
    """Chains of codecs, which `whale-nebula measure` also measures, have the mark of a link in their names."""
    at, rate = Provenance("2026-11-30", None, "a machine"), LinkRate(1e6)
    measured = dict.fromkeys(["codecs.rank(96) >> int8", "gpu>npu", "gpu>gpu", "npu/0.memory_bytes"], at)
    clusters = Clusters(
        (ClusterInfo("gpu", (), inside=rate), ClusterInfo("npu", ())), {("gpu", "npu"): rate}, measured=measured
    )
    assert describe_measured(clusters) == [
        f"the link gpu->gpu is {rate}, as measured on 2026-11-30",
        f"the link gpu->npu is {rate}, as measured on 2026-11-30",
    ]
