"""The cluster object: a planner's data on devices and links, as frozen records with units in their fields' names.

A number is None if it is neither configured nor measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from whale_nebula.config.place import split_address
from whale_nebula.config.schema import Cluster, Config, Line, Links, WorkerSpec
from whale_nebula.errors import ConfigError
from whale_nebula.errors.text import align_columns, did_you_mean
from whale_nebula.plain import from_plain, to_plain, write_json

FORMAT = "whale_nebula clusters 1"
ANY = "any"
"""The kind of a device without one in the config: TensorFlow's choice."""
HERE = "localhost"
"""The machine of workers without an address, and of those at a loopback address."""


@dataclass(frozen=True)
class Device:
    """The device of a worker: its `kind` is "cpu", "gpu" or, if unknown, "any".

    `flops_per_s` is from the config, or the measured rate of matrix products; `rates` are the measured FLOP/s by kind
    of kernel ("matmul", "conv", "elementwise"), and empty if the config has `flops`. `call_seconds` is the time of one
    call of an empty compiled function. `cores` is 1 if unknown; with `cores_said` it is from the config, and stays.
    `price_per_hour` is in the currency of the links' `cost_per_gb`.

    >>> Device(rates={"matmul": 2e11}, flops_per_s=1e11).rate_of("matmul"), Device(flops_per_s=5e12).rate_of("conv")
    (200000000000.0, 5000000000000.0)
    """

    kind: str = ANY
    cores: int = 1
    flops_per_s: float | None = None
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    call_seconds: float | None = None
    price_per_hour: float | None = None
    cores_said: bool = False

    def complete_from(self, other: Device) -> tuple[Device, list[str]]:
        """Fill in missing values from another record of the device; returns the names of the values filled in, none if
        that record is of a different kind. Rates by kernel belong to `flops_per_s`, and are not copied if that is known
        here.
        """
        if ANY not in (self.kind, other.kind) and self.kind != other.kind:
            return self, []
        names = ("flops_per_s", "memory_bytes", "memory_bytes_per_s", "call_seconds", "price_per_hour")
        taken = [name for name in names if getattr(self, name) is None and getattr(other, name) is not None]
        rates = self.rates or (other.rates if self.flops_per_s is None else {})
        made = replace(
            self,
            kind=other.kind if self.kind == ANY else self.kind,
            cores=self.cores if self.cores_said else other.cores if other.cores_said else max(self.cores, other.cores),
            cores_said=self.cores_said or other.cores_said,
            rates=rates,
            **{name: getattr(other, name) for name in taken},
        )
        return made, [*taken, *(f"rates.{kernel}" for kernel in rates if kernel not in self.rates)]

    def rate_of(self, kernel: str) -> float | None:
        """FLOP/s of one kind of kernel, or the overall rate if that one was not measured."""
        return self.rates.get(kernel, self.flops_per_s)


@dataclass(frozen=True)
class LinkRate:
    """One direction of a link. With a rate of None transfers take no time.

    >>> LinkRate(7.5e6, 0.02).seconds(1_500_000), str(LinkRate(7.5e6, 0.02, 0.01, 0.08))
    (0.22, '60mbit, 20ms, 1%, 0.08 per GB')
    """

    rate_bytes_per_s: float | None = None
    delay_s: float = 0.0
    loss: float = 0.0
    cost_per_gb: float = 0.0

    @classmethod
    def of(cls, line: Line) -> LinkRate:
        """Convert a link of a config, to bytes."""
        return cls(None if line.rate is None else line.rate / 8, line.delay, line.loss, line.cost)

    @property
    def takes_time(self) -> bool:
        """Whether it has a rate or a delay."""
        return self.rate_bytes_per_s is not None or self.delay_s > 0

    def complete_from(self, other: LinkRate) -> LinkRate:
        """Return it unchanged if it has a rate; otherwise with the rate and missing values of another record of it."""
        if self.rate_bytes_per_s is not None:
            return self
        loss, cost = self.loss or other.loss, self.cost_per_gb or other.cost_per_gb
        return LinkRate(other.rate_bytes_per_s, self.delay_s or other.delay_s, loss, cost)

    def seconds(self, nbytes: float) -> float:
        """Seconds from the first byte sent to the last one received, on an otherwise idle link."""
        return self.delay_s + (nbytes / self.rate_bytes_per_s if self.rate_bytes_per_s else 0.0)

    def __str__(self) -> str:
        line = Line(None if self.rate_bytes_per_s is None else 8 * self.rate_bytes_per_s, self.delay_s, self.loss)
        return f"{line}, {self.cost_per_gb:g} per GB" if self.cost_per_gb else str(line)


