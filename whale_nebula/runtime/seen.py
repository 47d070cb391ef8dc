"""What processes tell each other of their last step, so that one of them can show all clusters.

It goes with the sheet that begins a step: what is shown of the others is one step old.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from whale_nebula.errors.foreign_text import escape_foreign_text
from whale_nebula.report.records import Elsewhere, LinkReport, StageReport

Told = Mapping[str, Any]
_MOST = 1000  # a peer may tell of no more stages or links than this


def tell(stages: Mapping[str, StageReport], links: Mapping[str, LinkReport]) -> Told:
    """A step of this process, as plain lists.

    >>> tell({"gpu": StageReport(0.25, 0.5, cluster="gpu", in_flight=2)}, {"gpu->npu": LinkReport(8, 10, 8, 1, 0.5)})
    {'stages': {'gpu': [0.25, 0.5, 2, 'gpu']}, 'links': {'gpu->npu': [8, 10, 8, 1, 0.5]}}
    """
    return {
        "stages": {
            name: [_short(each.compute_seconds), _short(each.wait_seconds), each.in_flight, each.cluster]
            for name, each in stages.items()
        },
        "links": {
            name: [each.payload_bytes, each.bytes, each.raw_bytes, each.frames, _short(each.seconds)]
            for name, each in links.items()
        },
    }


def hear(sheets: Iterable[Mapping[str, Any]]) -> Elsewhere:
    """The stages and links that others told of; what is no such thing is left out, as it is only shown.

    >>> found = hear([{"seen": {"stages": {"npu": [0.5, 0.1, 1, "npu"]}, "links": {}}}, {"seen": None}, {}])
    >>> found.stages["npu"].wait_seconds, found.links
    (0.1, {})
    """
    stages: dict[str, StageReport] = {}
    links: dict[str, LinkReport] = {}
    for sheet in sheets:
        seen = sheet.get("seen")
        for name, numbers in _table(seen, "stages", 4):
            compute, wait, in_flight, cluster = numbers
            cluster = escape_foreign_text(cluster)
            stages[name] = StageReport(_float(compute), _float(wait), cluster, _int(in_flight) or None)
        for name, numbers in _table(seen, "links", 5):
            payload, total, raw, frames = map(_int, numbers[:4])
            links[name] = LinkReport(payload, total, raw, frames, _float(numbers[4]) or 0.0)
    return Elsewhere(stages, links)


def _table(seen: Any, part: str, columns: int) -> list[tuple[str, list[Any]]]:
    found = seen.get(part) if isinstance(seen, dict) else None
    rows = list(found.items())[:_MOST] if isinstance(found, dict) else []
    return [(escape_foreign_text(name), row) for name, row in rows if isinstance(row, list) and len(row) == columns]


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _float(given: Any) -> float | None:
    return float(given) if isinstance(given, int | float) else None


def _int(given: Any) -> int:
    return given if isinstance(given, int) else 0
