"""`whale-nebula login`: certificates for the workers of this host, by an account. Needs no TensorFlow."""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from whale_nebula.accounts.login import HOURS, MOST_HOURS, LoginRequest
from whale_nebula.accounts.registry import INVITATION, PASSWORD, TOKEN
from whale_nebula.accounts.service import LoginClient
from whale_nebula.cli import arguments
from whale_nebula.cli.accounts import ask_password, read_secret
from whale_nebula.cli.arguments import Options, Parser, answer, remark, user_name
from whale_nebula.cli.certs import find_folder, list_requested_identities, load_config
from whale_nebula.errors import AccountError, ConfigError, LoginError, NebulaError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import Credentials, Files, Identity, authority, files, owners

POLL_SECONDS = 3.0
_DESCRIPTION = """\
Log in to the service of a cluster's owner ("whale-nebula accounts serve"), directly or through the owner's gateway, and
get certificates for workers of this host that are valid for some hours. Private keys are created here and never leave
this host. The service is authenticated by ca.pem, which the owner sends with the invitation; the gateway cannot read
the exchange."""

_EPILOG = """\
examples:
  whale-nebula login --cluster gpu --at gpu.example.org:7100 --account ana --invitation    the first time
  whale-nebula login --cluster gpu --at gpu.example.org:7100 --account ana --count 2
  whale-nebula login --cluster gpu --config clusters.yaml --account ci --token-file token.txt
  whale-nebula login --cluster gpu --at gpu.example.org:7100 --account ci --token-file token.txt --keep
  whale-nebula login --cluster gpu --at gpu.example.org:7100 --lists --keep                  on a host of npu's owner

Then: whale-nebula run --config clusters.yaml --cluster gpu train.py

exit status:
  0   logged in        2   wrong command line
  1   refused          78  wrong config"""

_OPTIONS: Options = {
    "--cluster": ("NAME", "the cluster"),
    "--at": ("HOST:PORT", "the login service; default: the cluster's gateway of --config"),
    "--account": ("NAME", "the account; default: your user name on this host"),
    "--run": ("NAME", "the run's name, if there is no config with a name"),
    "--index": ("N", "the index of the worker in its cluster; default: 0"),
    "--count": ("N", "workers 0 to N-1"),
    "--hours": ("HOURS", f"validity of the certificates; default: {HOURS:g}, at most {MOST_HOURS:g}"),
    "--role": (
        "ROLE",
        "default: worker; accounts of owners may also use gateway, accounts of auditors use auditor",
    ),
    "--keep": (None, "keep running: log in again before certificates expire, and keep deny lists up to date"),
    "--lists": (None, "fetch only deny lists, no certificates: for hosts of other owners, with --keep"),
    "--invitation": (None, "first set a password with an invitation"),
    "--token-file": ("FILE", "a file, readable only by you, with a token to use in place of the password"),
    "--password-file": ("FILE", "a file, readable only by you, whose first line is the password"),
    "--config": ("FILE", "clusters.yaml: the run's name, and the location of certs"),
    "--folder": ("FOLDER", 'where ca.pem is and certificates are written; default: "certs" next to --config, or here'),
    "--json": (None, "print one JSON object"),
}