@dataclass(frozen=True)
class Collective:
    """Cost model of a collective ("all-reduce", "all-gather", "all-to-all") among `workers` workers of a cluster: alpha
    + beta · bytes of the whole tensor.

    >>> Collective("all-reduce", 1e-4, 1e-9).seconds(1e6), Collective("all-reduce", 1e-4, 1e-9).among(4).workers
    (0.0011, 4)
    """

    kind: str
    alpha_s: float
    beta_s_per_byte: float
    workers: int = 2

    def seconds(self, nbytes: float) -> float:
        """Seconds for a tensor of this size."""
        return self.alpha_s + self.beta_s_per_byte * nbytes

    def among(self, workers: int) -> Collective:
        """The model for a different number of workers, for a ring: n - 1 rounds, and (n - 1) / n of the bytes."""
        rounds = (workers - 1) / (self.workers - 1)
        beta = self.beta_s_per_byte * rounds * self.workers / workers
        return Collective(self.kind, self.alpha_s * rounds, beta, workers)

    def __str__(self) -> str:
        rest = f"{format_quantity(self.alpha_s, 's')} + {format_quantity(self.beta_s_per_byte * 1e6, 's')} for each MB"
        return f"{self.kind} of {self.workers}: {rest}"


@dataclass(frozen=True)
class WorkerInfo:
    """A worker: its name ("gpu/0"), its machine, its device, and its relative speed.

    Workers on one machine share it: the device of each has all of its cores and memory.
    """

    name: str
    machine: str = HERE
    device: Device = field(default_factory=Device)
    speed: float = 1.0


@dataclass(frozen=True)
class ClusterInfo:
    """A cluster: its workers, the link between two of them, and its collectives."""

    name: str
    workers: tuple[WorkerInfo, ...]
    inside: LinkRate = field(default_factory=LinkRate)
    collectives: tuple[Collective, ...] = ()

    @property
    def ring(self) -> LinkRate:
        """The link between two neighbors of a ring of workers: the configured `inside`, else derived from measured
        all-reduces.

        >>> ClusterInfo("gpu", (), collectives=(Collective("all-reduce", 2e-3, 1e-9),)).ring.delay_s
        0.001
        >>> ClusterInfo("gpu", (), collectives=(Collective("all-reduce", 2e-3, 0.0),)).ring.rate_bytes_per_s is None
        True
        """
        for each in () if self.inside.takes_time else self.collectives:
            if each.kind == "all-reduce":  # a byte of the tensor is 2 (n - 1) / n bytes on each line
                rounds = 2.0 * (each.workers - 1)
                beta = each.beta_s_per_byte  # 0.0 where bytes take no time that could be measured
                return LinkRate(rounds / each.workers / beta if beta else None, each.alpha_s / rounds)
        return self.inside


@dataclass(frozen=True)
class Provenance:
    """The provenance of a measured number: the date (ISO), the spread of its runs (the interquartile range, as a share
    of the median; None if it was measured once), and the machine's fingerprint.
    """

    date: str
    spread: float | None
    machine: str


