"""`whale-nebula doctor`: check this machine, its packages and a clusters.yaml against the requirements of this version.

TensorFlow is not loaded, and without --cluster no other host is contacted.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from whale_nebula.checkpoint import files
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.parts import describe_waiting
from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Check, Options, Parser, answer
from whale_nebula.config import Config, load
from whale_nebula.errors import NebulaError
from whale_nebula.report.records import size

_DESCRIPTION = """\
Check the environment: versions of Python, TensorFlow, Keras and other packages against the supported ones, threads,
memory, and missing parts. With --config, a clusters.yaml is also checked.

With --cluster, check what this host needs for a run of that cluster: certificates and their dates, names, ports,
whether other hosts can be reached and accept these certificates, clocks, congestion control, open files, and the link
as measured by bench link. A gateway's host needs no TensorFlow."""

_EPILOG = """\
examples:
  whale-nebula doctor
  whale-nebula doctor --config clusters.yaml
  whale-nebula doctor --config clusters.yaml --cluster gpu
  whale-nebula doctor --config clusters.yaml --cluster gpu --worker 1
  whale-nebula doctor --config clusters.yaml --cluster gpu --gateway
  whale-nebula doctor --json

results of a check:
  ok       no problem
  note     works; for your information
  warning  works now, but will cause problems
  BAD      must be fixed

exit status:
  0   everything that is needed is there
  1   something is missing, unsupported or unreachable; the line explains how to fix it
  2   wrong command line
  78  wrong config"""

_OPTIONS: Options = {
    "--config": ("FILE", "also check this clusters.yaml"),
    "--cluster": ("NAME", "the cluster of this host: check all that a run of it needs"),
    "--worker": ("N", "the index of this host's worker, if its address does not tell"),
    "--gateway": (None, "this host runs the gateway and no worker"),
    "--json": (None, "print one JSON object"),
}
_NETWORK_NEEDS = ("grpcio", "cryptography", "numpy", "google-crc32c")


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = Parser("doctor", _DESCRIPTION, _OPTIONS, epilog=_EPILOG)
    args = parser.read(argv)
    if args.cluster is not None and args.config is None:
        parser.error("--cluster needs --config clusters.yaml")
    if args.worker is not None and (args.cluster is None or args.gateway):
        parser.error("--worker needs --cluster, and cannot be combined with --gateway")
    args.worker = parser.number("--worker", args.worker)
    return answer(args, lambda: _report(args), {NebulaError: arguments.CONFIG})


def _report(args: argparse.Namespace) -> int:
    checks = _check(args)
    ok = all(check.state != "bad" for check in checks)
    document = {"ok": ok, "checks": [asdict(each) for each in checks]}
    print(json.dumps(document, indent=1) if args.json else _format_text(checks))
    return arguments.DONE if ok else arguments.FAILED


def _check(args: argparse.Namespace) -> list[Check]:
    if args.config is None:
        return check_machine(training=not args.gateway)
    checks = check_config(args.config)
    missing = [name for name in _NETWORK_NEEDS if find_version(name) is None]
    if args.cluster is None or missing:
        if args.cluster is not None:
            why = f"not checked without {', '.join(missing)}"
            checks.append(Check("cluster", "bad", args.cluster, why, f"pip install {' '.join(missing)}"))
        return [*check_machine(training=not args.gateway), *checks]
    from whale_nebula.cli.doctor_cluster import check_cluster, find_host

    here = find_host(load(args.config), args.config, args.cluster, worker=args.worker, gateway=args.gateway)
    return [*check_machine(training=here.trains), *checks, *check_cluster(here)]


_MARKS = {"ok": "ok  ", "note": "note", "warning": "WARN", "bad": "BAD "}
_WIDE = 32
"""Maximum width of the column of findings; the explanation of a longer one is on a separate line."""


