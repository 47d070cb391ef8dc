"""The Run that `nb.init` opens: the clusters, the links between them, and this process's worker."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from whale_nebula.config import Checkpointing, Config, Links, load, parse_checkpoint, parse_links, quantities
from whale_nebula.config.place import Place
from whale_nebula.errors import ConfigError, OptionError, StateError
from whale_nebula.errors.text import closest, did_you_mean, list_names
from whale_nebula.feed.checks import check_named_inputs, parse_ids
from whale_nebula.launch.attach import Attachment, attach
from whale_nebula.launch.seeding import keep_generators, seed_all
from whale_nebula.plan.pins import Approvals, Pinned, Pins, read_pins
from whale_nebula.report.published import forget, watch
from whale_nebula.report.watchers import OUTPUTS, OutputOptions, open_outputs
from whale_nebula.scopes import options
from whale_nebula.scopes.auto import set_limits
from whale_nebula.scopes.identity import LOCAL, set_clusters
from whale_nebula.scopes.observer import observer
from whale_nebula.scopes.options import check_signature, scope
from whale_nebula.security.approval import check_process, read_approvals
from whale_nebula.site import calling_site, script_site, short_traceback, warn_at


@dataclass(frozen=True)
class Here:
    """The position of this process: its cluster and worker, whether it leads, all clusters of the run, and the run's
    epoch, that is, the number of restarts of its workers (`whale-nebula run --restarts`). `runs_for` has the absent
    clusters whose stages this process's cluster runs (`elastic:`).

    A single process has every cluster, and leads.

    >>> Here("local", "local/0", True, ("gpu", "npu"), alone=True).runs("gpu")
    True
    >>> Here("npu", "npu/0", True, ("gpu", "npu")).runs("gpu")
    False
    """

    cluster: str
    worker: str
    lead: bool
    clusters: tuple[str, ...]
    alone: bool = False
    epoch: int = 0
    runs_for: tuple[str, ...] = ()

    def runs(self, cluster: str) -> bool:
        """Whether this process runs stages of a cluster; always true in a single process. Warns of unknown names: with
        a config, names that it does not contain; without one, names similar to a cluster's.
        """
        fixed = not self.alone or (_run is not None and bool(_run.config.clusters))
        known = self.clusters if _run is None else (*self.clusters, *_run.replacements)
        if cluster not in known and (fixed or closest(cluster, self.clusters, similarity=0.75) is not None):
            warn_at(
                calling_site(),
                f"nb.here().runs({cluster!r}): unknown cluster",
                why=f"the clusters are {list_names(self.clusters)}",
                mend=did_you_mean(cluster, self.clusters),
            )
        return self.alone or cluster in (self.cluster, *self.runs_for)


@dataclass
class CurrentStep:
    """The running step, for code outside the graph: its number, its number of micro-batches, which is 0 between steps,
    and whether each cluster trains a copy of the whole program.
    """

    number: int = 0
    micro_batches: int = 0
    is_local_sgd: bool = False


@dataclass
class Run:
    """An open run. It is closed by `nb.shutdown()`, or at the end of its block as a context manager.

    `clusters` are those of the programs so far, and `programs` is their number. In a run of several processes,
    `attachment` is the identity of this one, `ledger` has its session and the variables that it holds, and `hosts` has
    a text for each worker, the same for those with this one's host and folder. `source` is the path of the config, and
    `site` the line that opened the run, which is `implicit` without `nb.init`. `compares_rows` is true if `ids` names
    an input of a program. `channels` are the states of codecs, and `models` the models to which they belong.
    `decisions` are those of the planner, `intervals` those of local SGD that were chosen, with the variables that they
    are for, and `length_choices` those of curricula. `rounds` are the open exchanges of local SGD. `closers` are called
    at the end.
    """

    config: Config
    links: Links
    seed: int | None = None
    ids: str | Sequence[str] | None = None
    attachment: Attachment | None = None
    clusters: list[str] = field(default_factory=list)
    programs: int = 0
    closers: list[Callable[[], object]] = field(default_factory=list)
    ledger: Any = None
    hosts: dict[str, str] = field(default_factory=dict)
    site: str = ""
    implicit: bool = False
    pins: Pins = field(default_factory=Pins)
    approvals: Approvals | None = None
    links_checked: bool = False
    channels: dict[str, Any] = field(default_factory=dict)
    models: Any = None
    source: str = ""
    compares_rows: bool = False
    rounds: Any = None
    decisions: list[Any] = field(default_factory=list)
    measured_links: list[Any] = field(default_factory=list)
    measured_collectives: list[Any] = field(default_factory=list)
    intervals: list[tuple[Any, frozenset[int]]] = field(default_factory=list)
    length_choices: dict[str, Any] = field(default_factory=dict)
    checkpoints: Any = None
    data: dict[str, Any] = field(default_factory=dict)
    traces: list[Any] = field(default_factory=list)
    current_step: CurrentStep = field(default_factory=CurrentStep)

    def __repr__(self) -> str:
        here = self.here()
        where = "all of them in this process" if here.alone else f"this is {here.worker}"
        return f"<run of clusters {', '.join(here.clusters)}; {where}>"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, SystemExit | GeneratorExit):
            report_failure(error)
        shutdown()

    @property
    def writes_files(self) -> bool:
        """Whether this process, the first of its host, writes files that all processes of the host would write."""
        worker = self.attachment.worker if self.attachment is not None else ""
        same = [name for name, host in self.hosts.items() if host == self.hosts.get(worker)]
        return not same or worker == min(same)

    @property
    def first_of_cluster(self) -> bool:
        """Whether this process is the first worker of its cluster, which saves the cluster's own state."""
        here = self.attachment
        return here is None or here.worker == min(w for w, cluster in self.workers.items() if cluster == here.cluster)

    @property
    def alone(self) -> bool:
        """Whether all clusters are in this process."""
        return self.attachment is None

    @property
    def workers(self) -> Mapping[str, str]:
        """Worker to cluster, for a run of several processes."""
        if self.attachment is None:
            return {}
        return dict(sorted({self.attachment.worker: self.attachment.cluster, **self.attachment.peers}.items()))

    @property
    def cluster_sizes(self) -> dict[str, int]:
        """The number of workers of each configured cluster that takes part, or of each cluster with processes if none
        are configured.
        """
        running, absent = list(self.workers.values()), self.replacements
        listed = {name: len(each.workers) for name, each in self.config.clusters.items() if name not in absent}
        return {name: max(1, running.count(name) or listed.get(name, 1)) for name in listed or dict.fromkeys(running)}

    @property
    def replacements(self) -> dict[str, str]:
        """The absent elastic clusters, each with the present cluster that runs its stages."""
        return assign_absent(self.config, set(self.workers.values()))

    @property
    def cluster_speeds(self) -> dict[str, tuple[float, ...]]:
        """The speeds of the workers of each cluster for which speeds are configured, in the order of the workers."""
        found = {}
        for name, cluster in self.config.clusters.items():
            configured = {f"{name}/{number}": worker.relative_speed for number, worker in enumerate(cluster.workers)}
            workers = [worker for worker, of in self.workers.items() if of == name] or sorted(configured)
            if any(worker.speed is not None for worker in cluster.workers):
                found[name] = tuple(configured.get(worker, 1.0) for worker in workers)
        return found

    def here(self) -> Here:
        """The position of this process in the run."""
        if self.attachment is None:
            names = tuple(dict.fromkeys([*self.config.clusters, *self.clusters])) or ("local",)
            return Here("local", "local/0", True, names, alone=True)
        clusters = tuple(dict.fromkeys(self.workers.values()))
        epoch = self.attachment.epoch if self.ledger is None else self.ledger.session.epoch
        own = self.attachment.cluster
        runs_for = tuple(name for name, home in self.replacements.items() if home == own)
        return Here(own, self.attachment.worker, self._leads(), clusters, epoch=epoch, runs_for=runs_for)

    def _leads(self) -> bool:
        """Whether this is the first worker of the last stage's cluster that is present, or of the last cluster."""
        present = list(self.workers.values())
        last_cluster = next((cluster for cluster in reversed(self.clusters) if cluster in present), present[-1])
        last = [worker for worker, cluster in self.workers.items() if cluster == last_cluster]
        return self.attachment is not None and self.attachment.worker == last[0]

    def register_clusters(self, clusters: Sequence[str], written: Mapping[str, str] | None = None) -> None:
        """Register the clusters of a program that is about to run; `written` has the source line of each cluster's
        stage. Unknown ones are refused.

        If a config names clusters, it must name all of them. Without a config, a single process creates clusters by
        their names; in several processes they must exist.
        """
        self.check_named(written or {})
        self.clusters = list(dict.fromkeys([*self.clusters, *clusters]))
        if not self.links_checked and len(set(clusters)) > 1:
            self.links_checked = True
            self._check_links()
        missing = [name for name in clusters if self.attachment and name not in self.workers.values()]
        if missing:
            raise self._no_worker(missing[0], (written or {}).get(missing[0]) or self.site)

    def _no_worker(self, cluster: str, where: str) -> ConfigError:
        """The error for a stage on a cluster that no process runs; the name of an unused process may be misspelt."""
        why = f"the processes of this run are {', '.join(self.workers)}"
        if cluster == LOCAL:
            known = next(iter(self.workers.values()))
            return ConfigError(
                "a step names no cluster",
                where=where,
                why=f"it has no nb.stage, or a stage without cluster=; {why}",
                mend=f'put its operations into stages: with nb.stage(cluster="{known}"): ...',
            )
        idle = [name for name in dict.fromkeys(self.workers.values()) if name not in self.clusters]
        mend = f"start a worker of {cluster!r}"
        alone = list(self.workers) == ["local/0"]
        own = self.attachment
        if own is not None and own.config is None and (own.has_one_launcher or alone):
            mend = f"whale-nebula run --all --clusters {','.join(self.clusters)}"
        return ConfigError(
            f"no process runs cluster {cluster!r}",
            where=where,
            why=f"{why}, and no stage is on cluster {idle[0]!r}" if idle else why,
            mend=f"{mend}, or name another cluster in the stage",
        )

    def check_named(self, written: Mapping[str, str], subject: str = "a stage is on") -> None:
        """Refuse a cluster that is not configured; `written` has the source line of each name."""
        known = list(self.config.clusters)
        unknown = next((name for name, where in written.items() if where and name not in known), None)
        if not known or unknown is None:
            return
        suggestion = did_you_mean(unknown, known)
        if unknown == LOCAL:
            suggestion = f"name its cluster, one of {list_names(known)}, or call nb.init before the model is built"
        all_of_them = ", ".join(f"{name}: {{}}" for name in [*known, unknown])
        raise ConfigError(
            f"{subject} cluster {unknown!r}, which is not in the config",
            where=written[unknown],
            why=f"the clusters of {self._describe_config()} are {list_names(known)}",
            mend=f"{suggestion}\nor add it to the config: clusters: {{{all_of_them}}}",
        )

    def _describe_config(self) -> str:
        """A text that identifies the config: its file, and the line that reads it."""
        if self.source:
            return self.source if self.implicit else f"{self.source}, which nb.init reads at {self.site},"
        return f"the config at {self.site}" if self.site else "the config"

    def settle(self) -> None:
        """Under local SGD, synchronise the clusters, so that all have the same weights. Collective."""
        if self.rounds is not None:
            self.rounds.settle()

    def share_failures(self) -> contextlib.AbstractContextManager[None]:
        """Context of an action for which other processes wait: its failure is sent to them, if there are any."""
        return contextlib.nullcontext() if self.ledger is None else self.ledger.session.share_failures()

    def close_at_end(self, *closers: Callable[[], object]) -> None:
        """Call these functions, the last one first, when the run is closed, or at the very start of an exit."""
        self.closers += closers
        atexit.unregister(shut_down_at_exit)
        atexit.register(shut_down_at_exit)

    def check_ids(self, inputs: Sequence[str]) -> None:
        """Called for each program, with the names of its inputs: note whether `ids` names one of them, by which
        processes compare their rows. Refuses `ids` that name none of any program.
        """
        self.compares_rows = self.compares_rows or check_named_inputs(parse_ids(self.ids), inputs, self.site)

    def _check_links(self) -> None:
        """Refuse links that name unknown clusters; called at the first program of several clusters."""
        known = list(dict.fromkeys([*self.config.clusters, *self.clusters, *self.workers.values()]))
        unknown = next((name for name in self.links.names if name not in known), None)
        if unknown is not None:
            declared = ", ".join(f"{name!r}: {{}}" for name in [*known, unknown])
            later = f"if it is used later: nb.init({{'clusters': {{{declared}}}}}, links=...)"
            raise ConfigError(
                f"the links of this run name cluster {unknown!r}, but no stage is on it",
                where=self.site,
                why=f"the clusters are {list_names(known)}",
                mend=f"{did_you_mean(unknown, known)}\n{later}",
            )


