"""What joins two clusters: a rate, a delay and a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whale_nebula.config import quantities
from whale_nebula.config.place import Place


@dataclass(frozen=True, slots=True)
class Line:
    """One direction of a link: bits a second (None: as fast as memory), seconds of delay, share that is lost.

    >>> str(Line(60e6, 0.02)), str(Line())
    ('60mbit, 20ms', 'free')
    """

    rate: float | None = None
    delay: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        parts = [] if self.rate is None else [f"{self.rate / 1e6:.12g}mbit"]
        parts += [f"{self.delay * 1e3:.9g}ms"] * bool(self.delay)
        parts += [f"{self.loss * 100:.6g}%"] * bool(self.loss)
        return ", ".join(parts) or "free"


FREE = Line()


@dataclass(frozen=True)
class Links:
    """All lines: those named by their two ends, and the one for all other pairs."""

    default: Line | None = None
    pairs: Mapping[tuple[str, str], Line] = field(default_factory=dict)

    def between(self, a: str, b: str) -> Line:
        """The line from cluster `a` to cluster `b`; one that is named for one direction holds for both.

        >>> links = parse_links({("gpu", "npu"): "60mbit,20ms"})
        >>> links.between("npu", "gpu").delay, links.between("gpu", "gpu") is FREE
        (0.02, True)
        """
        if a == b:
            return FREE
        return self.pairs.get((a, b)) or self.pairs.get((b, a)) or self.default or FREE


def parse_links(value: Any) -> Links:
    """The `links` of `nb.init`: a line for all pairs, or a dict from pairs to lines.

    >>> parse_links("60mbit,20ms").default
    Line(rate=60000000.0, delay=0.02, loss=0.0)
    """
    if value is None or isinstance(value, Links):
        return value or Links()
    place = Place(value, "links")
    if not isinstance(value, Mapping):
        return Links(line(place))
    pairs = {_pair(place, key): line(Place(each, f"links[{key!r}]")) for key, each in value.items()}
    return Links(None, pairs)


def line(place: Place) -> Line:
    """A line from "60mbit,20ms" (rate, delay and loss in any order), or a Line as it is."""
    if isinstance(place.value, Line):
        return place.value
    if place.value == "free":
        return FREE
    if not isinstance(place.value, str):
        raise place.wrong(f"{place.value!r} is no line", mend='"60mbit,20ms"')
    found: dict[str, float] = {}
    for word in filter(None, (part.strip() for part in place.value.split(","))):
        name = quantities.kind(word)
        if name is None or name in found:
            raise place.wrong(
                f"{word!r} in {place.value!r} is no rate, delay or loss, or the second one",
                why="a line is a rate (60mbit), a delay (20ms) and a loss (1%), each at most once",
                mend='"60mbit,20ms"',
            )
        found[name] = _READERS[name](Place(word, place.path, place.source))
    if not found:
        raise place.wrong("a line without rate and delay", mend='"60mbit,20ms"; leave it out if it is free')
    return Line(found.get("rate"), found.get("delay", 0.0), found.get("loss", 0.0))


_READERS = {"rate": quantities.rate, "delay": quantities.seconds, "loss": quantities.share}


def _pair(place: Place, key: object) -> tuple[str, str]:
    match key:
        case (str(a), str(b)) if a != b:
            return a, b
    raise place.wrong(f"{key!r} is no pair of clusters", mend='{("gpu", "npu"): "60mbit,20ms"}')