def make_parser() -> Parser:
    """The options of the command."""
    usage = "whale-nebula login --cluster NAME [--at HOST:PORT] [options]"
    return Parser("login", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = make_parser()
    args = parser.read(argv)
    if args.cluster is None or args.at is args.config is None:
        parser.error("missing login service: --cluster gpu --at gpu.example.org:7100")
    if args.invitation and (args.token_file or args.password_file):
        parser.error("--invitation prompts for the new password: remove --token-file and --password-file")
    hours = parser.amount("--hours", args.hours, HOURS)
    if args.keep and not (args.token_file or args.password_file or args.lists):
        parser.error("--keep logs in repeatedly, and needs --token-file or --password-file")
    if args.lists and (args.token_file or args.password_file or args.invitation or args.account):
        parser.error("--lists needs no login: remove the options of the account")
    requested_identities = list_requested_identities(args, parser)

    def run() -> int:
        login = Login(args, *_find_service(args, parser), hours, requested_identities)
        if args.lists:
            login.write_deny_lists(login.service.fetch_deny_lists())
        until = None if args.lists else login.log_in()
        if not args.keep:
            return arguments.DONE
        stopped = arguments.catch_stop_signals()
        return keep_logged_in(login, until, lambda seconds: not stopped.wait(seconds), files.now)

    return answer(args, run)


def _find_service(args: argparse.Namespace, parser: Parser) -> tuple[str, int]:
    """The host and the port where accounts log in: --at, or the cluster's gateway in --config."""
    at = args.at or load_config(args).gateway_of(args.cluster)
    if at is None:
        parser.error(f"missing --at HOST:PORT: the config has no gateway of {args.cluster}")
    return parser.address("--at", at)


def print_line(text: str) -> None:
    """Print a line at once, also into a file or a pipe."""
    print(text, flush=True)


class Login:
    """A repeatable login of this host."""

    def __init__(
        self,
        args: argparse.Namespace,
        host: str,
        port: int,
        hours: float,
        requested_identities: Sequence[tuple[str, str, int]],
        report: Callable[[str], None] = print_line,
    ) -> None:
        self.report = report
        config, self.folder = load_config(args), find_folder(args)
        ca = self.folder / authority.CA
        if not ca.exists():
            mend = f"store the ca.pem that came with the invitation there: mkdir -m 700 {self.folder}"
            raise AccountError("missing certificate of the owner's authority", where=str(ca), mend=mend)
        data = files.read(ca, "the authority's certificate")
        run = args.run or config.run or files.find_authority_run(files.parse_certificate(data, str(ca))) or "run"
        self.requested_identities = [Identity(run, *each) for each in requested_identities]
        self.service = LoginClient(host, port, data, run, args.cluster)
        self.args, self.hours = args, hours

    def log_in(self) -> datetime:
        """Request certificates, write them and the deny lists, and report; returns the earliest expiry."""
        account = self.args.account or user_name()
        for identity in self.requested_identities:
            self._check_account(identity, account)
        requests = [owners.request(self.folder, each) for each in self.requested_identities]
        kind, secret, password = _ask_secret(self.args)
        texts = [each.path.read_text("ascii") for each in requests]
        answer = self.service.log_in(LoginRequest(account, kind, secret, texts, self.hours, password))
        certificates = [files.parse_certificate(str(pem), "the service's answer") for pem in answer["certificates"]]
        for each, certificate in zip(requests, certificates, strict=True):
            peer = files.read_peer(certificate)
            if (peer.identity, peer.key[:32]) != (each.identity, each.digest):
                what = f"the service returned a certificate that does not match {each.identity.worker} and its key"
                raise AccountError(what, where=self.service.host, mend="ask the owner of the cluster")
        for each, pem in zip(requests, answer["certificates"], strict=True):
            files.write(each.key.with_suffix(".pem"), str(pem).encode(), files.PUBLIC)
            each.path.unlink(missing_ok=True)
        self.write_deny_lists(answer["lists"])
        until = min(each.not_valid_after_utc for each in certificates)
        if self.args.json:
            document = {"account": answer.get("account"), "role": answer.get("role"), "until": until.isoformat()}
            self.report(json.dumps(document))
        else:
            workers = ", ".join(each.identity.worker for each in requests)
            name = f"{answer.get('account')} ({answer.get('role')})"
            self.report(f"logged in as {name}: {workers}, valid until {until:%Y-%m-%d %H:%M} UTC")
        return until

    def _check_account(self, identity: Identity, account: str) -> None:
        """Refuse to replace the key and certificate of another account."""
        path, present_account = Files.in_folder(self.folder, identity).cert, ""
        with contextlib.suppress(NebulaError):  # missing or unreadable
            present_account = files.read_peer(
                files.parse_certificate(files.read(path, "a certificate"), str(path))
            ).account
        if present_account not in ("", account):
            raise AccountError(
                f"{path} belongs to account {escape_foreign_text(present_account, 64)}, not to {account}",
                mend="use your own --folder, and set it in the config: security: {cert: ..., key: ...}; "
                f"or remove {path.name} and its .key if they are no longer needed",
            )

    def write_deny_lists(self, lists: Mapping[str, str]) -> None:
        """Store the current deny lists of the authorities that this host trusts; skips those of unknown owners, and
        older ones.
        """
        known = authority.load_certificates(self.folder)
        with files.lock_folder(self.folder):
            for text in lists.values():
                owners.store_deny_list(self.folder, text.encode("utf-8", "replace"), known, refuse=False)

    def find_expiry(self) -> datetime | None:
        """The earliest expiry of the present certificates; None if one is missing or not valid."""
        ends = []
        for each in self.requested_identities:
            try:
                found = Credentials.load(Files.in_folder(self.folder, each))
                found.check_now()
            except NebulaError:
                return None
            ends.append(found.peer.not_after)
        return min(ends, default=None)


@contextlib.contextmanager
def renew_certificates(
    config: str, identities: Sequence[Identity], account: str | None, token_file: str
) -> Iterator[None]:
    """Renew the certificates of processes of this host while they run: log in by a token in the last quarter of their
    validity, or now if they are missing, and keep deny lists up to date.
    """
    cluster = identities[0].cluster
    words = ["--cluster", cluster, "--config", config, "--token-file", token_file]
    parser = make_parser()
    args = parser.read([*words, *(["--account", account] if account else [])])
    base, security = find_folder(args), load_config(args).security
    for each in identities:
        used, written = Files.from_config(security, each, Path(config).parent).cert, Files.in_folder(base, each).cert
        if used.absolute() != written.absolute():
            mend = "remove security: {cert: ..., key: ...} from the config, or renew with whale-nebula login --keep"
            raise ConfigError("a login writes other files than the config names", why=f"{written}, {used}", mend=mend)
    requested = [(each.cluster, each.role, each.index) for each in identities]
    login = Login(args, *_find_service(args, parser), HOURS, requested, remark)
    until = login.find_expiry() or login.log_in()
    stopped = threading.Event()

    def renew() -> None:
        try:
            keep_logged_in(login, until, lambda seconds: not stopped.wait(seconds), files.now)
        except NebulaError as error:
            remark(f"certificates of {cluster} are no longer renewed: {error}")

    thread = threading.Thread(target=renew, name="nebula-renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(POLL_SECONDS)


def keep_logged_in(
    login: Login, until: datetime | None, wait: Callable[[float], bool], now: Callable[[], datetime]
) -> int:
    """Fetch the deny lists every few seconds, and log in again in the last quarter of the certificates' validity, until
    `wait` returns that it is over.
    """
    started, reported = now(), ""
    while wait(POLL_SECONDS):
        try:
            if until is not None and until - now() < (until - started) / 4:
                until, started = login.log_in(), now()
            login.write_deny_lists(login.service.fetch_deny_lists())
            reported = ""
        except LoginError:
            raise
        except NebulaError as error:
            if error.what != reported:
                remark(f"continuing with the existing files: {error}")
            reported = error.what
    return arguments.DONE


def _ask_secret(args: argparse.Namespace) -> tuple[str, str, str | None]:
    """The kind of the secret, the secret, and with an invitation the new password: read from files, or asked for."""
    if args.token_file is not None:
        return TOKEN, read_secret(args.token_file, "token").strip(), None
    if args.invitation:
        invitation, password = ask_password("Invitation: "), ask_password("New password: ")
        if password != ask_password("Repeat the new password: "):
            raise AccountError("the two passwords differ", mend="enter the same password twice")
        return INVITATION, invitation, password
    if args.password_file is not None:
        return PASSWORD, read_secret(args.password_file, "password"), None
    return PASSWORD, ask_password(f"Password of {args.account or user_name()}: "), None
