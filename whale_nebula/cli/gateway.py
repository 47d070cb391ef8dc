"""`whale-nebula gateway`: run a cluster's gateway, the one process that other clusters connect to. Needs no
TensorFlow.
"""

from __future__ import annotations

import argparse
import contextlib
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
from whale_nebula.cli.arguments import Options, Parser, answer, remark
from whale_nebula.config import load
from whale_nebula.errors import ConfigError, IdentityError
from whale_nebula.gateway.admission import keep_freed_memory, raise_file_limit
from whale_nebula.gateway.gateway import Gateway
from whale_nebula.gateway.route import SharedLines
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.security.files import find_other_keys

_DESCRIPTION = """\
Run a cluster's gateway, its only port that other sites can reach. Its workers connect to those of other clusters
through it and through the other clusters' gateways. It forwards sealed frames, which it cannot read, at the rates of
the config's links. Certificates decide who may connect. Events are recorded in an audit log, whose signed heads are
kept by the other gateways. With --services, accounts also log in and read data through this port."""

_EPILOG = """\
Of two gateways, one must be able to connect to the other; if the config has no gateway address for a cluster, that
cluster's gateway connects. With --also, one gateway process serves several runs, each with its own port, certificates
and audit log. --services is the folder of the authority for "whale-nebula accounts serve" and "data serve" on this
host, unless these use another one. The gateway and the services can be started and stopped in any order.

examples:
  whale-nebula certs issue --cluster gpu --role gateway
  whale-nebula gateway --config clusters.yaml --cluster gpu
  whale-nebula gateway --config clusters.yaml --cluster gpu --listen 0.0.0.0:7100
  whale-nebula gateway --config clusters.yaml --cluster gpu --services certs
  whale-nebula gateway --config a/clusters.yaml --also b/clusters.yaml --cluster gpu
  whale-nebula audit verify audit/gpu-gateway.jsonl

exit status:
  0   stopped by SIGTERM or SIGINT
  1   cannot listen, or cannot write the audit log
  2   wrong command line
  78  wrong config or certificates"""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK_SECONDS = 1.0


_OPTIONS: Options = {
    "--config": ("FILE", "clusters.yaml"),
    "--cluster": ("NAME", "the cluster of the gateway"),
    "--also": (
        "FILES",
        "configs of other runs to serve, such as b.yaml,c.yaml; all runs get equal shares of each link",
    ),
    "--listen": ("HOST:PORT", "the address to listen on; default: the gateway's address of the config"),
    "--services": (
        "FOLDER",
        "let accounts log in and read data through this port, with the services of this host in this folder; with "
        "several runs, for that of --config",
    ),
    "--token-file": ("FILE", "a token of an account with the role of an owner, which renews the gateway's certificate"),
    "--account": ("NAME", "the account of the token; default: your user name on this host"),
    "--audit": ("FILE", "the audit log; default: audit/NAME-gateway.jsonl next to the config"),
    "--json": (None, "print one JSON object when it listens"),
    "--stdin": (None, argparse.SUPPRESS),  # started by a launcher, over standard input
}