@dataclass(frozen=True)
class Clusters:
    """All clusters of a run, the links between them in each direction, and the costs of codecs.

    `codecs` are the seconds of one core for a byte of a tensor, at both ends together, by the text of a codec.
    `measured` has the provenance of measured numbers, by "codecs.int8", "gpu/0.rates.matmul", "gpu/0.memory_bytes",
    "gpu.collectives.all-reduce", "gpu>npu"; numbers without an entry are from the config.

    >>> from whale_nebula.config import load, parse_links
    >>> config = {"clusters": {"gpu": {"flops": "5T"}, "npu": {}}}
    >>> found = Clusters.of(load(config), parse_links("60mbit,20ms"))
    >>> found.cluster("gpu").workers[0].device.flops_per_s, str(found.between("gpu", "npu"))
    (5000000000000.0, '60mbit, 20ms')
    >>> Clusters.from_json(found.to_json()) == found
    True
    """

    clusters: tuple[ClusterInfo, ...]
    links: Mapping[tuple[str, str], LinkRate] = field(default_factory=dict)
    codecs: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, Provenance] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, links: Links | None = None, sizes: Mapping[str, int] | None = None) -> Clusters:
        """The clusters of a configuration. `sizes` are the clusters of a run with their numbers of workers, of which
        the first ones run; the default is the config's.
        """
        joined = config.links if links is None else links
        names = tuple(config.clusters or joined.names) if sizes is None else tuple(sizes)
        configured = {name: config.clusters.get(name, Cluster(name)) for name in names}
        counts = {name: len(each.workers) or 1 for name, each in configured.items()} if sizes is None else sizes
        made = tuple(_create_cluster(configured[name], counts[name]) for name in names)
        pairs = permutations(names, 2)
        return cls(made, {(a, b): LinkRate.of(joined.between(a, b)) for a, b in pairs})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the clusters, in their order."""
        return tuple(each.name for each in self.clusters)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """All workers, cluster by cluster."""
        return tuple(worker for each in self.clusters for worker in each.workers)

    def cluster(self, name: str) -> ClusterInfo:
        """The cluster of a name."""
        for each in self.clusters:
            if each.name == name:
                return each
        raise ConfigError(f"there is no cluster {name!r}", mend=did_you_mean(name, self.names))

    def between(self, a: str, b: str) -> LinkRate:
        """The link from cluster `a` to cluster `b`; within one, the link between its workers."""
        return self.cluster(a).inside if a == b else self.links.get((a, b), LinkRate())

    def complete_from(self, other: Clusters) -> Clusters:
        """Fill in missing values from another cluster object, by names; existing ones are kept.

        >>> lacks = Clusters((ClusterInfo("gpu", (WorkerInfo("gpu/0", device=Device(flops_per_s=5e12)),)),))
        >>> knows = Clusters((ClusterInfo("gpu", (WorkerInfo("gpu/0", device=Device("gpu", 8, 1e12, 2**34)),)),))
        >>> lacks.complete_from(knows).workers[0].device.rate_of("matmul")
        5000000000000.0
        >>> lacks.complete_from(knows).workers[0].device.memory_bytes
        17179869184
        """
        taken, made, links = [], [], dict(self.links)
        clusters = {each.name: each for each in other.clusters}
        devices = {worker.name: worker.device for worker in other.workers}
        for cluster in self.clusters:
            workers = []
            for worker in cluster.workers:
                device, names = worker.device.complete_from(devices.get(worker.name, Device()))
                workers.append(replace(worker, device=device))
                taken += [f"{worker.name}.{name}" for name in names]
            known = clusters.get(cluster.name, cluster)
            sums = cluster.collectives or known.collectives
            taken += [f"{cluster.name}.collectives.{each.kind}" for each in sums if not cluster.collectives]
            inside = cluster.inside.complete_from(known.inside)
            taken += [f"{cluster.name}>{cluster.name}"] * (inside != cluster.inside)
            made.append(replace(cluster, workers=tuple(workers), inside=inside, collectives=sums))
        for (a, b), link in self.links.items():
            links[a, b] = link.complete_from(other.between(a, b)) if {a, b} <= clusters.keys() else link
            taken += [f"{a}>{b}"] * (links[a, b] != link)
        codecs = {**other.codecs, **self.codecs}
        taken += [f"codecs.{name}" for name in codecs if name not in self.codecs]
        sources = {name: other.measured[name] for name in taken if name in other.measured}
        return Clusters(tuple(made), links, codecs, {**self.measured, **sources})

    def resize(self, counts: Mapping[str, int]) -> Clusters:
        """The clusters with other numbers of workers: the first ones stay, and the costs of collectives are those among
        so many.
        """
        made = []
        for each in self.clusters:
            count = counts.get(each.name, 0)
            sums = tuple(one.among(count) for one in each.collectives) if count > 1 else ()
            made.append(replace(each, workers=each.workers[:count], collectives=sums))
        return replace(self, clusters=tuple(made))

    # ------------------------------------------------------------------ as text
    def to_json(self) -> str:
        """Serialize as JSON; numbers are in bytes and seconds."""
        return json.dumps({"format": FORMAT, **to_plain(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any], where: str | None = None) -> Clusters:
        """Parse the output of `to_json`, or the same as a dict."""
        try:
            document = json.loads(text) if isinstance(text, str) else text
            if document.get("format", FORMAT) != FORMAT:
                raise ValueError(f"its format is {document['format']!r}, not {FORMAT!r}")
            made: Clusters = from_plain(cls, document)
            _refuse_invalid(made)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            mend = "write one with whale-nebula measure --save clusters.json, or nb.clusters().save(path)"
            raise ConfigError("this is not a cluster object", where=where, why=why, mend=mend) from None
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file for `load`."""
        try:
            write_json(path, json.loads(self.to_json()))
        except OSError as error:
            raise ConfigError(
                "cannot write the cluster object",
                where=str(path),
                why=error.strerror,
                mend="create the folder first",
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Clusters:
        """Read a file written by `save`."""
        try:
            text = Path(path).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
            mend = "write one with whale-nebula measure --save clusters.json"
            raise ConfigError("cannot read the cluster object", where=str(path), why=why, mend=mend) from None
        return cls.from_json(text, where=str(path))

    def to_mermaid(self) -> str:
        """A Mermaid flowchart: clusters with their workers, and the links between them."""
        return mermaid(self)

    def __str__(self) -> str:
        return table(self)


def _create_cluster(cluster: Cluster, size: int) -> ClusterInfo:
    """A cluster of a config, with this number of workers."""
    specs = [*cluster.workers[:size], *[None] * (size - len(cluster.workers))]
    workers = tuple(_create_worker(f"{cluster.name}/{number}", spec, cluster) for number, spec in enumerate(specs))
    return ClusterInfo(cluster.name, workers, LinkRate.of(cluster.inside))


def _create_worker(name: str, spec: WorkerSpec | None, cluster: Cluster) -> WorkerInfo:
    speed = 1.0 if spec is None else spec.relative_speed

    def find(key: str) -> Any:
        """The worker's own value of a key, else that of its cluster; a rate there is that at average speed."""
        own, common = getattr(spec, key, None), getattr(cluster, key)
        if own is not None or common is None:
            return own
        return common * speed if key in _RATES else common

    kind = find("kind") if spec is None or spec.device is None else spec.device.partition(":")[0].lower()
    device = Device(
        kind or ANY, find("cores") or 1, find("flops"), find("memory"), find("memory_rate"),
        price_per_hour=find("price"), cores_said=find("cores") is not None,
    )  # fmt: skip
    return WorkerInfo(name, HERE if spec is None else machine_of(spec.address), device, speed)


_RATES = ("flops", "memory_rate")


def machine_of(address: str) -> str:
    """The machine of an address.

    >>> machine_of("10.77.0.2:7101"), machine_of("127.0.0.1:7101"), machine_of("[fd00::2]:7101")
    ('10.77.0.2', 'localhost', 'fd00::2')
    """
    host, _ = split_address(address)
    return HERE if host in ("localhost", "127.0.0.1", "::1") else host


def _refuse_invalid(clusters: Clusters) -> None:
    """Refuse invalid contents: negative numbers, duplicate names, unknown names, and collectives of one worker."""
    names = [each.name for each in clusters.clusters] + [each.name for each in clusters.workers]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ValueError(f"the name {double!r} occurs twice")
    for each in clusters.clusters:
        if alone := [one.kind for one in each.collectives if one.workers < 2]:
            raise ValueError(f"a collective needs two workers, but {alone[0]} of {each.name!r} has fewer")
    for pair in clusters.links:
        if unknown := [name for name in pair if name not in clusters.names]:
            raise ValueError(f"a link ends at {unknown[0]!r}, which is not one of the clusters")
    for path, number in _list_numbers(to_plain(clusters), ""):
        if isinstance(number, bool) or not isinstance(number, int | float) or number < 0:
            raise ValueError(f"{path.lstrip('.')} is {number!r}, not a number >= 0")


_WORDS = frozenset({"name", "machine", "kind", "date", "cores_said"})


def _list_numbers(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The values of numeric fields, each with its path of keys; None is omitted."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        if isinstance(each, dict | list):
            yield from _list_numbers(each, f"{path}.{key}")
        elif each is not None and key not in _WORDS:
            yield f"{path}.{key}", each


_UNKNOWN = "?"


def format_quantity(number: float | None, unit: str, step: float = 1000.0) -> str:
    """A number with a prefix of its unit, to three digits.

    >>> format_quantity(9.42e10, "FLOP/s"), format_quantity(2**34, "B", 1024.0)
    ('94.2 GFLOP/s', '16 GiB')
    >>> format_quantity(76e-6, "s"), format_quantity(None, "s")
    ('76 µs', '?')
    """
    if number is None:
        return _UNKNOWN
    power = 0
    while number >= step and power < 5:
        number, power = number / step, power + 1
    while 0 < number < 1 and power > -3:
        number, power = number * step, power - 1
    prefix = ("", "k", "M", "G", "T", "P", "n", "µ", "m")[power]
    between = "i" if step == 1024.0 and prefix else ""
    return f"{float(f'{number:.3g}'):g} {prefix.upper() if between else prefix}{between}{unit}"


def table(clusters: Clusters) -> str:
    """Workers, links, collectives and codecs, a line each, with the date of measured numbers."""
    priced = any(worker.device.price_per_hour is not None for worker in clusters.workers)
    rows = [["worker", "machine", "device", "memory", "FLOP/s", "call", *["per hour"] * priced]]
    for worker in clusters.workers:
        device = worker.device
        cores = f"{device.kind}, {device.cores} core{'s' * (device.cores != 1)}"
        if device.kind == ANY and not device.cores_said:
            cores = _UNKNOWN
        memory, call = format_quantity(device.memory_bytes, "B", 1024.0), format_quantity(device.call_seconds, "s")
        if device.memory_bytes_per_s is not None:
            memory += f", {format_quantity(device.memory_bytes_per_s, 'B/s')}"
        rows.append([worker.name, worker.machine, cores, memory, _format_rates(device), call])
        if priced:
            price = device.price_per_hour
            rows[-1].append(_UNKNOWN if price is None else f"{price:g}")
    lines = align_columns(rows)
    for each in clusters.clusters:
        if len(each.workers) > 1:
            lines.append(f"inside {each.name}: {each.inside}")
        lines += [f"inside {each.name}: {one}" for one in each.collectives]
    lines += [f"{a} -> {b}: {link}" for (a, b), link in clusters.links.items()]
    if clusters.codecs:
        durations = (f"{name} {format_quantity(seconds * 1e6, 's')}" for name, seconds in clusters.codecs.items())
        lines.append(f"codecs, per MB: {', '.join(durations)}")
    dates = sorted(each.date for each in clusters.measured.values())
    return "\n".join([*lines, *([f"measured {dates[0][:10]}"] if dates else [])])


def _format_rates(device: Device) -> str:
    if not device.rates:
        return format_quantity(device.flops_per_s, "")
    return ", ".join(f"{kernel} {format_quantity(rate, '')}" for kernel, rate in device.rates.items())


def mermaid(clusters: Clusters) -> str:
    """A flowchart: a box for each cluster with its workers, and an arrow for each link; one arrow if both directions
    are equal.
    """
    lines = ["flowchart LR"]
    for number, cluster in enumerate(clusters.clusters):
        lines.append(f'    subgraph c{number}["{cluster.name}"]')
        for index, worker in enumerate(cluster.workers):
            rate = format_quantity(worker.device.rate_of("matmul"), "FLOP/s")
            memory = format_quantity(worker.device.memory_bytes, "B", 1024.0)
            said = [worker.name, worker.device.kind, *(each for each in (rate, memory) if each != _UNKNOWN)]
            lines.append(f'        w{number}_{index}["{"<br>".join(said)}"]')
        lines.append("    end")
    place = {name: f"c{number}" for number, name in enumerate(clusters.names)}
    for (a, b), link in clusters.links.items():
        back = clusters.links.get((b, a))
        if back != link:
            lines.append(f'    {place[a]} -->|"{link}"| {place[b]}')
        elif clusters.names.index(a) < clusters.names.index(b):
            lines.append(f'    {place[a]} <-->|"{link}"| {place[b]}')
    return "\n".join(lines)
