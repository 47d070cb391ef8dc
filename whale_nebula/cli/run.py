"""`whale-nebula run`: start a script as the workers of one cluster, or of all clusters, and supervise them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

from whale_nebula.checkpoint.folder import save_memory_to_disk
from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import SIGNALLED, Answer, Options, Parser, answer, print_error, remark
from whale_nebula.config import Config, load
from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import ConfigError, NebulaError
from whale_nebula.launch import Job, Result, gateways
from whale_nebula.launch.attach import Identity
from whale_nebula.launch.control import Answer as Reply
from whale_nebula.launch.control import parse_counts, parse_notice, serve_control_socket, watch_notices
from whale_nebula.launch.elastic import Membership
from whale_nebula.launch.placement import (
    PORT,
    Placement,
    PlacementRequest,
    assign_ports,
    await_free_ports,
    is_local,
    place_all_workers,
)
from whale_nebula.launch.resolve import Resolved, resolve
from whale_nebula.launch.restarts import Attempts, RestartPolicy, RunEnd, describe_exit, find_first_failed
from whale_nebula.launch.standby import Standbys
from whale_nebula.launch.tenancy import Tenancy, describe_policy, open_tenancy
from whale_nebula.launch.worker_exit import find_last_error_line, find_last_message, is_same_cause
from whale_nebula.launch.worker_output import Sink, TerminalScreen
from whale_nebula.launch.worker_processes import Output, create_identities, derive_seed, start_workers
from whale_nebula.report.prometheus import Metric, Sample, read_reports, render_metrics, serve_metrics
from whale_nebula.report.screen import Screen, find_terminal
from whale_nebula.security.approval import check_script
from whale_nebula.security.identity import Identity as CertifiedIdentity
from whale_nebula.security.tenant import Tenant, check_disk_limit


def report_end(ended: RunEnd, signal_handler: SignalHandler, *, as_json: bool) -> int:
    """Report how a run ended, if it failed; returns the exit status."""
    result = ended.result
    code, worker, why = _describe_end(ended, signal_handler)
    for line in _describe_others(result, worker):
        remark(line)
    if ended.why:
        same = ended.first is None or str(ended.first) == f"worker {worker} {why}"
        remark(ended.why if same else f"{ended.why}; in epoch 0 {ended.first}")
    if worker is not None:
        remark(f"worker {worker} {_complete_error(why, result.outcomes[worker].err)}")
    elif why and not as_json:
        remark(why)
    if as_json:
        codes = {name: arguments.shell_code(each) for name, each in result.codes.items()}
        document = {"code": code, "worker": worker, "why": why, "codes": codes, "epoch": ended.epoch}
        print(json.dumps(document), flush=True)
    return code


def _describe_others(result: Result, first: str | None) -> Iterator[str]:
    """A line for each worker that failed after the `first`, except those that the launcher killed. For the same cause
    the error is not repeated.
    """
    cause = "" if first is None else result.outcomes[first].err
    for name, outcome in result.outcomes.items():
        if name == first or outcome.code in (0, arguments.LEFT) or (outcome.code < 0 and name not in result.frozen):
            continue
        how = describe_exit(result, outcome)
        same = outcome.code > 0 and is_same_cause(cause, outcome.err)
        reason = f"exit code {outcome.code}, for the same reason" if same else _complete_error(how, outcome.err)
        yield f"worker {name} failed{', too' if first is not None else ''}: {reason}"


def _complete_error(why: str, errors: str) -> str:
    """The reason of a failure; if it ends with the last line of a worker's error, with all lines of that error."""
    line = find_last_error_line(errors)
    return why.removesuffix(line) + find_last_message(errors) if line and why.endswith(line) else why


