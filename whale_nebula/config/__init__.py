"""The configuration: clusters.yaml, or the same as a dict.

>>> link = {"between": ["gpu", "npu"], "rate": "60mbit", "delay": "20ms"}
>>> config = load({"clusters": {"gpu": {}, "npu": {}}, "links": [link]})
>>> list(config.clusters), str(config.links.between("npu", "gpu"))
(['gpu', 'npu'], '60mbit, 20ms')
"""

from whale_nebula.config.load import load, parse_checkpoint
from whale_nebula.config.schema import (
    FREE,
    Checkpointing,
    Cluster,
    Config,
    InputSpec,
    Line,
    Links,
    Security,
    WorkerSpec,
    parse_links,
)

__all__ = [
    "FREE",
    "Checkpointing",
    "Cluster",
    "Config",
    "InputSpec",
    "Line",
    "Links",
    "Security",
    "WorkerSpec",
    "load",
    "parse_checkpoint",
    "parse_links",
]