def _format_text(checks: Sequence[Check]) -> str:
    """The checks as aligned lines, and a summary."""
    names = max(len(check.name) for check in checks)
    findings = max(len(check.found) for check in checks if len(check.found) <= _WIDE)
    lines, indent = [], " " * (names + 10)
    for check in checks:
        why, mend = check.why.replace("\n", f"\n{indent}"), check.mend.replace("\n", f"\n{indent}      ")
        apart = f"\n{indent}" * bool(why) if len(check.found) > _WIDE else "  "
        lines.append(f"  {_MARKS[check.state]}  {check.name:<{names}}  {check.found:<{findings}}{apart}{why}".rstrip())
        lines += [f"{indent}mend: {mend}"] if mend else []
    bad, warned = (sum(check.state == state for check in checks) for state in ("bad", "warning"))
    end = f"{bad} of {len(checks)} must be fixed" if bad else "all requirements are met"
    return "\n".join([*lines, "", end + (f"; {warned} warning{'s' * (warned != 1)}" if warned else "")])


# ---------------------------------------------------------------------- the config
def check_config(path: str) -> list[Check]:
    """Check a clusters.yaml, its certificates and its checkpoints; raises if the config is invalid."""
    config = load(path)
    if find_spec("cryptography") is not None:  # another check reports a missing one
        from whale_nebula.launch.gateways import check_names

        check_names(config, [f"{cluster}/0" for cluster in config.clusters])
    workers = sum(len(cluster.workers) for cluster in config.clusters.values())
    names = ", ".join(config.clusters) or "no cluster"
    counted = f"{path}: {names}; {_format_count(workers, 'worker')}, {_format_count(len(config.links.pairs), 'link')}"
    checks = [Check("config", "ok", _format_count(len(config.clusters), "cluster"), counted)]
    if config.security.insecure:
        checks.append(Check("config", "note", "insecure: true", "links are not encrypted", "remove it"))
    return [*checks, *_check_certificates(config, path), *_check_checkpoints(config)]


def _check_checkpoints(config: Config) -> Iterator[Check]:
    """Check whether the checkpoint folder is writable and has room, and its checkpoints by the sizes of their files."""
    if config.checkpoint is None:
        return
    path = os.path.expanduser(config.checkpoint.folder)
    if not files.is_local(path):
        yield Check("checkpoints", "note", path, "a folder that is not on this host is not checked")
        return
    there = Path(path)
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield Check("checkpoints", "bad", path, f"{there} is not writable", "checkpoint: another/folder")
        return
    found = Folder(path).scan()
    complete = [each for each in found if not each.check(digests=False)]
    for each in (each for each in found if each.manifests and each not in complete):
        mend = f"whale-nebula checkpoints verify {path}"
        yield Check("checkpoints", "warning", each.path, each.check(digests=False)[0], mend)
    for each in (each for each in found if not each.manifests):
        if waiting := describe_waiting(each.path):
            yield Check("checkpoints", "note", each.path, f"a run failed after this step; {waiting}")
    free = shutil.disk_usage(there).free
    largest = max((manifest.size for each in complete for manifest in each.manifests.values()), default=0)
    newest = f"a run resumes from step {complete[0].step}" if complete else "a run starts from the beginning"
    if complete and any(manifest.at_error for manifest in complete[0].manifests.values()):
        newest += ", after which it failed"
    if largest and free < 2 * largest:
        why = f"{size(free)} are free there, but a checkpoint takes {size(largest)}"
        yield Check("checkpoints", "warning", path, why, f"whale-nebula checkpoints prune {path} --keep 1")
    yield Check("checkpoints", "ok", path, f"{_format_count(len(complete), 'checkpoint')}; {newest}")


def _check_certificates(config: Config, path: str) -> Iterator[Check]:
    """Check whether the authority's certificate, which every process reads, exists at its configured path."""
    if config.security.insecure or find_spec("cryptography") is None or len(config.clusters) < 2:
        return
    from whale_nebula.launch.gateways import configured_files

    found = configured_files(config, [f"{cluster}/0" for cluster in config.clusters], path)
    missing = sorted({each.ca for each in found.values() if not each.ca.exists()})
    if missing:
        why = f"no {missing[0]}: a run over several hosts needs certificates (run --all creates its own)"
        mend = f"whale-nebula certs init --config {path}, then whale-nebula certs issue --all --config {path}"
        yield Check("certificates", "note", "none here", why, mend)