def _describe_end(ended: RunEnd, signal_handler: SignalHandler) -> tuple[int, str | None, str]:
    """The exit status, the worker that failed first, if any, and the reason; "" if all have succeeded."""
    result = ended.result
    if signal_handler.second_signal is not None:
        return arguments.SIGNALLED + signal_handler.second_signal, None, "the workers were killed"
    if signal_handler.restart_cancelled and result.culprit is not None:
        return arguments.LEFT, None, "no worker was running, and none is restarted; the run can be started again"
    if result.late:
        left = [name for name, code in result.codes.items() if code == -signal.SIGKILL]
        return (
            arguments.shell_code(-signal.SIGKILL),
            None,
            f"killed, because they did not exit in time: {', '.join(left)}",
        )
    first = find_first_failed(result)
    if first is None:
        return arguments.DONE, None, ""
    if first.code == arguments.LEFT:
        return arguments.LEFT, None, "the workers exited on request; the run can be started again"
    code = arguments.USED_UP if ended.used_up else arguments.shell_code(first.code)
    return code, first.worker, f"failed first: {describe_exit(result, first)}"


def _describe_start(args: argparse.Namespace, config: Config, found: Resolved, script: Sequence[str]) -> Answer:
    workers = []
    for worker, address in found.placement.addresses.items():
        cluster, here = cluster_of(worker), worker in found.placement.here
        known = {"worker": worker, "cluster": cluster, "address": address, "here": here}
        workers.append({**known, "gateway": config.gateway_of(cluster)})
    document = {
        "run": config.run_name,
        "answered": found.source,
        "config": args.config,
        "insecure": config.security.insecure,
        "seed": derive_seed(config),
        "patience": config.patience,
        "restarts": config.restarts.most,
        "script": list(script),
        "workers": workers,
    }
    lines, width = [], max(map(len, found.placement.addresses))
    for each in workers:
        state = "starts here" if each["here"] else "elsewhere"
        behind = f", behind gateway {each['gateway']}" if each["gateway"] else ""
        lines.append(f"  {each['worker']:<{width}}  {state:<12}  {each['address']}{behind}")
    secured = "certificates for this run only" if args.all else "certificates of the config"
    secured = "insecure: links are not encrypted" if config.security.insecure else secured
    first = f"run {config.run_name!r} of {' '.join(script)}, seed {derive_seed(config)}"
    if config.restarts.most:
        first += f", {config.restarts.most} restart{'s' * (config.restarts.most > 1)}"
    return document, "\n".join([first, *lines, f"{secured}; addresses of the workers from {found.source}"])


_DESCRIPTION = """\
Run a script as the workers of this host: one process per worker, connected to the workers of the other clusters.

The addresses of all workers come from the config or from the environment of the job: TF_CONFIG, Slurm, or the
variables of a Kubernetes JobSet. With --all, every worker of every cluster starts on this machine, connected over
mutual TLS with certificates that are valid for this run only.

The output of workers is printed line by line; on a terminal each line starts with the worker's name. The first SIGTERM,
SIGINT or SIGHUP lets workers exit between two steps, a second one kills them. If a worker fails, all others are
stopped. With --restarts, all workers are then started again; nb.here().epoch is the number of restarts so far."""

_EPILOG = """\
examples:
  whale-nebula run --all --clusters gpu,npu train.py             both clusters on this machine
  whale-nebula run --all --config clusters.yaml train.py         all clusters of a config on this machine
  whale-nebula run --config clusters.yaml --cluster gpu train.py            at the first site
  whale-nebula run --config clusters.yaml --cluster npu train.py --lr 0.1   at the second site
  whale-nebula run --config clusters.yaml --cluster gpu --worker 1 train.py one worker of several
  whale-nebula run --config clusters.yaml --cluster gpu --restarts 3 train.py    restart after failures
  whale-nebula run --all --config clusters.yaml --control run.sock train.py  with elastic: in the config,
      curl --unix-socket run.sock -X POST "http://run/resize?npu=1"         changes the number of workers
  srun whale-nebula run --config clusters.yaml --cluster gpu train.py       in a Slurm job
  whale-nebula run --explain --config clusters.yaml --cluster gpu           where worker addresses come from
  whale-nebula run --dry-run --json --all --config clusters.yaml train.py   what would be started

Options of this command come before the script; everything after the script is passed to it.

exit status:
  0    all workers succeeded               75   workers were asked to exit, and did so between two steps
  2    wrong command line                  78   wrong config, environment or certificates
  66   the script does not exist           130, 143, 129  killed by a second signal
  70   workers failed, and --restarts are used up
  otherwise the status of the worker that failed first; 128 + n after signal n (137: killed, or frozen)"""