def assign_absent(config: Config, present: Collection[str]) -> dict[str, str]:
    """For each absent elastic cluster, the present one that runs its stages: in turn, in the order of the config."""
    running = [name for name in config.clusters if name in present]
    may_leave = [name for name, limits in config.elastic.items() if not limits.least]
    away = [name for name in may_leave if running and name not in running]
    return {name: running[number % len(running)] for number, name in enumerate(away)}


_LOCK = threading.RLock()
_run: Run | None = None


@check_signature
@short_traceback
def init(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    links: str | Mapping[tuple[str, str], str] | None = None,
    seed: int | None = None,
    ids: str | Sequence[str] | None = None,
    plan: Pinned | Sequence[Pinned] | None = None,
    show: str | None = None,
    metrics: str | os.PathLike[str] | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    outputs: Mapping[str, str | os.PathLike[str]] | None = None,
    checkpoint: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Run:
    """Open a run. The call is optional: without it, all clusters are in this process, and links are free.

    `config` is a path to clusters.yaml or the same as a dict; `links` has the emulated links between clusters of one
    process; `seed` is the seed that all processes use; `ids` names the input by which clusters check that they train on
    the same rows.

    `plan` pins plans: files of `Plan.save`, one for each step, matched by the step's name. If the plan of such a step
    differs from the saved one, a `PlanMismatchError` names the first difference before the step runs. A step of another
    model without a pin and a pin without a step cause warnings.

    `show` is the display while training: "live" shows a table on the terminal, below other output, "lines" writes lines
    to the log, and "none", the default, prints nothing. `metrics` is a file that gets a line of JSON for every step,
    and `tensorboard` a folder for event files. `outputs` sets the same outputs by name, and others that were added to
    `whale_nebula.report.watchers.OUTPUTS`.

    `checkpoint` is a folder: the run is saved in it, and resumes from a checkpoint that it finds there. To set more
    options, use a dict: {"folder": ..., "every": 100 or "30s", "keep": 3, "overhead": 0.035, "memory": "5s"}.

    >>> import whale_nebula as nb
    >>> nb.shutdown()
    >>> run = nb.init(links="60mbit,20ms")
    >>> run.links.between("gpu", "npu").delay
    0.02
    >>> nb.shutdown()
    """
    global _run
    with _LOCK:
        if _run is not None:
            raise StateError(
                f"a run is open already, since {_run.site}" if _run.site else "a run is open already",
                why="a step, a plan, nb.here() or nb.gathered() opened it" if _run.implicit else None,
                where=str(calling_site()),
                mend="call nb.shutdown() first, or open the run once at the top of the script",
            )
        site = str(calling_site())
        watching = observer()
        if watching is not None:  # no step runs: plans are not compared, and nothing is written
            (config, links), plan, show = watching.replace_config(config, links), (), "none"
            metrics = tensorboard = outputs = checkpoint = None
        attachment = attach()
        if config is None and attachment is not None:
            config = attachment.config  # the launcher's config
        loaded = load(_check_config(config, site), site)
        if watching is not None:
            loaded = replace(loaded, outputs={}, checkpoint=None)
        joined = parse_links(links, loaded.clusters, site) if links is not None else loaded.links
        pins = read_pins(plan if plan is not None else loaded.plan, site)
        run = Run(loaded, joined, _parse_seed(seed), _check_ids(ids), attachment, site=str(script_site()), pins=pins)
        run.source = str(config) if isinstance(config, str | os.PathLike) else ""
        if loaded.approvals is not None and watching is None:
            run.approvals = _open_approvals(run)
        if pins:
            run.close_at_end(pins.close)
        requested = {"metrics": metrics, "tensorboard": tensorboard, **(outputs or {})}
        paths = {**loaded.outputs, **{name: path for name, path in requested.items() if path is not None}}
        output_options = OutputOptions(loaded.show if show is None else show, paths)
        with keep_generators(), _close_if_it_fails(run):
            _watch_steps(run, output_options.validate(site))
            own = "" if attachment is None else attachment.cluster
            least = {name: max(1, limits.least) for name, limits in loaded.elastic.items()}
            set_clusters(run.cluster_sizes, own, run.cluster_speeds, run.replacements, least)
            if run.attachment is not None:
                _join_processes(run, run.attachment)
            saves = loaded.checkpoint if checkpoint is None else _parse_checkpointing(checkpoint, site)
            if saves is not None:
                _open_checkpoints(run, saves)
        _set_seeds(run)
        _run = run
        return run


def _open_approvals(run: Run) -> Approvals:
    """Load approvals, and check that one is for this process's code."""
    cluster = None if run.attachment is None else run.attachment.cluster
    found = Approvals(*read_approvals(run.config, run.source, cluster))
    check_process(found.folder, found.approvals)
    return found


def _parse_checkpointing(checkpoint: Any, site: str) -> Checkpointing:
    value = os.fspath(checkpoint) if isinstance(checkpoint, os.PathLike) else checkpoint
    return parse_checkpoint(Place(dict(value) if isinstance(value, Mapping) else value, "checkpoint", site))


def _open_checkpoints(run: Run, saves: Checkpointing) -> None:
    """Find the checkpoint that the run resumes from, with all other processes. This needs TensorFlow."""
    from whale_nebula.runtime.checkpoint.open_checkpoints import open_checkpoints

    run.checkpoints = open_checkpoints(run, saves)
    run.close_at_end(run.checkpoints.close)


def _event_files(folder: str) -> Any:
    from whale_nebula.runtime.tensorboard import EventFiles

    return EventFiles(folder)


OUTPUTS["tensorboard"] = _event_files


@contextlib.contextmanager
def _close_if_it_fails(run: Run) -> Iterator[None]:
    """Context in which a run opens. If that fails, what was opened is closed, and connected processes are told why."""
    try:
        yield
    except BaseException as failure:
        if run.ledger is not None:
            run.ledger.session.fail(failure)
        _close(run)
        raise


def _watch_steps(run: Run, output_options: OutputOptions) -> None:
    """Start the displays of steps, until the run is closed or the script exits."""
    launched = run.attachment
    canvas, folder = (None, None) if launched is None else (launched.picture, launched.reports)
    watching = open_outputs(output_options, lambda: run.here().lead, canvas, folder)
    if watching is not None:
        watch([watching])
        run.close_at_end(watching.close)


def _check_config(config: Any, site: str) -> Any:
    """Validate the type of a config; the text of a link is refused."""
    if isinstance(config, str) and all(quantities.find_kind(part.strip()) for part in config.split(",")):
        raise OptionError(
            f"nb.init({config!r}): the first argument is the path of a config, not the options of a link",
            where=site,
            why="links are passed by keyword",
            mend=f"nb.init(links={config!r})",
        )
    return config


def _parse_seed(seed: Any) -> int | None:
    try:
        return None if seed is None else options.check_integer("seed", seed)
    except OptionError as refusal:
        is_number = isinstance(seed, str) and seed.strip().isdecimal()
        refusal.mend = f"nb.init(seed={int(seed) if is_number else 1})"
        raise


def _check_ids(ids: Any) -> Any:
    names = [ids] if isinstance(ids, str) else ids or []
    if not isinstance(names, list | tuple | set | frozenset) or not all(isinstance(each, str) for each in names):
        raise options.option_error(
            f"ids={ids!r} is not the name of an input",
            why="it must be the name of an input, or a list of names",
            mend='ids="x/id"',
        )
    return ids


def _join_processes(run: Run, attachment: Attachment) -> None:
    """Connect to the other processes over real links, which needs TensorFlow."""
    from whale_nebula.runtime.session.rendezvous import join

    run.ledger, run.hosts = join(attachment, run.seed if run.seed is not None else run.config.seed, run.config)
    run.close_at_end(run.ledger.session.close)


def _set_seeds(run: Run) -> None:
    """Seed all random generators with the run's seed, or that of the config unless the launcher has already set it."""
    launched = None if run.attachment is None else run.attachment.seed
    seed = run.config.seed if run.seed is None and run.config.seed != launched else run.seed
    if seed is not None:
        seed_all(seed)


@check_signature
def shutdown() -> None:
    """Close the run: links are closed in order, threads are stopped, and totals are reset. Without a run it does
    nothing.

    >>> import whale_nebula as nb
    >>> nb.shutdown()
    """
    global _run
    wait_for_traces(_run)  # before the lock is taken, which a trace needs
    with _LOCK:
        try:
            if _run is not None and _run.checkpoints is not None:
                _run.checkpoints.end()
        finally:
            run, _run = _run, None
            _close(run)
            set_limits(None)


def _close(run: Run | None) -> None:
    with contextlib.ExitStack() as closing:  # which calls all, even if one fails
        closing.callback(forget)
        closing.callback(set_clusters, {})
        for close in () if run is None else run.closers:
            closing.callback(close)


def wait_for_traces(run: Run | None) -> None:
    """Wait for the ends of traces in the background."""
    for trace in () if run is None else run.traces:
        trace.wait()


def shut_down_at_exit() -> None:
    """Close the run at the end of the script; unsaved steps are saved as after an error if one ended the script."""
    if _run is not None and _run.checkpoints is not None and hasattr(sys, "last_value"):
        _run.checkpoints.end_by_error()
    shutdown()


def report_failure(failure: BaseException) -> None:
    """Notify the other processes that the script stops with an uncaught error, and save unsaved steps if possible."""
    with _LOCK:
        checkpoints = None if _run is None else _run.checkpoints
        if _run is not None and _run.ledger is not None:
            can_save = checkpoints is not None and not checkpoints.script_state.torn
            _run.ledger.session.fail(failure, last=can_save)
        if checkpoints is not None:
            checkpoints.end_by_error()


@check_signature
def here() -> Here:
    """The position of this process among the clusters.

    >>> import whale_nebula as nb
    >>> nb.here().lead
    True
    """
    return current_run().here()


def find_open_run() -> Run | None:
    """The open run, if there is one."""
    return _run


def current_run() -> Run:
    """The open run; opens one without a configuration if there is none."""
    with _LOCK:
        if (run := _run) is None:
            run = init()
            run.implicit = True
        return run


@scope
@contextlib.contextmanager
def gathered() -> Iterator[None]:
    """Gather the complete model: inside this context, variables of other clusters can be read.

    Every process calls it at the same point. In a single process it does nothing.

    >>> import tensorflow as tf
    >>> import whale_nebula as nb
    >>> weight = tf.Variable([1.0, 2.0])
    >>> with nb.gathered():
    ...     weight.numpy().tolist()
    [1.0, 2.0]
    """
    run = current_run()
    run.settle()
    with contextlib.nullcontext() if run.alone else run.ledger.gather():
        yield