def make_parser() -> Parser:
    """The options of the command."""
    usage = "whale-nebula gateway --config FILE --cluster NAME [options]"
    return Parser("gateway", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = make_parser()
    args = parser.read(argv)
    if not args.stdin and (args.config is None or args.cluster is None):
        parser.error("missing config or cluster: --config clusters.yaml --cluster gpu")
    stop_reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    logging.basicConfig(level=logging.WARNING, format="whale-nebula: %(message)s", stream=sys.stderr)
    raise_file_limit()
    return answer(
        args, lambda: _run(args, stop_reasons), {ConfigError: arguments.CONFIG, IdentityError: arguments.CONFIG}
    )


def _run(args: argparse.Namespace, stop_reasons: queue.SimpleQueue[str]) -> int:
    settings = [_read_settings(stop_reasons)] if args.stdin else _load_settings(args)
    with contextlib.ExitStack() as resources:
        if args.token_file is not None:
            from whale_nebula.cli.login import renew_certificates

            identities = [settings[0].identity]
            resources.enter_context(renew_certificates(args.config, identities, args.account, args.token_file))
        return _serve(args, start_gateways(settings), stop_reasons)


def _serve(args: argparse.Namespace, gateways: Sequence[Gateway], stop_reasons: queue.SimpleQueue[str]) -> int:
    for number in _SIGNALS:
        signal.signal(number, lambda signum, _: stop_reasons.put(signal.Signals(signum).name))
    keep_freed_memory()
    for gateway in gateways:
        _print_introduction(gateway, as_json=args.json, launched=args.stdin)
    why = _await_stop(stop_reasons)
    if not args.stdin:
        remark(f"{why}: the gateway stops")
    for gateway in gateways:
        gateway.stop(why)
    return arguments.DONE


def _load_settings(args: argparse.Namespace) -> list[GatewaySettings]:
    """The settings of the cluster's gateway in each run: of --config, and of the configs of --also."""
    first = GatewaySettings.from_config(load(args.config), args.cluster, args.config, args.listen)
    first = first if args.audit is None else replace(first, audit=Path(os.path.abspath(args.audit)))
    if args.services is not None:
        first = replace(first, services=_find_services(args.services, first))
    paths = [path for path in (args.also or "").split(",") if path]
    return [first, *(GatewaySettings.from_config(load(path), args.cluster, path) for path in paths)]


def _find_services(folder: str, settings: GatewaySettings) -> Path:
    if settings.files is None:
        why = "TLS distinguishes logins and data from workers, but the config has insecure: true"
        raise ConfigError("--services needs TLS", why=why, mend="remove --services")
    if not os.path.isdir(folder):
        mend = "--services certs: the folder of the authority, or the --services of accounts serve and data serve"
        raise ConfigError("the folder does not exist", where=folder, mend=mend)
    return Path(os.path.abspath(folder))


def start_gateways(settings: Sequence[GatewaySettings]) -> list[Gateway]:
    """Start the gateways of several runs in this process, all or none; their frames share each link fairly."""
    by_log: dict[Path, GatewaySettings] = {}
    for each in settings:
        other = by_log.setdefault(each.audit, each)
        if other is not each:
            what = f"the gateways of runs {other.run!r} and {each.run!r} would write the same audit log"
            raise ConfigError(what, where=str(each.audit), mend="use a separate folder for each run's config")
    lines, gateways = SharedLines(), []
    try:
        for each in settings:
            gateway = Gateway(each, lines=lines)
            gateway.start()
            gateways.append(gateway)
    except BaseException:
        for gateway in gateways:
            gateway.stop("another gateway in its process could not start")
        raise
    return gateways


def _await_stop(stop_reasons: queue.SimpleQueue[str]) -> str:
    """Wait for the reason to stop the gateway. It wakes regularly, as Python handles signals in this thread only."""
    while True:
        with contextlib.suppress(queue.Empty):
            return stop_reasons.get(timeout=_LOOK_SECONDS)


def _read_settings(stop_reasons: queue.SimpleQueue[str]) -> GatewaySettings:
    """Read the gateway's settings from a launcher, which holds the pipe open as long as it needs the gateway."""
    settings = GatewaySettings.from_json(sys.stdin.readline())

    def wait() -> None:
        while sys.stdin.read(1):
            pass
        stop_reasons.put("stopped by its launcher")

    threading.Thread(target=wait, name="nebula-leash", daemon=True).start()
    return settings


def _print_introduction(gateway: Gateway, *, as_json: bool, launched: bool) -> None:
    """Print a line with the gateway's identity, address, and trusted authorities; warn about private keys of others in
    its folder, unless it was `launched`: then its launcher has issued all keys, for one run on this machine.
    """
    settings, trusts = gateway.settings, gateway.trusts
    if settings.files is None:
        remark("INSECURE: TRUE. Connections are neither encrypted nor authenticated.")
    elif not launched and (found := [path.name for path in find_other_keys(settings.files)]):
        remark(
            f"WARNING: {settings.files.key.parent} contains private keys of others ({', '.join(found)}): whoever takes "
            "over this gateway can impersonate them; keep only ca.pem, revoked.json and its own two files on its host"
        )
    if as_json:
        introduction = {"gateway": settings.identity.worker, "listens": gateway.address, "trusts": trusts}
        print(json.dumps(introduction), flush=True)
        return
    rates = {name: f", {rate * 8 / 1e6:g} Mbit/s" for name, rate in settings.rates.items() if rate is not None}
    addresses = {name: address or "it connects to us" for name, address in settings.gateways.items()}
    others = ", ".join(f"{name} ({address}{rates.get(name, '')})" for name, address in addresses.items())
    folder = settings.services
    services = "" if folder is None else f"; logins and data are forwarded to the services in {folder}"
    print(
        f"whale-nebula: gateway of cluster {settings.cluster}, run {settings.run}, listens on "
        f"{gateway.address}{services}; to {others or 'no other cluster'}; trusts {trusts}; audit log {settings.audit}",
        flush=True,
    )
