"""`whale-nebula login`: certificates for the workers of this host, by an account. Needs no TensorFlow."""

from __future__ import annotations

import argparse
import getpass
import json
from collections.abc import Sequence
from pathlib import Path

from whale_nebula.accounts.login import HOURS, MOST_HOURS, Asked
from whale_nebula.accounts.registry import INVITATION, PASSWORD, TOKEN
from whale_nebula.accounts.service import ask
from whale_nebula.cli import arguments
from whale_nebula.cli.accounts import ask_password
from whale_nebula.cli.arguments import Options, Parser, tell
from whale_nebula.config import Config, load
from whale_nebula.errors import AccountError, ConfigError, NebulaError
from whale_nebula.security import WORKER, Identity, authority, files, owners

_DESCRIPTION = """\
Log in at the service of a cluster's owner ("whale-nebula accounts serve"), and get certificates for workers of this
host, good for some hours. Their keys are made here and stay here. The service proves who it is by ca.pem, which comes
from the owner with the invitation."""

_EPILOG = """\
examples:
  whale-nebula login --cluster gpu --at gpu.example.org:7200 --account ana --invitation    the first time
  whale-nebula login --cluster gpu --at gpu.example.org:7200 --account ana --count 2
  whale-nebula login --cluster gpu --at gpu.example.org:7200 --account ci --token-file token.txt --config clusters.yaml

Then: whale-nebula run --config clusters.yaml --cluster gpu train.py

exit status:
  0   logged in        2   the command line is wrong
  1   refused          78  the config is wrong"""

_OPTIONS: Options = {
    "--cluster": ("NAME", "the cluster"),
    "--at": ("HOST:PORT", "where its accounts log in"),
    "--account": ("NAME", "the account; your name on this host if it is not given"),
    "--run": ("NAME", "the run's name, if the config names none"),
    "--index": ("N", "the number of the worker in its cluster; 0 if it is not given"),
    "--count": ("N", "workers 0 to N-1"),
    "--hours": ("HOURS", f"how long the certificates are good: {HOURS:g} if it is not given, {MOST_HOURS:g} at most"),
    "--invitation": (None, "set a password first, by an invitation that was given to you"),
    "--token-file": ("FILE", "a file with a token, that only you can read, in place of the password"),
    "--password-file": ("FILE", "a file whose first line is the password, that only you can read"),
    "--config": ("FILE", "clusters.yaml: the run's name, and where certs lies"),
    "--folder": ("FOLDER", 'where ca.pem is, and the certificates go: "certs" beside the --config, or here'),
    "--json": (None, "print one JSON object"),
}


def parser() -> Parser:
    """The options of the command."""
    usage = "whale-nebula login --cluster NAME --at HOST:PORT [options]"
    return Parser("login", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit status."""
    made = parser()
    given = made.read(argv)
    if given.cluster is None or given.at is None:
        made.error("where? --cluster gpu --at gpu.example.org:7200")
    if given.invitation and (given.token_file or given.password_file):
        made.error("--invitation asks for the invitation, and for the new password")
    host, _, port = given.at.rpartition(":")
    number = made.number("--at", port)
    try:
        hours = HOURS if given.hours is None else float(given.hours)
    except ValueError:
        made.error(f"--hours takes a number, and {given.hours!r} is none")
    index, count = made.number("--index", given.index), made.number("--count", given.count)
    if (index is not None and count is not None) or count == 0:
        made.error("--index is one, --count is several, from 1 up: choose one of them")
    try:
        return _log_in(given, host.strip("[]"), number or 0, hours, list(range(count)) if count else [index or 0])
    except NebulaError as error:
        code = arguments.CONFIG if isinstance(error, ConfigError) else arguments.FAILED
        return tell(error, as_json=given.json, code=code)


def _log_in(given: argparse.Namespace, host: str, port: int, hours: float, numbers: Sequence[int]) -> int:
    config = Config() if given.config is None else load(given.config)
    base = Path() if given.config is None else Path(given.config).parent
    folder = base / "certs" if given.folder is None else Path(given.folder)
    ca = folder / authority.CA
    data = files.read(ca, "the authority's certificate") if ca.exists() else b""
    if not data:
        mend = f"put the ca.pem that came with the invitation there: mkdir -m 700 {folder}"
        raise AccountError("there is no certificate of the owner's authority", where=str(ca), mend=mend)
    run = given.run or config.run or files.authority_run(files.certificate(data, str(ca))) or "run"
    found = [owners.request(folder, Identity(run, given.cluster, WORKER, number)) for number in numbers]
    kind, secret, password = _ask(given)
    texts = [each.path.read_text("ascii") for each in found]
    account = given.account or getpass.getuser()
    answer = ask(host, port, data, run, given.cluster, Asked(account, kind, secret, texts, hours, password))
    for each, pem in zip(found, answer["certificates"], strict=True):
        files.write(each.key.with_suffix(".pem"), str(pem).encode(), files.PUBLIC)
        each.path.unlink(missing_ok=True)
    _keep_lists(folder, answer["lists"])
    if given.json:
        print(json.dumps({name: answer[name] for name in ("account", "role", "until")}))
    else:
        who = ", ".join(each.identity.worker for each in found)
        print(f"logged in as {answer['account']} ({answer['role']}): {who}, good until {answer['until']}")
    return arguments.DONE


def _ask(given: argparse.Namespace) -> tuple[str, str, str | None]:
    """The kind of the secret, the secret, and a new password where there is one."""
    if given.token_file is not None:
        return TOKEN, _first_line(given.token_file, "the token"), None
    if given.invitation:
        invitation, password = ask_password("Invitation: "), ask_password("New password: ")
        if password != ask_password("The same again: "):
            raise AccountError("the two passwords differ", mend="type the same one twice")
        return INVITATION, invitation, password
    if given.password_file is not None:
        return PASSWORD, _first_line(given.password_file, "the password"), None
    return PASSWORD, ask_password(f"Password of {given.account or getpass.getuser()}: "), None


def _first_line(path: str, what: str) -> str:
    lines = files.read(path, what, secret=True).decode("utf-8", "replace").splitlines()
    return lines[0].strip() if lines else ""


def _keep_lists(folder: Path, lists: dict[str, str]) -> None:
    """Deny lists as the owner has them now: they are signed, and whoever reads them checks that."""
    for name, text in lists.items():
        if name == files.REVOKED or (name.startswith("revoked-") and name.endswith(".json") and "/" not in name):
            files.write(folder / name, text.encode(), files.PUBLIC)
