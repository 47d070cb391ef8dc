"""`whale-nebula doctor`: check this machine against the requirements of this version, without loading TensorFlow."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Parser, tell
from whale_nebula.cli.checks import Check, config_checks, local, machine_checks
from whale_nebula.errors import NebulaError

_DESCRIPTION = """\
Look at what this version stands on: Python, TensorFlow, Keras and the other packages against the versions that are
supported, threads, memory, and what may be missing. With --config a clusters.yaml is read and checked, too.

With --cluster it is also looked at what this host needs to take part in a run of that cluster: certificates and their
dates, names, ports, whether the others are reached and what they say to these certificates, clocks, MTU, congestion
control, open files, and the line as bench link has found it. A gateway's host needs no TensorFlow."""

_EPILOG = """\
examples:
  whale-nebula doctor
  whale-nebula doctor --config clusters.yaml
  whale-nebula doctor --config clusters.yaml --cluster gpu
  whale-nebula doctor --config clusters.yaml --cluster gpu --worker 1
  whale-nebula doctor --config clusters.yaml --cluster gpu --gateway
  whale-nebula doctor --json

what it says of each thing:
  ok       as it should be
  note     it works, but you may want to know
  warning  it works now, and will hurt
  BAD      it must be mended

exit status:
  0   everything that is needed is there
  1   something is missing, not supported or not reached: its line says how to mend it
  2   the command line is wrong
  78  the config is wrong"""

_NETWORK_NEEDS = ("grpcio", "cryptography", "numpy", "google-crc32c")


def parser() -> Parser:
    """The options of the command."""
    made = Parser(prog="whale-nebula doctor", description=_DESCRIPTION, epilog=_EPILOG)
    made.option("--config", "check this clusters.yaml, too", "FILE")
    made.option("--cluster", "the cluster that this host is in: check all that a run of it needs", "NAME")
    made.option("--worker", "the worker that is here, if its address does not say so", "N")
    made.option("--gateway", "this host is the gateway's, and no worker's")
    made.option("--json", "print one JSON object")
    return made


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit status."""
    made = parser()
    given = made.read(argv)
    _check(made, given)
    try:
        checks = _looked_at(given)
    except NebulaError as error:
        tell(error, as_json=given.json)
        return arguments.CONFIG
    print(_json(checks) if given.json else _text(checks))
    return arguments.DONE if all(check.state != "bad" for check in checks) else arguments.FAILED


def _check(made: Parser, given: argparse.Namespace) -> None:
    if given.cluster is not None and given.config is None:
        made.refuse("--cluster goes with --config clusters.yaml")
    if given.worker is not None and (given.cluster is None or given.gateway):
        made.refuse("--worker goes with --cluster, and without --gateway")
    if given.worker is not None and not (given.worker.isdecimal() and int(given.worker) < 65536):
        made.refuse(f"--worker takes a number, and {given.worker!r} is none")


def _looked_at(given: argparse.Namespace) -> list[Check]:
    if given.config is None:
        return machine_checks(training=not given.gateway)
    checks = config_checks(given.config)
    missing = [name for name in _NETWORK_NEEDS if local.find_version(name) is None]
    if given.cluster is None or missing:
        if given.cluster is not None:
            why = f"not looked at without {', '.join(missing)}"
            checks.append(Check("cluster", "bad", given.cluster, why, f"pip install {' '.join(missing)}"))
        return [*machine_checks(training=not given.gateway), *checks]
    from whale_nebula.cli.checks.cluster import cluster_checks
    from whale_nebula.cli.checks.host import host
    from whale_nebula.config import load

    worker = None if given.worker is None else int(given.worker)
    here = host(load(given.config), given.config, given.cluster, worker=worker, gateway=given.gateway)
    return [*machine_checks(training=here.trains), *checks, *cluster_checks(here)]


def _json(checks: Sequence[Check]) -> str:
    return json.dumps(
        {
            "ok": all(check.state != "bad" for check in checks),
            "checks": [
                {"name": c.name, "state": c.state, "found": c.found, "why": c.why, "mend": c.mend} for c in checks
            ],
        },
        indent=1,
    )


_MARKS = {"ok": "ok  ", "note": "note", "warning": "WARN", "bad": "BAD "}
_WIDE = 32
"""What is found may be longer; then what follows stands on a line of its own."""


def _text(checks: Sequence[Check]) -> str:
    names = max(len(check.name) for check in checks)
    found = max(len(check.found) for check in checks if len(check.found) <= _WIDE)
    lines = []
    for check in checks:
        indent = " " * (names + 10)
        mark, why = _MARKS[check.state], check.why.replace("\n", f"\n{indent}")
        if len(check.found) > _WIDE:
            lines.append(f"  {mark}  {check.name:<{names}}  {check.found}")
            lines += [f"{indent}{why}"] if why else []
        else:
            lines.append(f"  {mark}  {check.name:<{names}}  {check.found:<{found}}  {why}".rstrip())
        if check.mend:
            mend = check.mend.replace("\n", f"\n{indent}      ")
            lines.append(f"{indent}mend: {mend}")
    return "\n".join([*lines, "", _end(checks)])


def _end(checks: Sequence[Check]) -> str:
    bad, warned = (sum(check.state == state for check in checks) for state in ("bad", "warning"))
    warnings = f"; {warned} warning{'s' * (warned != 1)}" if warned else ""
    return (f"{bad} of {len(checks)} must be mended" if bad else "everything that is needed is there") + warnings
