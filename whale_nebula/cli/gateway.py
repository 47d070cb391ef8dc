"""`whale-nebula gateway`: run a cluster's gateway, the one process that other clusters connect to. Needs no
TensorFlow.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Parser, remark, tell
from whale_nebula.config import load
from whale_nebula.errors import ConfigError, IdentityError, NebulaError
from whale_nebula.gateway.entry import keep_freed, raise_file_limit
from whale_nebula.gateway.gateway import Gateway
from whale_nebula.gateway.site import Site
from whale_nebula.security.files import find_other_keys

_DESCRIPTION = """\
Be a cluster's gateway: the one port of it that others can reach. Its workers reach those of other clusters through
it, and through the gateways of those. It hands frames on as they are, at the rates of the config's links, and cannot
read them. Who may come in, certificates say. What it did stands in an audit log, whose heads other gateways keep."""

_EPILOG = """\
Of two gateways one must be able to dial the other; where the config names no gateway for a cluster, that one dials.

examples:
  whale-nebula certs issue --cluster gpu --role gateway
  whale-nebula gateway --config clusters.yaml --cluster gpu
  whale-nebula gateway --config clusters.yaml --cluster gpu --listen 0.0.0.0:7100
  whale-nebula audit verify audit/gpu-gateway.jsonl

exit status:
  0   it was asked to end (SIGTERM, SIGINT), and did
  1   it cannot listen there, or its audit log cannot be written
  2   the command line is wrong
  78  config or certificates are wrong"""

_HEARD = (signal.SIGTERM, signal.SIGINT)


def parser() -> Parser:
    """The options of the command."""
    made = Parser(prog="whale-nebula gateway", description=_DESCRIPTION, epilog=_EPILOG)
    made.usage = "whale-nebula gateway --config FILE --cluster NAME [--listen HOST:PORT] [--audit FILE] [--json]"
    made.option("--config", "clusters.yaml", "FILE")
    made.option("--cluster", "whose gateway this is", "NAME")
    made.option("--listen", "where to listen, if not at the address that the config gives to others", "HOST:PORT")
    made.option("--audit", "the audit log: audit/NAME-gateway.jsonl beside the config if it is not given", "FILE")
    made.option("--json", "print one JSON object when it listens")
    made.add_argument("--told", action="store_true", help=argparse.SUPPRESS)  # by a launcher, over its standard input
    return made


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit status."""
    made = parser()
    given = made.read(argv)
    if not given.told and (given.config is None or given.cluster is None):
        made.refuse("which gateway? --config clusters.yaml --cluster gpu")
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    logging.basicConfig(level=logging.WARNING, format="whale-nebula: %(message)s", stream=sys.stderr)
    try:
        gateway = Gateway(_read_site(asked) if given.told else _site(given))
        gateway.start()
    except NebulaError as error:
        tell(error, as_json=given.json)
        return arguments.CONFIG if isinstance(error, ConfigError | IdentityError) else arguments.FAILED
    for number in _HEARD:
        signal.signal(number, lambda heard, _: asked.put(signal.Signals(heard).name))
    keep_freed()
    raise_file_limit()
    _introduce(gateway, as_json=given.json)
    why = asked.get()
    if not given.told:
        remark(f"{why}: the gateway ends")
    gateway.stop(why)
    return arguments.DONE


def _site(given: argparse.Namespace) -> Site:
    site = Site.of(load(given.config), given.cluster, given.config, given.listen)
    return site if given.audit is None else replace(site, audit=Path(os.path.abspath(given.audit)))


def _read_site(asked: queue.SimpleQueue[str]) -> Site:
    """A launcher says where we stand in one line, and holds the pipe open as long as it wants us."""
    site = Site.from_json(sys.stdin.readline())

    def wait() -> None:
        while sys.stdin.read(1):
            pass
        asked.put("its launcher has ended it")

    threading.Thread(target=wait, name="nebula-leash", daemon=True).start()
    return site


def _introduce(gateway: Gateway, *, as_json: bool) -> None:
    """One line: what this is, where it listens, and whom it trusts."""
    site, trusts = gateway.site, gateway.trusts
    if site.files is None:
        remark("INSECURE: TRUE. Nothing is encrypted here, and everybody is believed to be who he says he is.")
    elif found := [path.name for path in find_other_keys(site.files)]:
        remark(
            f"WARNING: private keys of others lie in {site.files.key.parent} ({', '.join(found)}): whoever takes "
            "over this gateway can act as their owners; give its host ca.pem, revoked.json and its own two files only"
        )
    if as_json:
        print(json.dumps({"gateway": site.identity.worker, "listens": gateway.address, "trusts": trusts}), flush=True)
        return
    others = ", ".join(f"{name} ({_way(site, name)})" for name in site.gateways)
    print(
        f"whale-nebula: gateway of cluster {site.cluster}, run {site.run}, listens on {gateway.address}; "
        f"to {others or 'no other cluster'}; trusts {trusts}; audit log {site.audit}",
        flush=True,
    )


def _way(site: Site, cluster: str) -> str:
    rate = site.rates.get(cluster)
    paced = f", {rate * 8 / 1e6:g} Mbit/s" if rate is not None else ""
    return (site.gateways[cluster] or "it dials us") + paced
