"""The configuration as typed records."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from whale_nebula.config import quantities
from whale_nebula.config.place import Place
from whale_nebula.errors import ConfigError
from whale_nebula.errors.text import did_you_mean


@dataclass(frozen=True, slots=True)
class Line:
    """One direction of a link: bits per second (None: unlimited), seconds of delay, packet loss, and cost of a gigabyte
    (10^9 bytes).

    >>> str(Line(60e6, 0.02)), str(Line())
    ('60mbit, 20ms', 'free')
    """

    rate: float | None = None
    delay: float = 0.0
    loss: float = 0.0
    cost: float = 0.0

    def __str__(self) -> str:
        parts = [] if self.rate is None else [f"{self.rate / 1e6:.12g}mbit"]
        parts += [f"{self.delay * 1e3:.9g}ms"] * bool(self.delay)
        parts += [f"{self.loss * 100:.6g}%"] * bool(self.loss)
        return ", ".join(parts) or "free"


FREE = Line()


@dataclass(frozen=True)
class Links:
    """All links: those of named pairs, and the default for all others."""

    default: Line | None = None
    pairs: Mapping[tuple[str, str], Line] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The clusters that links name.

        >>> parse_links({("gpu", "npu"): "free", ("npu", "tpu"): "free"}).names
        ('gpu', 'npu', 'tpu')
        """
        return tuple(dict.fromkeys(end for pair in self.pairs for end in pair))

    def between(self, a: str, b: str) -> Line:
        """The link from cluster `a` to cluster `b`; a link configured in one direction applies to both.

        >>> links = parse_links({("gpu", "npu"): "60mbit,20ms"})
        >>> links.between("npu", "gpu").delay, links.between("gpu", "gpu") is FREE
        (0.02, True)
        """
        if a == b:
            return FREE
        return self.pairs.get((a, b)) or self.pairs.get((b, a)) or self.default or FREE


def parse_links(value: Any, clusters: Collection[str] = (), source: str = "") -> Links:
    """Parse the `links` of `nb.init`: a link for all pairs, or a dict from pairs to links.

    If `clusters` are known, the ends of a link must be among them. `source` is the position of the value, for errors.

    >>> parse_links("60mbit,20ms").default
    Line(rate=60000000.0, delay=0.02, loss=0.0, cost=0.0)
    """
    if value is None or isinstance(value, Links):
        return value or Links()
    place = Place(value, "links", source)
    if not isinstance(value, Mapping):
        return Links(read_line(place))
    pairs: dict[tuple[str, str], Line] = {}
    for key, each in value.items():
        a, b = _read_pair(place, key, clusters)
        pairs[a, b] = read_line(Place(each, f"links[{key!r}]", source))
    return Links(None, pairs)


def read_line(place: Place) -> Line:
    """Parse a link such as "60mbit,20ms" (rate, delay and loss in any order); a Line is returned unchanged."""
    if isinstance(place.value, Line):
        return place.value
    if place.value == "free":
        return FREE
    if not isinstance(place.value, str):
        number = isinstance(place.value, int | float) and not isinstance(place.value, bool)
        mend = f'add a unit: "{place.value:g}mbit", "{place.value:g}ms" ...' if number else '"60mbit,20ms"'
        raise place.make_error(f"{place.value!r} is not a link", mend=mend)
    found: dict[str, float] = {}
    for word in filter(None, (part.strip() for part in place.value.split(","))):
        name = quantities.find_kind(word)
        if name is None:
            raise _invalid_word_error(place, word)
        if name in found:
            raise place.make_error(f"duplicate {name} {word!r} in {place.value!r}", why=_PARTS, mend='"60mbit,20ms"')
        found[name] = _READERS[name](Place(word, place.path, place.source))
    if not found:
        raise place.make_error("missing rate and delay", mend='"60mbit,20ms", or "free"')
    return Line(found.get("rate"), found.get("delay", 0.0), found.get("loss", 0.0))