def _format_count(number: int, what: str) -> str:
    """A count with its noun.

    >>> _format_count(1, "link"), _format_count(2, "link")
    ('1 link', '2 links')
    """
    return f"{number} {what}{'s' * (number != 1)}"


# ---------------------------------------------------------------------- this machine
_LOW_MEMORY = 2 * 2**30


def check_backend() -> Check:
    """Check that Keras's backend, by the environment or its config file, is TensorFlow."""
    home, written = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras"), None
    with suppress(OSError, ValueError, AttributeError):
        written = json.loads((home / "keras.json").read_text("utf-8")).get("backend")
    found = os.environ.get("KERAS_BACKEND") or (written if isinstance(written, str) else None) or "tensorflow"
    if found == "tensorflow":
        return Check("Keras backend", "ok", found)
    why = "plans are made from graphs that TensorFlow traces"
    return Check("Keras backend", "bad", found, why, "KERAS_BACKEND=tensorflow")


def check_threads() -> Check:
    """Check cores, and the environment variables for TensorFlow's threads."""
    cores = f"{len(os.sched_getaffinity(0))} cores"
    settings = ", ".join(f"{name}={value}" for name in _THREADS if (value := os.environ.get(name)))
    why = "bit-identical results need the same number in every cluster"
    return Check("CPU threads", "note" if settings else "ok", cores, f"{settings or 'TensorFlow uses all'}; {why}")


_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")


def check_onednn() -> Check:
    """Check TensorFlow's oneDNN ops, which change the last bits of results."""
    value = os.environ.get("TF_ENABLE_ONEDNN_OPTS")
    why = "bit-identical results need the same setting in every cluster"
    if value is None:
        return Check("oneDNN", "ok", "TensorFlow's default", f"on for x86; {why}")
    return Check("oneDNN", "note", "off" if value == "0" else "on", f"TF_ENABLE_ONEDNN_OPTS={value}; {why}")


def check_memory() -> Check:
    """Check free memory, within the container's limit."""
    free = read_free_memory()
    if free < _LOW_MEMORY:
        why = "TensorFlow alone needs about 600 MiB in each process"
        return Check("free memory", "note", size(free), why, "use fewer processes on this machine, or a smaller model")
    return Check("free memory", "ok", size(free))


def read_free_memory() -> float:
    """Bytes that are free, within the container's limit; infinite if unknown."""
    group, known = Path("/sys/fs/cgroup"), [float("inf")]
    with suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("utf-8"))
        known += [1024.0 * int(found[1])] if found else []
    with suppress(OSError, ValueError):
        limit, used = (float((group / name).read_text("utf-8")) for name in ("memory.max", "memory.current"))
        known.append(max(limit - used, 0.0))
    return min(known)


OURS = "whale-nebula"
NEEDED = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "tensorflow-text": "TensorFlow Text",
    "numpy": "NumPy",
    "grpcio": "gRPC",
    "grpcio-health-checking": "gRPC's health service",
    "cryptography": "cryptography",
    "google-crc32c": "google-crc32c",
    "pyyaml": "PyYAML",
    "rich": "rich",
}
FOR_TRAINING = ("tensorflow", "keras", "tensorflow-text")
"""Packages that the host of a gateway does not need."""


def satisfies(version: str, specifier: str) -> bool:
    """Whether a version satisfies a specifier such as ">=2.21,<2.22"; a pre-release counts as the release.

    >>> satisfies("2.21.0", ">=2.21,<2.22"), satisfies("2.22.0rc1", ">=2.21,<2.22"), satisfies("3.14.2", "<3.14,>=3.11")
    (True, False, False)
    """
    return all(
        _SIGNS[sign](_parse_release(version), _parse_release(limit)) for sign, limit in _LIMIT.findall(specifier)
    )