_OPTIONS: Options = {
    "--all": (None, "start every worker of every cluster on this machine"),
    "--explain": (None, "print which sources know the workers' addresses, and why the others do not; start nothing"),
    "--dry-run": (None, "print what would be started; start nothing"),
    "--json": (None, "print one JSON object: the answer, or, as the last line, how the run ended"),
    "--config": ("FILE", "clusters.yaml"),
    "--cluster": ("NAME", "the cluster of this host"),
    "--worker": ("N", "the index of this worker in its cluster, from 0"),
    "--clusters": ("A,B", "with --all and without a config: the clusters that the script's stages name"),
    "--restarts": ("N", "how often to restart workers after a failure; default: restarts of the config, or 0"),
    "--standby": (None, "beside each worker, a process that has imported TensorFlow: restarts take seconds less"),
    "--control": (
        "PATH",
        "a socket file on which the launcher serves HTTP: GET /status, /metrics, POST /resize, /preempt",
    ),
    "--notices": ("FILE", "a file in which a platform writes preempt, or numbers of workers (npu=1), during the run"),
    "--metrics": ("HOST:PORT", "address for GET /metrics (Prometheus); also served on the --control socket"),
    "--token-file": ("FILE", "a token that renews the certificates of this host's workers during the run"),
    "--account": ("NAME", "the account of the token; default: your user name on this host"),
    "--port": ("PORT", f"with Slurm and JobSet: the port of the workers; default: {PORT}"),
}