def _invalid_word_error(place: Place, word: str) -> ConfigError:
    guess = quantities.suggest_quantity(word)
    return place.make_error(
        f"{word!r} is not a rate, delay or loss",
        why=quantities.explain_bytes(word) if quantities.convert_to_bits(word) else _PARTS,
        mend=f'did you mean "{guess}"?' if guess else '"60mbit,20ms"',
    )


_PARTS = "a link is a rate (60mbit), a delay (20ms) and a loss (1%), each at most once, separated by commas"
_READERS: Mapping[str, Callable[[Place], float]] = {
    "rate": quantities.rate,
    "delay": quantities.read_seconds,
    "loss": quantities.read_loss,
}


def _read_pair(place: Place, key: object, clusters: Collection[str]) -> tuple[str, str]:
    match key:
        case (str(a), str(b)) if a != b:
            for name in (a, b):
                if clusters and name not in clusters:
                    raise place.make_error(f"unknown cluster {name!r}", mend=did_you_mean(name, clusters))
            return a, b
    names = re.findall(r"\w+", key) if isinstance(key, str) else []
    a, b = names if len(names) == 2 else ("gpu", "npu")
    raise place.make_error(f"{key!r} is not a pair of clusters", mend=f'{{("{a}", "{b}"): "60mbit,20ms"}}')


def cluster_of(worker: str) -> str:
    """The cluster of a worker or gateway, from its name.

    >>> cluster_of("gpu/0"), cluster_of("npu/gateway")
    ('gpu', 'npu')
    """
    return worker.rpartition("/")[0]


PORT_CONFLICT_REASON = "each worker needs its own port"
PORT_CONFLICT_FIX = "give one of them a different port"


def find_shared_addresses(addresses: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Workers that have the same address as an earlier one, each with a description of the conflict.

    >>> list(find_shared_addresses({"gpu/0": "a:7101", "gpu/1": "a:7102", "npu/0": "a:7101"}))
    [('npu/0', 'gpu/0 and npu/0 have the same address, a:7101')]
    """
    worker_by_address: dict[str, str] = {}
    for worker, address in addresses.items():
        other = worker_by_address.setdefault(address, worker)
        if other != worker:
            yield worker, f"{other} and {worker} have the same address, {address}"


PATIENCE_SECONDS = 120.0
GATEWAY_GRACE_SECONDS = 30.0
MEASURE_SECONDS = 30.0
"""The longest time, in seconds, for which the planner measures blocks of a program."""
MOST_RESTARTS = 9999
DISPLAYS = ("none", "lines", "live")
"""The displays of the steps of a run while it trains."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One process of a cluster: its address and its device; optionally its relative speed (`relative_speed`), its bytes
    of memory, its floating-point operations per second, its price per hour, the kind of its device ("cpu" or "gpu"),
    its cores, and the bytes per second of its memory.
    """

    address: str
    device: str | None = None
    speed: float | None = None
    memory: int | None = None
    flops: float | None = None
    price: float | None = None
    kind: str | None = None
    cores: int | None = None
    memory_rate: float | None = None

    @property
    def relative_speed(self) -> float:
        """The configured speed, or 1."""
        return 1.0 if self.speed is None else self.speed


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster: its workers, and the gateway through which others reach them.

    `memory` (bytes), `flops` (FLOP/s at average speed), `price` (money per hour), `kind`, `cores` and `memory_rate`
    (bytes per second at average speed) are defaults for workers without their own; `inside` is the link between two of
    them.
    """

    name: str
    workers: tuple[WorkerSpec, ...] = ()
    gateway: str | None = None
    memory: int | None = None
    flops: float | None = None
    inside: Line = FREE
    price: float | None = None
    kind: str | None = None
    cores: int | None = None
    memory_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Security:
    """Files of the certificates; `insecure` turns TLS off, which every start warns about.

    `revoked` is the deny list, by default `revoked.json` next to `ca`; "none" disables it.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    insecure: bool = False
    revoked: str | None = None


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input that this cluster may omit from its dataset: its shape (None: unknown) and element type."""

    shape: tuple[int | None, ...]
    dtype: str = "float32"


KEPT_CHECKPOINTS = 3
CHECKPOINT_OVERHEAD = 0.035


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Where checkpoints are written, how many are kept, and how often: every `steps` steps or `seconds` seconds, or as
    often as saving takes at most the share `overhead` of the time. With `memory`, they are also kept in memory if a
    launcher restarts workers.
    """

    folder: str
    keep: int = KEPT_CHECKPOINTS
    steps: int | None = None
    seconds: float | None = None
    overhead: float = CHECKPOINT_OVERHEAD
    memory: bool = True
    memory_steps: int | None = None
    memory_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often `whale-nebula run` restarts workers after a failure, and the delay in seconds before the first time."""

    most: int = 0
    wait: float = 1.0

    def find_delay(self, number: int, longest: float) -> float:
        """Seconds before restart `number`, counted from 0: twice as many as before the previous one, up to `longest`.

        >>> [Restarts(MOST_RESTARTS).find_delay(number, longest=60.0) for number in (0, 3, 2000)]
        [1.0, 8.0, 60.0]
        """
        return min(self.wait * 2.0 ** min(number, 1000), longest)


@dataclass(frozen=True, slots=True)
class Elastic:
    """The numbers of workers that a cluster may have during a run; a cluster with no workers has left the run, and
    others run its stages.
    """

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class DataHome:
    """Where published datasets of a cluster's owner are read: at the address of the owner's service, with the account
    certificate in `folder`; inside the owner's cluster, from the `registry` in a local folder.
    """

    at: str | None = None
    folder: str | None = None
    registry: str | None = None


ITSELF, DERIVED, GRADIENT, NUMBER = DEPENDS = ("itself", "derived", "gradient", "number")
"""How a value depends on an input: it is the input, or computed from inputs only; it is computed from it with the
model's weights; it is a gradient of such a value; or it is a single number computed from it, such as a loss or a norm.
"""


@dataclass(frozen=True, slots=True)
class Forbid:
    """An input whose data may not be sent to a cluster, except the kinds in `allow`; "*" means every input.

    >>> str(Forbid("y", "npu", (GRADIENT,)))
    'y -> npu, except gradient'
    """

    input: str
    cluster: str
    allow: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.input} -> {self.cluster}" + f", except {' and '.join(self.allow)}" * bool(self.allow)


