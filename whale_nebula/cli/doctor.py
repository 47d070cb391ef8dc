"""`whale-nebula doctor`: check this machine against the requirements of this version, without loading TensorFlow."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Options, Parser, tell
from whale_nebula.cli.checks import local
from whale_nebula.cli.checks.local import Check, config_checks, machine_checks
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

_OPTIONS: Options = {
    "--config": ("FILE", "check this clusters.yaml, too"),
    "--cluster": ("NAME", "the cluster that this host is in: check all that a run of it needs"),
    "--worker": ("N", "the worker that is here, if its address does not say so"),
    "--gateway": (None, "this host is the gateway's, and no worker's"),
    "--json": (None, "print one JSON object"),
}
_NETWORK_NEEDS = ("grpcio", "cryptography", "numpy", "google-crc32c")


def parser() -> Parser:
    """The options of the command."""
    return Parser("doctor", _DESCRIPTION, _OPTIONS, epilog=_EPILOG)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    made = parser()
    given = made.read(argv)
    if given.cluster is not None and given.config is None:
        made.error("--cluster goes with --config clusters.yaml")
    if given.worker is not None and (given.cluster is None or given.gateway):
        made.error("--worker goes with --cluster, and without --gateway")
    given.worker = made.number("--worker", given.worker)
    try:
        checks = _check(given)
    except NebulaError as error:
        return tell(error, as_json=given.json, code=arguments.CONFIG)
    well = all(check.state != "bad" for check in checks)
    print(
        json.dumps({"ok": well, "checks": [asdict(each) for each in checks]}, indent=1) if given.json else _text(checks)
    )
    return arguments.DONE if well else arguments.FAILED


def _check(given: argparse.Namespace) -> list[Check]:
    if given.config is None:
        return machine_checks(training=not given.gateway)
    checks = config_checks(given.config)
    missing = [name for name in _NETWORK_NEEDS if local.find_version(name) is None]
    if given.cluster is None or missing:
        if given.cluster is not None:
            why = f"not looked at without {', '.join(missing)}"
            checks.append(Check("cluster", "bad", given.cluster, why, f"pip install {' '.join(missing)}"))
        return [*machine_checks(training=not given.gateway), *checks]
    from whale_nebula.cli.checks.cluster import cluster_checks, host
    from whale_nebula.config import load

    here = host(load(given.config), given.config, given.cluster, worker=given.worker, gateway=given.gateway)
    return [*machine_checks(training=here.trains), *checks, *cluster_checks(here)]


_MARKS = {"ok": "ok  ", "note": "note", "warning": "WARN", "bad": "BAD "}
_WIDE = 32
"""Width of the column of findings; after a longer one the rest is on a line of its own."""


def _text(checks: Sequence[Check]) -> str:
    names = max(len(check.name) for check in checks)
    found = max(len(check.found) for check in checks if len(check.found) <= _WIDE)
    lines, indent = [], " " * (names + 10)
    for check in checks:
        why, mend = check.why.replace("\n", f"\n{indent}"), check.mend.replace("\n", f"\n{indent}      ")
        apart = f"\n{indent}" * bool(why) if len(check.found) > _WIDE else "  "
        lines.append(f"  {_MARKS[check.state]}  {check.name:<{names}}  {check.found:<{found}}{apart}{why}".rstrip())
        lines += [f"{indent}mend: {mend}"] if mend else []
    bad, warned = (sum(check.state == state for check in checks) for state in ("bad", "warning"))
    end = f"{bad} of {len(checks)} must be mended" if bad else "everything that is needed is there"
    return "\n".join([*lines, "", end + (f"; {warned} warning{'s' * (warned != 1)}" if warned else "")])
