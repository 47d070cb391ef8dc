"""Load and validate a configuration: every key and value is checked, and errors name their position."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from whale_nebula.config import quantities
from whale_nebula.config.place import Place, read_address, read_device, read_device_kind
from whale_nebula.config.schema import (
    CHECKPOINT_OVERHEAD,
    DEPENDS,
    DISPLAYS,
    GATEWAY_GRACE_SECONDS,
    KEPT_CHECKPOINTS,
    MEASURE_SECONDS,
    MOST_RESTARTS,
    PATIENCE_SECONDS,
    PORT_CONFLICT_FIX,
    PORT_CONFLICT_REASON,
    Checkpointing,
    Cluster,
    Config,
    DataHome,
    Elastic,
    Forbid,
    InputSpec,
    Line,
    Links,
    Restarts,
    Security,
    WorkerSpec,
    find_shared_addresses,
)
from whale_nebula.errors import ConfigError
from whale_nebula.errors.text import did_you_mean

_EXAMPLE = "clusters: {gpu: {}, npu: {}}"


def read_yaml(path: Path, what: str = "the config", example: str = _EXAMPLE) -> Place:
    """Read the values in a YAML file; a duplicate key is refused, because YAML would drop the first one."""
    try:
        text = path.read_text("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_duplicates(node, str(path))
        value = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        reason, mend = "it is not UTF-8 text", "save the file in UTF-8"
        if isinstance(error, OSError):
            reason, mend = error.strerror or str(error), "give the path of a YAML file"
        raise ConfigError(f"{what} cannot be read", where=str(path), why=reason, mend=mend) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        why = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{what} is not valid YAML", where=where, why=why, mend=f"write it like {example}") from None
    if not isinstance(value, dict | None):
        raise ConfigError(f"{what} is not a mapping", where=str(path), mend=f"begin it like {example}")
    return Place(value, source=str(path), lines=dict(_find_lines(node, "")))


def _find_lines(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    """Each path of keys, as in a `Place`, with its line in the file."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = f"{path}.{key.value}" if path else str(key.value)
            yield below, key.start_mark.line + 1
            yield from _find_lines(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield f"{path}[{number}]", value.start_mark.line + 1
            yield from _find_lines(value, f"{path}[{number}]")


def _refuse_duplicates(node: yaml.Node | None, file: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                where, why = f"{file}:{key.start_mark.line + 1}", "YAML would silently drop the first value"
                raise ConfigError(f"duplicate key {name!r}", where=where, why=why, mend="remove one of the two")
            seen.add(name)
            _refuse_duplicates(value, file)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_duplicates(value, file)


DTYPES = (
    "bfloat16", "bool", "complex64", "complex128", "float16", "float32", "float64", "int8", "int16", "int32",
    "int64", "string", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
_SEEDS = 2**32 - 1  # the largest that NumPy accepts
_NAME = re.compile(r"\w([\w.-]*\w)?")  # the syntax of names in scopes


def load(source: str | os.PathLike[str] | Mapping[str, Any] | Config | None, written: str = "") -> Config:
    """Load the config from a file or a dict; None is an empty config. `written` is the dict's position, for errors.

    >>> load({"clutsers": {}})
    Traceback (most recent call last):
    ...
    whale_nebula.errors.ConfigError: NB-500 unknown key 'clutsers' (clutsers)
      mend: did you mean 'clusters'?
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, str | os.PathLike):
        return _read_config(read_yaml(Path(source).expanduser()))
    return _read_config(Place(dict(source) if isinstance(source, Mapping) else source, source=written))


def _read_config(place: Place) -> Config:
    root = place.read_table((*(field.name for field in fields(Config)), *_OUTPUTS))
    clusters = {name: _read_cluster(name, each) for name, each in root.get("clusters").read_entries().items()}
    patience = root.get("patience").read_or(quantities.read_seconds, PATIENCE_SECONDS)
    if not patience:
        why = "every wait would fail immediately"
        raise root.get("patience").make_error("patience is zero", why=why, mend="patience: 120s")
    outputs = {name: each.read_text() for name, each in root.get("outputs").read_entries().items()}
    outputs |= {name: path for name in _OUTPUTS if (path := root.get(name).read_or(Place.read_text, None)) is not None}
    config = Config(
        run=root.get("run").read_or(Place.read_text, None),
        clusters=clusters,
        links=_read_links(root.get("links"), clusters),
        security=_read_security(root.get("security")),
        inputs={name: _read_input(each) for name, each in root.get("inputs").read_entries().items()},
        results=root.get("results").read_or(lambda place: place.read_choice(("everywhere", "owner")), "everywhere"),
        weights=root.get("weights").read_or(lambda place: place.read_choice(("everywhere", "own")), "everywhere"),
        patience=patience,
        gateway_grace=root.get("gateway_grace").read_or(quantities.read_seconds, GATEWAY_GRACE_SECONDS),
        measure=root.get("measure").read_or(quantities.read_seconds, MEASURE_SECONDS),
        restarts=_read_restarts(root.get("restarts")),
        seed=root.get("seed").read_or(lambda place: int(place.read_number(least=0, most=_SEEDS, integer=True)), None),
        plan=root.get("plan").read_or(_read_paths, ()),
        show=root.get("show").read_or(lambda place: place.read_choice(DISPLAYS), DISPLAYS[0]),
        outputs=outputs,
        elastic=_read_elastic(root.get("elastic"), clusters),
        checkpoint=root.get("checkpoint").read_or(parse_checkpoint, None),
        approvals=root.get("approvals").read_or(Place.read_text, None),
        data={name: _read_data_home(name, each, clusters) for name, each in root.get("data").read_entries().items()},
        forbid=tuple(_read_forbid_rule(each, clusters) for each in root.get("forbid").read_items()),
    )
    for worker, conflict in find_shared_addresses(config.addresses):
        cluster, number = worker.rsplit("/", 1)
        place = list(root.get("clusters").get(cluster).get("workers").read_items())[int(number)]
        raise place.make_error(conflict, why=PORT_CONFLICT_REASON, mend=PORT_CONFLICT_FIX)
    return config


def _read_forbid_rule(place: Place, clusters: Mapping[str, Cluster]) -> Forbid:
    """Parse a rule such as "y -> npu", or a table with exceptions."""
    if isinstance(place.value, str):
        words = [word.strip() for word in place.value.split("->")]
        if len(words) != 2 or not all(words):
            raise place.make_error(
                f"{place.value!r} is not a rule of the form 'input -> cluster'", mend="forbid: [y -> npu]"
            )
        rule = Place({"input": words[0], "cluster": words[1]}, place.path, place.source, place.lines)
        return _read_forbid_rule(rule, clusters)
    table = place.read_table(("input", "cluster", "allow"))
    name, cluster = table.get("input").read_text(), table.get("cluster")
    if clusters and cluster.read_text() not in clusters:
        raise _make_unknown_cluster_error(cluster, cluster.read_text(), clusters)
    allow = table.get("allow")
    if isinstance(allow.value, str):
        allow = Place([allow.value], allow.path, allow.source, allow.lines)
    return Forbid(name, cluster.read_text(), tuple(each.read_choice(DEPENDS) for each in allow.read_items()))


def _read_data_home(name: str, place: Place, clusters: Mapping[str, Cluster]) -> DataHome:
    """Parse the place where a cluster's data is read; by default the cluster's gateway."""
    table = place.read_table(field.name for field in fields(DataHome))
    found = DataHome(
        table.get("at").read_or(read_address, None),
        *(table.get(key).read_or(Place.read_text, None) for key in ("folder", "registry")),
    )
    if found.at is None and found.registry is None:
        gateway = clusters[name].gateway if name in clusters else None
        if gateway is not None:
            return replace(found, at=gateway)
        mend = f'data: {{{name}: {{at: "gpu.example.org:7100", folder: certs}}}}'
        why = "neither 'at' nor 'registry' is set, and the cluster has no gateway"
        raise place.make_error(f"missing address of the data service of {name!r}", why=why, mend=mend)
    return found


def _read_elastic(place: Place, clusters: Mapping[str, Cluster]) -> dict[str, Elastic]:
    """Parse the allowed numbers of workers of clusters."""
    found = {}
    for name, each in place.read_entries().items():
        if name not in clusters:
            raise _make_unknown_cluster_error(each, name, clusters)
        table = each.read_table(("min", "max"))
        most = table.get("max").read_or(lambda count: int(count.read_number(least=1, integer=True)), None)
        most = max(1, len(clusters[name].workers)) if most is None else most
        least = table.get("min").read_or(lambda count: int(count.read_number(least=0, integer=True)), 1)
        if least > most:
            raise each.make_error(f"min: {least} is greater than max: {most}", mend=f"{name}: {{min: 1, max: {most}}}")
        found[name] = Elastic(least, most)
    return found


def parse_checkpoint(place: Place) -> Checkpointing:
    """Parse where and how often checkpoints are written: a folder, or a table.

    >>> parse_checkpoint(Place({"folder": "runs/a", "every": "30s"})).seconds
    30.0
    """
    if isinstance(place.value, str):
        return Checkpointing(place.read_text())
    table = place.read_table(("folder", "keep", "every", "overhead", "memory"))
    if table.get("folder").value is None:
        raise place.make_error("missing checkpoint folder", mend=f"{place.path}: {{folder: runs/a}}")
    overhead = table.get("overhead").read_or(quantities.read_share, CHECKPOINT_OVERHEAD)
    if not overhead:
        raise table.get("overhead").make_error("overhead is zero", mend="overhead: 0.01, or remove checkpoint:")
    steps, seconds = _read_interval(table.get("every"))
    memory = table.get("memory")
    memory_steps, memory_seconds = (None, None) if isinstance(memory.value, bool) else _read_interval(memory)
    return Checkpointing(
        table.get("folder").read_text(),
        keep=table.get("keep").read_or(lambda keep: int(keep.read_number(least=1, integer=True)), KEPT_CHECKPOINTS),
        steps=steps,
        seconds=seconds,
        overhead=overhead,
        memory=memory.value is not False,
        memory_steps=memory_steps,
        memory_seconds=memory_seconds,
    )


def _read_interval(place: Place) -> tuple[int | None, float | None]:
    """Parse a frequency: a number of steps, or seconds."""
    if place.value is None:
        return None, None
    if isinstance(place.value, int) and not isinstance(place.value, bool):
        return int(place.read_number(least=1, integer=True)), None
    if quantities.find_kind(str(place.value)) != "delay":
        name = place.path.rpartition(".")[2]
        raise place.make_error(
            f"{place.value!r} is neither a number of steps nor a time", mend=f"{name}: 100, or {name}: 30s"
        )
    return None, quantities.read_seconds(place)


_OUTPUTS = ("metrics", "tensorboard")
"""Outputs with their own keys; others are listed in `outputs`."""


def _read_cluster(name: str, place: Place) -> Cluster:
    if not _NAME.fullmatch(name):
        why = "a name consists of letters, digits and '_', with '.' or '-' between them"
        valid_name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "gpu"
        raise place.make_error(
            f"{name!r} is not a valid cluster name", why=why, mend=f"clusters: {{{valid_name}: {{}}}}"
        )
    table = place.read_table(("workers", "gateway", *_AMOUNTS, "inside"))
    workers = _read_workers(table.get("workers"))
    gateway = table.get("gateway").read_or(read_address, None)
    same = [number for number, worker in enumerate(workers) if worker.address == gateway]
    if gateway is not None and same:
        raise table.get("gateway").make_error(
            f"the gateway of {name!r} and its worker {name}/{same[0]} have the same address, {gateway}",
            why="each is a separate process and needs its own port",
            mend=f'gateway: "{gateway.rpartition(":")[0]}:7100", or a different port for the worker',
        )
    inside = table.get("inside").read_table(("rate", "delay"))
    return Cluster(name, workers, gateway, inside=_read_line(inside), **_read_amounts(table))


def _read_price(place: Place) -> float:
    return float(place.read_number(least=0))


_AMOUNTS: Mapping[str, Callable[[Place], Any]] = {
    "memory": quantities.read_memory,
    "flops": quantities.flops,
    "price": _read_price,
    "kind": read_device_kind,
    "cores": lambda place: int(place.read_number(least=1, integer=True)),
    "memory_rate": quantities.memory_rate,
}


def _read_amounts(table: Place) -> dict[str, Any]:
    """Parse the resources of a worker, or of each worker of a cluster."""
    return {key: table.get(key).read_or(read, None) for key, read in _AMOUNTS.items()}


def _read_workers(place: Place) -> tuple[WorkerSpec, ...]:
    if isinstance(place.value, int | str):  # a count, or one address
        mend = f"{place.path}: [{place.value if isinstance(place.value, str) else '10.77.0.2:7101'}]"
        raise place.make_error(
            f"{place.value!r} is not a list of workers", why="each worker needs its own address", mend=mend
        )
    return tuple(_read_worker(each) for each in place.read_items())


def _read_worker(place: Place) -> WorkerSpec:
    if isinstance(place.value, str):
        return WorkerSpec(read_address(place))
    table = place.read_table(("address", "device", "speed", *_AMOUNTS))
    found = WorkerSpec(
        address=read_address(table.get("address")),
        device=table.get("device").read_or(read_device, None),
        speed=table.get("speed").read_or(lambda place: float(place.read_number(least=1e-6)), None),
        **_read_amounts(table),
    )
    kind = None if found.device is None else found.device.partition(":")[0].lower()
    if kind is not None and found.kind not in (None, kind):
        what = f"kind {found.kind!r} contradicts device {found.device!r}"
        raise table.get("kind").make_error(
            what, why="the device determines the kind", mend=f"kind: {kind}, or remove kind:"
        )
    return found


def _suggest_pair(clusters: Mapping[str, Cluster]) -> str:
    return ", ".join(list(clusters)[:2] if len(clusters) > 1 else ["gpu", "npu"])


def _read_links(place: Place, clusters: Mapping[str, Cluster]) -> Links:
    pairs: dict[tuple[str, str], Line] = {}
    example = f"links: [{{between: [{_suggest_pair(clusters)}], rate: 60mbit, delay: 20ms}}]"
    if isinstance(place.value, str | Mapping):  # probably a list was meant
        raise place.make_error(f"{place.value!r} is not a list of links", mend=example)
    for each in place.read_items():
        if isinstance(each.value, str):
            raise each.make_error(f"{each.value!r} is not a link", mend=example)
        table = each.read_table(("between", "rate", "delay", "loss", "cost"))
        a, b = _read_ends(table.get("between"), clusters)
        if (a, b) in pairs or (b, a) in pairs:
            raise each.make_error(f"duplicate link between {a!r} and {b!r}", mend="remove one of the two links")
        pairs[a, b] = _read_line(table)
    return Links(None, pairs)


def _read_line(table: Place) -> Line:
    """Parse the link in the keys of a table."""
    return Line(
        rate=table.get("rate").read_or(quantities.rate, None),
        delay=table.get("delay").read_or(quantities.read_seconds, 0.0),
        loss=table.get("loss").read_or(quantities.read_share, 0.0),
        cost=table.get("cost").read_or(_read_price, 0.0),
    )


def _make_unknown_cluster_error(place: Place, name: str, clusters: Mapping[str, Cluster]) -> ConfigError:
    """The error for a cluster that the config does not list: its name may be wrong, or its entry may be missing."""
    mend = f"{did_you_mean(name, clusters)} Otherwise, add it: clusters: {{{name}: {{}}}}"
    return place.make_error(f"unknown cluster {name!r}", mend=mend)


def _read_ends(place: Place, clusters: Mapping[str, Cluster]) -> tuple[str, str]:
    names = [place.read_text()] if isinstance(place.value, str) else [each.read_text() for each in place.read_items()]
    if len(names) != 2 or names[0] == names[1]:
        raise place.make_error(
            f"{place.value!r} is not a pair of clusters", mend=f"between: [{_suggest_pair(clusters)}]"
        )
    for name in names:
        if clusters and name not in clusters:
            raise _make_unknown_cluster_error(place, name, clusters)
    return names[0], names[1]


def _read_security(place: Place) -> Security:
    table = place.read_table(field.name for field in fields(Security))
    files = {name: table.get(name).read_or(Place.read_text, None) for name in ("ca", "cert", "key", "revoked")}
    return Security(**files, insecure=table.get("insecure").read_or(Place.read_boolean, False))


def _read_restarts(place: Place) -> Restarts:
    """Parse the restarts: their number, or a table with that and the delay before the first."""
    if not isinstance(place.value, Mapping):
        return Restarts(place.read_or(_read_restart_count, 0))
    table = place.read_table(field.name for field in fields(Restarts))
    if table.get("most").value is None:
        raise place.make_error("missing number of restarts", mend=f"{place.path}: {{most: 3, wait: 1s}}")
    return Restarts(
        _read_restart_count(table.get("most")), table.get("wait").read_or(quantities.read_seconds, Restarts().wait)
    )


def _read_restart_count(place: Place) -> int:
    return int(place.read_number(least=0, most=MOST_RESTARTS, integer=True))


def _read_size(axis: Place) -> int:
    """Parse the size of an axis of an input's shape; sizes that are not fixed are null."""
    if not isinstance(axis.value, int) or isinstance(axis.value, bool) or axis.value < 0:
        mend = "shape: [null, 64], with null for sizes that are not fixed"
        raise axis.make_error(f"{axis.value!r} is neither null nor an integer of at least 0", mend=mend)
    return axis.value


def _read_input(place: Place) -> InputSpec:
    table = place.read_table(("shape", "dtype"))
    if table.get("shape").value is None:
        raise place.make_error("missing shape of the input", mend=f"{place.path}: {{shape: [null, 64]}}")
    shape = tuple(each.read_or(_read_size, None) for each in table.get("shape").read_items())
    return InputSpec(shape, table.get("dtype").read_or(lambda dtype: dtype.read_choice(DTYPES), "float32"))


def _read_paths(place: Place) -> tuple[str, ...]:
    """Parse a path, or several."""
    return (
        (place.read_text(),) if isinstance(place.value, str) else tuple(each.read_text() for each in place.read_items())
    )
