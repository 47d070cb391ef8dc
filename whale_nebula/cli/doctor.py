"""`whale-nebula doctor`: is there, on this machine, what this version needs? Answered without loading TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Sequence

from whale_nebula.cli import exits
from whale_nebula.cli.checks import Check, config_checks, machine_checks
from whale_nebula.cli.telling import tell
from whale_nebula.cli.words import Parser
from whale_nebula.errors import NebulaError

_DESCRIPTION = """\
Look at what this version stands on: Python, TensorFlow, Keras and the other packages against the versions that are
supported, threads, memory, and what may be missing. With --config a clusters.yaml is read and checked, too.
What needs other machines (ports, clocks, certificates, the line) is not looked at yet."""

_EPILOG = """\
examples:
  whale-nebula doctor
  whale-nebula doctor --config clusters.yaml
  whale-nebula doctor --json

exit status:
  0   everything that is needed is there
  1   something is missing or not supported: its line says how to mend it
  2   the command line is wrong
  78  the config is wrong"""


def parser() -> Parser:
    """The options of the command."""
    made = Parser(prog="whale-nebula doctor", description=_DESCRIPTION, epilog=_EPILOG)
    made.option("--config", "check this clusters.yaml, too", "FILE")
    made.option("--json", "print one JSON object")
    return made


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit status."""
    given = parser().read(argv)
    checks = machine_checks()
    try:
        checks += config_checks(given.config) if given.config is not None else []
    except NebulaError as error:
        tell(error, as_json=given.json)
        return exits.CONFIG
    print(_json(checks) if given.json else _text(checks))
    return exits.DONE if all(check.state != "bad" for check in checks) else exits.FAILED


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


_MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def _text(checks: Sequence[Check]) -> str:
    names, found = (max(len(getattr(check, part)) for check in checks) for part in ("name", "found"))
    lines = []
    for check in checks:
        lines.append(f"  {_MARKS[check.state]}  {check.name:<{names}}  {check.found:<{found}}  {check.why}".rstrip())
        if check.mend:
            lines.append(f"  {'':{names + 6}}  mend: {check.mend}")
    bad = sum(check.state == "bad" for check in checks)
    end = f"{bad} of {len(checks)} must be mended" if bad else "everything that is needed is there"
    return "\n".join([*lines, "", end])