_LIMIT = re.compile(r"(>=|<=|==|!=|<|>)\s*([\d.]+)")
_SIGNS = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt
}  # fmt: skip


def _parse_release(version: str) -> list[int]:
    """The numbers of a release, without trailing zeros."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


@cache
def read_requirements() -> dict[str, str]:
    """The required versions by package, from this package's metadata; empty if it is not installed."""
    try:
        lines = metadata.requires(OURS) or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in (each for each in lines if "extra ==" not in each):
        name, specifier = re.fullmatch(r"([\w.-]+)\s*(?:\[.*?\])?\s*\(?([^;)]*)\)?.*", line).groups()  # type: ignore[union-attr]
        found[name.lower()] = order_range(specifier)
    return found


def order_range(specifier: str) -> str:
    """A range of versions, its lower end first.

    >>> order_range("<3.14,>=3.11 ")
    '>=3.11,<3.14'
    """
    return ",".join(sorted(filter(None, specifier.strip().split(",")), reverse=True))


def find_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python() -> Check:
    """Check the version of Python."""
    found = platform.python_version()
    try:
        specifier = order_range(metadata.metadata(OURS)["Requires-Python"] or "")
    except metadata.PackageNotFoundError:
        why = f"{OURS} is not installed, so its requirements are unknown"
        return Check("Python", "note", found, why, "pip install -e .")
    if satisfies(found, specifier):
        return Check("Python", "ok", found, f"supported: {specifier}")
    return Check(
        "Python", "bad", found, f"supported: {specifier}", "make PYTHON=python3.12 install, or use a venv with it"
    )


def check_own_package() -> Check:
    """Check where this package is imported from, and that all of it is imported from there."""
    folder, models = (_find_folder(module) for module in ("whale_nebula", "whale_nebula.models"))
    version = find_version(OURS) or "not installed"
    if models is None:
        why = f"imported from {folder}, which has no models next to it"
        return Check(OURS, "bad", version, why, "run pip install -e . in the clone that contains that folder")
    if models not in (folder, folder.parent if folder else None):
        why = f"imported from {folder},\nbut whale_nebula.models from {models}: two copies are mixed"
        mend = "run python -m pip install -e . in one copy, and remove the other one from PYTHONPATH"
        return Check(OURS, "warning", version, why, mend)
    return Check(OURS, "ok", version, f"imported from {folder}")


def _find_folder(module: str) -> Path | None:
    """The folder of the package `whale_nebula`, or the folder that contains one of its subpackages, which is not
    imported. None if there is no such module.
    """
    found = find_spec(module)
    if found is None or found.origin is None:
        return None
    package = Path(found.origin).parent
    return package if module == "whale_nebula" else package.parent


def check_package(package: str, *, training: bool = True) -> Check:
    """Check a required package; without `training` those that only training needs may be missing."""
    name, specifier, found = NEEDED[package], read_requirements().get(package, ""), find_version(package)
    supported = f"supported: {specifier}" if specifier else ""
    if found is None and package in FOR_TRAINING and not training:
        return Check(name, "ok", "not installed", "not needed by a gateway")
    if found is None or not satisfies(found, specifier):
        return Check(name, "bad", found or "not installed", supported, f'pip install "{package}{specifier}"')
    return Check(name, "ok", found, supported)


def check_tensorboard() -> Check:
    """Check TensorBoard, which is only needed to write its files."""
    found = find_version("tensorboard")
    if found is not None:
        return Check("TensorBoard", "ok", found)
    why = "only nb.init(tensorboard=...) needs it"
    return Check("TensorBoard", "note", "not installed", why, "pip install tensorboard")


def check_machine(*, training: bool = True) -> list[Check]:
    """All checks of this machine and its packages; without `training` those of a gateway only."""
    packages = [check_package(package, training=training) for package in NEEDED]
    settings = [check_tensorboard(), check_backend(), check_threads(), check_onednn(), check_memory()]
    return [check_python(), check_own_package(), *packages, *settings]