@dataclass(frozen=True)
class Config:
    """The content of clusters.yaml, with defaults.

    >>> Config().patience
    120.0
    """

    run: str | None = None
    clusters: Mapping[str, Cluster] = field(default_factory=dict)
    links: Links = field(default_factory=Links)
    security: Security = field(default_factory=Security)
    inputs: Mapping[str, InputSpec] = field(default_factory=dict)
    results: str = "everywhere"
    weights: str = "everywhere"
    patience: float = PATIENCE_SECONDS
    gateway_grace: float = GATEWAY_GRACE_SECONDS
    measure: float = MEASURE_SECONDS
    restarts: Restarts = Restarts()
    seed: int | None = None
    plan: tuple[str, ...] = ()
    show: str = DISPLAYS[0]
    outputs: Mapping[str, str] = field(default_factory=dict)
    checkpoint: Checkpointing | None = None
    elastic: Mapping[str, Elastic] = field(default_factory=dict)
    forbid: tuple[Forbid, ...] = ()
    approvals: str | None = None
    data: Mapping[str, DataHome] = field(default_factory=dict)

    @property
    def run_name(self) -> str:
        """The name of the run, also in certificates."""
        return self.run or "run"

    def gateway_of(self, cluster: str) -> str | None:
        """The address of a cluster's gateway, if it has one."""
        found = self.clusters.get(cluster)
        return None if found is None else found.gateway

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses of the listed workers by name: cluster and number."""
        clusters = self.clusters.values()
        return {f"{each.name}/{n}": worker.address for each in clusters for n, worker in enumerate(each.workers)}

    @property
    def private(self) -> bool:
        """Whether inputs, results or weights remain in their cluster."""
        return bool(self.inputs or self.forbid) or self.results == "owner" or self.weights == "own"