def make_parser() -> Parser:
    """The options of the command."""
    usage = "whale-nebula run [options] SCRIPT [arguments of the script]"
    return Parser("run", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the script with its arguments.

    >>> split_arguments(["--config", "c.yaml", "--all", "train.py", "--all", "x"])
    (['--config', 'c.yaml', '--all'], ['train.py', '--all', 'x'])
    """
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        at += 2 if _OPTIONS.get(argv[at], (None,))[0] is not None else 1
    script = at + 1 if at < len(argv) and argv[at] == "--" else at
    return list(argv[:at]), list(argv[script:])


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = make_parser()
    options, script = split_arguments(argv)
    args = parser.read(options)
    _check(parser, args, script)
    if script and not os.path.isfile(script[0]):
        error = ConfigError(f"script {script[0]!r} does not exist", mend="whale-nebula run [options] path/to/train.py")
        return print_error(error, as_json=args.json, code=arguments.NO_FILE)
    return answer(args, lambda: _run(args, script), {NebulaError: arguments.CONFIG})


def _check(parser: Parser, args: argparse.Namespace, script: Sequence[str]) -> None:
    if not script and not args.explain:
        parser.error("missing script: whale-nebula run [options] train.py")
    if args.all and (args.cluster is not None or args.worker is not None):
        parser.error("--all starts all workers of all clusters, and cannot be combined with --cluster or --worker")
    if args.token_file is not None and (args.all or args.config is None):
        parser.error("--token-file renews the certificates of --config, and cannot be combined with --all")
    if args.clusters is not None and (not args.all or args.config is not None):
        parser.error("--clusters needs --all and replaces --config: --all --clusters gpu,npu")
    args.worker, args.port = parser.number("--worker", args.worker), parser.number("--port", args.port)
    args.restarts = parser.number("--restarts", args.restarts)


def _run(args: argparse.Namespace, script: Sequence[str]) -> int | Answer:
    written = config = load(args.config)
    if args.restarts is not None:
        written = config = replace(config, restarts=replace(config.restarts, most=args.restarts))
    config = gateways.place_gateways(config, is_local) if args.all else config
    found = _place_workers(args, config)
    if args.explain:
        return {"answered": found.source, "declined": dict(found.declined)}, found.explain()
    gateways.check_names(config, found.placement.addresses)
    if not args.all:
        gateways.check_gateways(config, cluster_of(found.placement.here[0]))
    elif gateways.list_gateway_names(written) and not gateways.list_gateway_names(config):
        remark("no gateway is started, because not every cluster of the config has one")
    if args.dry_run:
        return _describe_start(args, config, found, script)
    if config.security.insecure:
        remark(f"insecure: true in {args.config}: connections are neither encrypted nor authenticated")
    signal_handler = SignalHandler(config.patience)
    with handle_signals(signal_handler), contextlib.ExitStack() as resources:
        ended = _start(args, config, found.placement, script, signal_handler, resources)
    return report_end(ended, signal_handler, as_json=args.json)


def _check_standby(config: Config, tenant: Tenant | None) -> None:
    """Refuse --standby where no standby process could be used."""
    if not config.restarts.most and not config.elastic:
        raise ConfigError(
            "--standby, but no worker is started again", mend="add --restarts N, or elastic: to the config"
        )
    if config.approvals is not None or tenant is not None:
        raise ConfigError(
            f"--standby in a run {'with approvals' if tenant is None else f'of {tenant}'}",
            why="a standby process is neither checked nor limited before it becomes a worker",
            mend="remove --standby",
        )


def _place_workers(args: argparse.Namespace, config: Config) -> Resolved:
    if args.all:
        names = [name.strip() for name in (args.clusters or "").split(",") if name.strip()]
        return Resolved(assign_ports(place_all_workers(config, names, is_local)), "--all", {})
    found = resolve(config, os.environ, PlacementRequest(args.cluster, args.worker, args.port or PORT, is_local))
    return found._replace(placement=assign_ports(found.placement))


def _start(
    args: argparse.Namespace,
    config: Config,
    placement: Placement,
    script: Sequence[str],
    signal_handler: SignalHandler,
    resources: contextlib.ExitStack,
) -> RunEnd:
    """Check certificates, start the workers of this host, and wait until they have ended without a further restart."""
    if args.all or len(placement.addresses) == 1:
        owners = [*placement.here, *gateways.list_gateway_names(config)]
        security, tenant = resources.enter_context(gateways.issue_for_run(config, owners)), None
    else:
        if args.token_file is not None:
            from whale_nebula.cli.login import renew_certificates

            identities = [CertifiedIdentity.of_worker(config.run_name, each) for each in placement.here]
            resources.enter_context(renew_certificates(args.config, identities, args.account, args.token_file))
        security = gateways.configured_files(config, placement.here, args.config)
        tenant = gateways.check_files(security, config.run_name)
    if args.standby:
        _check_standby(config, tenant)
    tenancy = resources.enter_context(open_tenancy(tenant, gateways.find_config_folder(args.config), security, remark))
    home = None if tenancy is None else str(tenancy.home)
    listen = gateways.choose_listen_addresses(config, placement, remark)
    memory = resources.enter_context(gateways.open_memory_folder())
    folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="whale-nebula-")) if config.elastic else None
    membership = Membership(config, placement, None if folder is None else os.path.join(folder, "requests.json"))
    if config.elastic and membership.anchor is not None:
        anchor = membership.anchor
        remark(f"{anchor} is the anchor: its launcher decides on absent workers, and without it the run waits")

    has_metrics = args.control is not None or args.metrics is not None
    reports = resources.enter_context(tempfile.TemporaryDirectory(prefix="whale-nebula-")) if has_metrics else None

    def make_identities() -> dict[str, Identity]:
        return create_identities(
            membership.begin_next_start(), config, security, listen=listen, path=args.config, has_one_launcher=args.all,
            memory=memory, absent=membership.find_absent(), requests_path=membership.path, reports=reports,
            previous_end=signal_handler.ended_at, launched=placement.here, anchor=membership.anchor, tenant=tenant,
            home=home,
        )  # fmt: skip

    sys.stdout.flush()
    output = resources.enter_context(_open_output())
    if args.all:
        running = gateways.run_gateways(config, placement, security, restarts=config.restarts, report=remark)
        resources.enter_context(running)
        if names := " and ".join(gateways.list_gateway_names(config)):
            remark(f"{names} run here, too; their audit logs are deleted after the run (between hosts they are kept)")
    argv = ["-m", "whale_nebula.launch.child", *script]

    standbys = Standbys(placement.here if args.standby else (), remark)
    resources.callback(standbys.close)

    @contextlib.contextmanager
    def start(epoch: int) -> Iterator[Job]:
        if epoch:
            await_free_ports(listen, config.patience)
        approvals = _check_approvals(config, args.config, placement, script[0], tenancy)
        workers, enforcer = make_identities(), None if tenancy is None else tenancy.limits
        if tenancy is not None:
            policy = {**describe_policy(config, args.config), "approvals": approvals}
            tenancy.note_start(list(workers), script[0], epoch, policy)
        with (
            start_workers(
                argv, workers, output=output, notice=remark, epoch=epoch, start_process=standbys.start,
                enforcer=enforcer,
            ) as job,
            standbys.start_beside(job),
        ):  # fmt: skip
            signal_handler.begin(job)
            try:
                yield job
            finally:
                signal_handler.job, signal_handler.ended_at = None, time.time()

    attempts = Attempts(
        RestartPolicy(config.restarts, config.patience), start, wait=signal_handler.wait, report=remark,
        is_stopped=lambda: signal_handler.first_signal is not None, describe_change=membership.adopt_counts,
        is_leaving=lambda: membership.is_leaving, note_failure=membership.note_failure,
    )  # fmt: skip
    metrics = partial(_render_metrics, reports, membership, signal_handler)
    if args.control is not None:
        resources.enter_context(_serve_control(args.control, membership, signal_handler, metrics))
    if args.notices is not None:
        notices = partial(_handle_notice, args.notices, membership, signal_handler)
        resources.enter_context(watch_notices(args.notices, notices))
    if args.metrics is not None:
        port = resources.enter_context(serve_metrics(args.metrics, metrics))
        remark(f"metrics are at http://{args.metrics.rpartition(':')[0] or 'localhost'}:{port}/metrics")
    ended = attempts.run(config.patience)
    for line in () if memory is None else save_memory_to_disk(memory, partial(_check_room, tenant, home)):
        remark(line)
    if tenancy is not None:
        tenancy.note_end(ended.result.codes, ended.result.excess, ended.epoch)
    return ended


def _check_approvals(
    config: Config, source: str | None, placement: Placement, script: str, tenancy: Tenancy | None
) -> list[str]:
    """The serial numbers of the approvals of a script, if the config requires them. A script without one is refused,
    which is recorded if the run belongs to an account.
    """
    clusters = dict.fromkeys(map(cluster_of, placement.here)) if config.approvals is not None else ()
    try:
        found = [check_script(config, source, cluster, script).approval for cluster in clusters]
    except NebulaError as error:
        if tenancy is not None:
            reason = f"{error.code} {error.what}" + f": {error.why}" * bool(error.why)
            tenancy.note_refusal(script, reason, describe_policy(config, source))
        raise
    return [each.serial for each in found if each is not None]


def _check_room(tenant: Tenant | None, home: str | None, folder: str, need: int) -> None:
    """Check that the account of this run, if it has one, may write `need` more bytes to a folder."""
    if tenant is not None:
        check_disk_limit(tenant, [Path(each) for each in (home, folder) if each is not None], need)


_WORKERS = Metric("workers", "gauge", "Running workers of the launcher.", lambda report: ())
_STARTS = Metric("starts_total", "counter", "How often the launcher has started its workers.", lambda report: ())


def _render_metrics(reports: str | None, membership: Membership, signal_handler: SignalHandler) -> str:
    """The metrics for Prometheus: those of the launcher, and of its workers' last reports."""
    running = Counter(map(cluster_of, () if signal_handler.job is None else signal_handler.job.pids))
    workers = [Sample(running[cluster], {"cluster": cluster}) for cluster in membership.current_counts]
    own = [(_WORKERS, workers), (_STARTS, [Sample(signal_handler.starts, {})])]
    return render_metrics([] if reports is None else read_reports(reports), own)


def _serve_control(
    path: str, membership: Membership, signal_handler: SignalHandler, metrics: Callable[[], str]
) -> contextlib.AbstractContextManager[None]:
    """Serve the launcher's control socket: status, resize, preempt, metrics."""

    def status(args: Mapping[str, str]) -> Reply:
        running = {} if signal_handler.job is None else signal_handler.job.pids
        return {**membership.describe(), "running": running}

    def resize(args: Mapping[str, str]) -> Reply:
        _resize(membership, signal_handler, parse_counts(args))
        return membership.describe()

    def preempt(args: Mapping[str, str]) -> Reply:
        _preempt()
        return {"leaving": True}

    def answer_metrics(args: Mapping[str, str]) -> Reply:
        return metrics()

    return serve_control_socket(
        path, {"/status": status, "/metrics": answer_metrics}, {"/resize": resize, "/preempt": preempt}
    )


def _resize(membership: Membership, signal_handler: SignalHandler, counts: Mapping[str, int]) -> None:
    if membership.request_counts(counts):
        signal_handler.apply_resize()


def _preempt() -> None:
    """Ask all workers to save and leave: a SIGTERM to this launcher."""
    os.kill(os.getpid(), signal.SIGTERM)


def _handle_notice(path: str, membership: Membership, signal_handler: SignalHandler, text: str) -> None:
    """Do what a notice in a file asks for; one that is not valid is reported."""
    try:
        counts = parse_notice(text)
        if counts:
            _resize(membership, signal_handler, counts)
        else:
            _preempt()
    except NebulaError as error:
        remark(f"the notice in {path} is ignored: {error}")


@contextlib.contextmanager
def _open_output() -> Iterator[Output]:
    """The destination of the workers' output. On a terminal lines are prefixed with names, and a table may be drawn
    below.
    """
    named = frozenset(name for name, stream in (("out", sys.stdout), ("err", sys.stderr)) if stream.isatty())
    stream = find_terminal()
    if stream is None:
        yield Output()
        return
    screen = Screen(stream)
    screen.open()
    try:
        sinks = {name: Sink(fd, screen if name in named else None) for name, fd in (("out", 1), ("err", 2))}
        yield Output(sinks, named, TerminalScreen(stream.fileno(), screen))
    finally:
        screen.close()


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class SignalHandler:
    """The reaction to signals, by the state of the run: the running `job`, None between two starts, `ended_at` (the
    time when the last one ended) and the number of `starts`.

    A signal ends the command before the first start. While workers run, the first signal asks them to exit within
    `patience` seconds, and the second kills them. Between two starts a signal prevents the next one
    (`restart_cancelled`), or ends it if it has begun.
    """

    patience: float
    job: Job | None = None
    first_signal: int | None = None
    second_signal: int | None = None
    restart_cancelled: bool = False
    ended_at: float | None = None
    starts: int = 0
    _rest_queue: queue.SimpleQueue[int] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. It may arrive in the middle of a print, so this writes to the descriptor directly."""
        name = signal.Signals(number).name
        between = self.job is None and self.ended_at is not None  # between two starts, or after the last one
        if self.job is None and not between:
            sys.exit(SIGNALLED + number)
        first, text = self.first_signal is None, f"{name} again: killing the workers"
        if first:
            text = f"{name}: the workers exit after their next step, within {self.patience:g} s; repeat it to kill them"
        if between:
            text = f"{name}: no restart"
        with contextlib.suppress(OSError):
            os.write(2, f"whale-nebula: {text}\n".encode())
        self.first_signal = number if first else self.first_signal
        if between:
            self.restart_cancelled = True
            if self._rest_queue is not None:
                self._rest_queue.put(number)
        elif self.job is not None and first:
            self.job.request_exit(number, self.patience)
        elif self.job is not None:
            self.second_signal = number
            self.job.kill_now()

    def begin(self, job: Job) -> None:
        """Note the job whose workers were started. A signal that has arrived meanwhile asks them to exit."""
        self.job, self.starts = job, self.starts + 1
        if self.restart_cancelled and self.first_signal is not None:
            job.request_exit(self.first_signal, self.patience)

    def apply_resize(self) -> None:
        """Let workers that have taken no step exit at once, to be restarted in different numbers; others announce the
        request with a step.
        """
        if self.job is not None and not self.job.has_stepped:
            self.job.request_exit(signal.SIGTERM, self.patience)

    def wait(self, seconds: float) -> bool:
        """Wait for some seconds, or until a signal arrives; returns whether none did."""
        self._rest_queue = queue.SimpleQueue()
        try:
            if not self.restart_cancelled:
                self._rest_queue.get(timeout=seconds)
        except queue.Empty:
            return not self.restart_cancelled
        finally:
            self._rest_queue = None
        return False


@contextlib.contextmanager
def handle_signals(signal_handler: SignalHandler) -> Iterator[None]:
    """Handle signals while the context is open, except those that the parent process set to be ignored (nohup)."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, signal_handler.handle)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
