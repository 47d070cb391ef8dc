"""The session with the other workers: identities, and agreement on programs and steps.

HELLO at the start (versions, seed, config), AGREE for each program (its digest), STEP at each step (rows and a
fingerprint of the inputs), MEET around a read of the whole model. All workers send the same sequence of messages: a
different message is an error, so that no worker waits forever. Graphs and code are never sent: every process traces its
own copy of the script. The text of a program is sent only if digests differ, and never in a private run.

Processes start with equal variables and make the same updates, so variables stay equal. Periodic checksums verify this:
without them, a device that computes differently, a callback that writes a weight in one process only, or a memory error
would not be detected.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np

from whale_nebula.errors import (
    AbsentInputError,
    CollectiveReadError,
    ConfigError,
    DeadlineError,
    InputMismatchError,
    LinkClosedError,
    LocalProtocolError,
    NebulaError,
    NonFiniteError,
    NotYetError,
    PlanError,
    PlanMismatchError,
    RemoteFailureError,
    RemoteProtocolError,
    ScopeError,
    StateError,
    TransportError,
)
from whale_nebula.errors.text import LIMIT, escape_foreign_text, remove_folders
from whale_nebula.faults import failpoint
from whale_nebula.feed.checks import is_same
from whale_nebula.ir.canonical import digest_lines, find_first_difference
from whale_nebula.ir.cut import Cut
from whale_nebula.runtime.exchange.admission import Admission
from whale_nebula.runtime.session.absences import Absences
from whale_nebula.site import script_site
from whale_nebula.transport import Link
from whale_nebula.transport.base import receive_each
from whale_nebula.wire.message import SESSION, build_message

_WITHOUT_VALUES = (
    AbsentInputError,
    CollectiveReadError,
    InputMismatchError,
    NonFiniteError,
    NotYetError,
    PlanError,
    RemoteFailureError,
    ScopeError,
    StateError,
    TransportError,
)
"""Errors whose texts name parts of the program, workers and settings, and contain no values of data or weights."""


def describe_failure(failure: BaseException, *, private: bool = False) -> dict[str, str]:
    """The fields of an error to send. Paths are reduced to names of files.

    In a `private` run, only the type and code are sent of an error that may contain values: one from outside this
    library, one raised from such an error, or one about data or weights.

    >>> describe_failure(ValueError("row 7 is 'Ana'"), private=True)
    {'what': 'ValueError (its text stays where it was raised)'}
    """
    if private and not _is_free_of_values(failure):
        code = f", {failure.code}" if isinstance(failure, NebulaError) else ""
        return {"what": f"{type(failure).__name__}{code} (its text stays where it was raised)"}
    fields = {"what": f"{type(failure).__name__}: {failure}"}
    if isinstance(failure, NebulaError):
        fields = {part: getattr(failure, part) for part in ("code", "what", "where", "why", "mend")}
    own_folders = [os.getcwd(), str(Path.home()), *sys.path]
    return {part: remove_folders(text, own_folders) for part, text in fields.items()}


def _is_free_of_values(failure: BaseException) -> bool:
    if isinstance(failure, TransportError) and not isinstance(failure, LocalProtocolError):
        return True  # its cause is a socket's error, or about a peer's message
    return all(isinstance(each, _WITHOUT_VALUES) for each in _list_causes(failure))


def _list_causes(failure: BaseException) -> Iterator[BaseException]:
    """An error and its chain of causes and contexts."""
    due, known = [failure], set()
    while due:
        each = due.pop()
        if id(each) not in known:
            known.add(id(each))
            yield each
            due += [cause for cause in (each.__cause__, each.__context__) if cause is not None]


Sheet = Mapping[str, Any]
_LOOK_SECONDS = 2.0
"""The interval at which a worker that awaits a greeting looks for peers that have left since they greeted."""
_MATE_FIELDS = {"mark", "alike"}
"""The fields of a step's announcement that are sent only to workers of the same cluster."""
_LONGEST_DIFFERENCE = 2 * LIMIT  # for two programs: a line of each


@dataclass
class Session:
    """The links of this process to its peers by name, their timeouts, and the expected tensors.

    In a `private` run, peers get no text that may contain values: of foreign exceptions, or of a program. `epoch` is
    the number of restarts of the run: the highest of any worker. `leave` closes all links together. `whole` is the
    session of which this one has some of the peers. `absences` are the clusters that may be lost during the run, and
    `await_return` accepts connections from their workers again. `is_absent` returns whether the others have reported
    that the run goes on without this worker: they let it take part after a step.
    """

    worker: str
    links: dict[str, Link]
    patience: float
    expected: Admission = field(default_factory=Admission)
    leave: Callable[[], None] | None = None
    whole: Session | None = None
    private: bool = False
    epoch: int = 0
    absences: Absences = field(default_factory=Absences)
    await_return: Callable[[Collection[str]], None] | None = None
    is_absent: Callable[[], bool] = lambda: False
    _script_line: str = ""

    def select_peers(self, mates: Collection[str]) -> Session:
        """A session with some of the peers, over the same links: failures are announced to all peers, and it is not
        closed separately.
        """
        links = {peer: link for peer, link in self.links.items() if peer in mates}
        whole, private, epoch = self, self.private, self.epoch
        return Session(self.worker, links, self.patience, self.expected, whole=whole, private=private, epoch=epoch)

    def hello(self, sheet: Sheet) -> Mapping[str, Sheet]:
        """Greet every peer; returns their greetings. Different versions and workers are refused. Afterwards all have
        the run's epoch, and processes with a different epoch cannot take part.
        """
        failpoint("hello.before")
        self._send("HELLO", "nb.init", {**sheet, "epoch": self.epoch})
        greetings = self._receive_greetings(sheet)
        self.epoch = max([self.epoch, *(theirs.get("epoch", 0) for theirs in greetings.values())])
        for link in self.links.values():
            link.begin_session(self.epoch)
        for peer, theirs in greetings.items():
            for name in ("whale_nebula", "tensorflow", "keras"):
                if theirs.get(name) != sheet.get(name):
                    raise PlanMismatchError(
                        f"{self.worker} runs {name} {sheet.get(name)}, "
                        f"but {peer} runs {escape_foreign_text(theirs.get(name))}",
                        where=peer,
                        why="different versions trace different programs",
                        mend=f"install {name}=={sheet.get(name)} on both",
                    )
        failpoint("hello.after")
        return greetings

    def _receive_greetings(self, sheet: Sheet) -> dict[str, dict[str, Any]]:
        """The greetings of all peers. Raises if one has other workers in its config, or has greeted and left again
        while another one is awaited, because no session could begin with it.
        """
        received: dict[str, dict[str, Any]] = {}
        for peer in self.links:
            waited = 0.0
            while peer not in received:
                lost, seconds = self.find_lost_link_error(received), min(_LOOK_SECONDS, self.patience - waited)
                try:
                    received |= self._receive_all("HELLO", "nb.init", (peer,), seconds, waited)
                    self._check_workers(peer, sheet, received[peer])
                except DeadlineError:
                    waited = 0.0 if self.is_absent() else waited + seconds
                    if lost is not None:
                        raise lost from None
                    if waited >= self.patience:
                        raise
        return received

    def _check_workers(self, peer: str, sheet: Sheet, theirs: Sheet) -> None:
        own, others = ({*each.get("workers", [])} for each in (sheet, theirs))
        if own != others and "workers" in theirs:
            only = [(self.worker, own - others), (peer, others - own)]
            listed = "; ".join(f"only {each} lists {', '.join(sorted(names))}" for each, names in only if names)
            raise ConfigError(
                f"the configs of {self.worker} and {peer} list different workers: {escape_foreign_text(listed)}",
                where=peer,
                why="each worker waits for all others that its config lists",
                mend="list the same clusters and workers in the config of every cluster",
            )

    def agree(
        self,
        program: str,
        digest: str,
        lines: Sequence[str],
        difference: Any,
        states: Mapping[str, int] | None = None,
    ) -> Mapping[str, Mapping[str, int]]:
        """Verify that all workers have traced the same program; otherwise each names the first difference.

        `states` are the versions of codec states; returns those of the others.
        """
        doing = f"the first step of {program!r}"
        failpoint("agree.before")
        self._send("AGREE", doing, {"program": program, "digest": digest, "states": dict(states or {})})
        received = self._receive_all("AGREE", doing)
        unlike = {peer: theirs for peer, theirs in received.items() if theirs["digest"] != digest}
        if not unlike and all(theirs["program"] == program for theirs in received.values()):
            failpoint("agree.after")
            return {peer: theirs.get("states", {}) for peer, theirs in received.items()}
        sent = [digest_lines([line]) for line in lines] if self.private else list(lines)
        self._send("LINES", doing, {"program": program, "lines": sent})
        for peer, theirs in self._receive_all("LINES", doing).items():
            if peer in unlike or theirs["program"] != program:
                if not self.private:
                    raise self._make_mismatch_error(peer, program, theirs, difference(lines, theirs["lines"]))
                raise self._make_line_mismatch_error(
                    peer, program, theirs, find_first_difference(sent, theirs["lines"]), lines
                )
        return {}

    def _make_line_mismatch_error(
        self, peer: str, program: str, theirs: Sheet, number: int, lines: Sequence[str]
    ) -> PlanMismatchError:
        """The error of a private run, where peers compare digests of lines. Local text is not sent."""
        error = self._make_mismatch_error(peer, program, theirs, f"their texts differ from line {number + 1} on")
        error.add_note(f"line {number + 1} here: {lines[number] if number < len(lines) else '(the end)'}")
        return error

    def _make_mismatch_error(self, peer: str, program: str, theirs: Sheet, difference: str) -> PlanMismatchError:
        other = escape_foreign_text(theirs["program"])
        return PlanMismatchError(
            f"{self.worker} traced {program!r} and {peer} traced {other!r}: they are not the same",
            where=peer,
            why=escape_foreign_text(difference, _LONGEST_DIFFERENCE),
            mend="run the same script with the same arguments and the same kind of batch in every process",
        )

    def start_step(
        self,
        sheet: Sheet,
        mark: int = 0,
        mates: Collection[str] = (),
        readers: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        """Announce a step: program, number, rows and fingerprints.

        The fingerprint of an input that has `readers` is sent only to these. The `mates`, workers of the same cluster,
        also receive the `mark` of the rows of a dataset, of which each may have read different ones, and checksums of
        common variables.
        """
        failpoint("step.before")
        for peer in self.links:
            inputs = {name: value for name, value in sheet["inputs"].items() if peer in readers.get(name, (peer,))}
            announcement = {**sheet, "inputs": inputs, "mark": mark}
            known = (
                announcement
                if peer in mates
                else {key: announcement[key] for key in announcement.keys() - _MATE_FIELDS}
            )
            self._send("STEP", _describe_step(sheet), known, (peer,))
        failpoint("step.announced")

    def check_step(self, sheet: Sheet, mark: int = 0) -> Mapping[str, Sheet]:
        """Verify that every peer has announced the same step of the same program with the same rows; returns the
        announcements.
        """
        announcements = self._receive_all("STEP", _describe_step(sheet))
        for peer, theirs in announcements.items():
            if (theirs["program"], theirs["step"]) != (sheet["program"], sheet["step"]):
                raise self._make_divergence_error(_describe_step(sheet), peer, _describe_place(theirs))
            self._check_rows(peer, {"mark": mark, **sheet}, theirs)
            check_sums(self.worker, sheet.get("alike", {}), peer, theirs.get("alike"), sheet["step"])
            check_settings(self.worker, sheet.get("settings", {}), peer, theirs.get("settings", {}), sheet["step"])
        failpoint("step.checked")
        return announcements

    def vote(self, name: str, step: int, phase: int, why: str) -> list[str]:
        """Vote between the micro-batches of a phase and its update on skipping the step: a reason, or "". Returns all
        reasons, the same in every process.
        """
        doing = f"phase {phase} of step {step} of {name!r}"
        self._send("VOTE", doing, {"why": why})
        received = self._receive_all("VOTE", doing)
        for peer, theirs in received.items():
            if theirs.get("doing") != doing:
                raise self._make_divergence_error(doing, peer, _describe_place(theirs))
        votes = {self.worker: why, **{peer: theirs.get("why", "") for peer, theirs in received.items()}}
        return [escape_foreign_text(votes[worker]) for worker in sorted(votes) if votes[worker]]

    def meet(self, doing: str) -> None:
        """Wait until every process has reached the same point, which `doing` describes. Collective."""
        with self.share_failures():
            failpoint("meet.before")
            self._send("MEET", doing, {})
            self._receive_all("MEET", doing)
            failpoint("meet.after")

    def exchange(self, doing: str, sheet: Sheet, mates: Collection[str]) -> Mapping[str, Sheet]:
        """Exchange a message with some peers, such as the workers of one cluster; returns theirs. Collective among
        them, and `doing` must be the same in all.
        """
        self._send("MEET", doing, sheet, mates)
        received = self._receive_all("MEET", doing, mates)
        for peer, theirs in received.items():
            if theirs.get("doing") != doing:
                raise self._make_divergence_error(doing, peer, _describe_place(theirs))
            if missing := sheet.keys() - theirs.keys():
                raise RemoteProtocolError(f"worker '{peer}' did not send its {', '.join(sorted(missing))}")
        return received

    def share(self, doing: str, value: Any) -> dict[str, Any]:
        """Exchange a value with all processes, as JSON; returns those of all workers, this one's first. Collective."""
        received = self.exchange(doing, {"shared": value}, set(self.links))
        return {self.worker: value, **{peer: theirs["shared"] for peer, theirs in received.items()}}

    def find_lost_link_error(self, mates: Collection[str]) -> NebulaError | None:
        """The error of a link to one of these peers that is closed, None if none is; does not wait."""
        errors = (self._find_error(link) for _, link in self._links_of(mates))
        return next((error for error in errors if error is not None and not isinstance(error, DeadlineError)), None)

    def _find_error(self, link: Link) -> NebulaError | None:
        """The present error of a link, which is closed or not connected; None if it is connected."""
        try:
            link.take("LOST", 0.0)  # never sent: this only checks the link's state
        except NebulaError as error:
            return error
        return None

    def find_missing_peers(self) -> tuple[str, ...]:
        """The peers that have not connected or have closed their links, or have been silent for long."""
        errors = (self._find_error(link) for link in self.links.values())
        return tuple(error.peer for error in errors if error is not None and error.peer)

    def _check_rows(self, peer: str, sheet: Sheet, theirs: Sheet) -> None:
        shared = sheet["inputs"].keys() & theirs["inputs"].keys()
        unlike = [name for name in sorted(shared) if not is_same(sheet["inputs"][name], theirs["inputs"][name])]
        has_other_order = len({sheet["mark"], theirs.get("mark", 0)} - {0}) > 1
        if sheet["rows"] != theirs["rows"] or unlike or has_other_order:
            what = (
                f"input {unlike[0]!r}" if unlike else "the order of rows" if has_other_order else "the number of rows"
            )
            raise InputMismatchError(
                f"{what} differs between {self.worker} and {peer} at step {sheet['step']}",
                where=peer,
                why="each process reads its own copy of the data, and the copies differ in their rows or their order",
                mend="shuffle with a seed: dataset.shuffle(n, seed=1), or fit(shuffle=False)\n"
                "or draw the data with a seed: np.random.default_rng(1)"
                + "\nor give nb.shard elements that are equal in all processes: files under the same, relative, paths"
                * (not unlike and has_other_order),
            )

    def _send(self, about: str, doing: str, sheet: Sheet, peers: Collection[str] | None = None) -> None:
        site = script_site()
        self._script_line, line = str(site), str(site._replace(file=os.path.basename(site.file)))
        for peer, link in self._links_of(peers):
            with self._name_lost_peer(doing, peer):
                link.post(build_message(SESSION, about, **sheet, doing=doing, line=line))

    def _links_of(self, peers: Collection[str] | None) -> list[tuple[str, Link]]:
        return [(peer, link) for peer, link in self.links.items() if peers is None or peer in peers]

    def _receive_all(
        self,
        about: str,
        doing: str,
        peers: Collection[str] | None = None,
        patience: float | None = None,
        waited: float = 0.0,
    ) -> dict[str, dict[str, Any]]:
        """Receive a message of kind `about` from each peer; another kind raises. `waited` are the seconds for which
        they have been waited for already. While one is late, the failure of another one is noticed.
        """
        patience, links = self.patience if patience is None else patience, dict(self._links_of(peers))
        received: dict[str, dict[str, Any]] = {}

        def receive(peer: str, take: Callable[[], dict[str, Any]]) -> None:
            with self._name_lost_peer(doing, peer):
                message = take()
            if message["about"] != about:
                raise self._make_divergence_error(doing, peer, _describe_place(message))
            received[peer] = message

        soon = min(_LOOK_SECONDS, patience)
        with contextlib.suppress(DeadlineError):
            for peer, link in links.items():
                receive(peer, partial(link.take, SESSION, soon, waited))
        late = [peer for peer in links if peer not in received]
        takes = {peer: partial(links[peer].take, SESSION, patience - soon, waited + soon) for peer in late}
        for peer, take in receive_each(takes):
            receive(peer, take)
        return {peer: received[peer] for peer in links}

    def _make_divergence_error(self, doing: str, peer: str, theirs: str) -> PlanMismatchError:
        return PlanMismatchError(
            f"{self.worker} is at {doing} ({self._script_line}), but {peer} is at {theirs}",
            where=peer,
            why="the processes have diverged: a callback or a condition took a different path in one of them",
            mend="make every process decide by the same values, such as returned values, which all processes get",
        )

    @contextlib.contextmanager
    def _name_lost_peer(self, doing: str, peer: str) -> Iterator[None]:
        """Context of an operation on the link to a peer: the error of a closed link is completed with what this process
        is doing.
        """
        try:
            yield
        except LinkClosedError as closed:
            error = LinkClosedError(
                f"{closed.what}, and {self.worker} is at {doing} ({self._script_line})",
                where=closed.where,
                why=closed.why,
                mend=closed.mend,
            )
            error.peer = closed.peer
            raise error from closed

    def fail(self, failure: BaseException, *, last: bool = False) -> None:
        """Announce to every peer that this process failed: immediately, or as the `last` message, after which they can
        complete the step that this process has finished.
        """
        parts = describe_failure(failure, private=self.private)
        for link in list((self.whole or self).links.values()):
            link.fail(parts, last=last)

    @contextlib.contextmanager
    def share_failures(self) -> Iterator[None]:
        """Context of an action that the other processes wait for, such as writing a file: its failure is sent to
        them.
        """
        try:
            yield
        except BaseException as failure:
            self.fail(failure)
            raise

    def close(self) -> None:
        """Close the session in order: all links together if their transport supports it, otherwise one by one."""
        if self.leave is not None:
            self.leave()
            return
        for link in self.links.values():
            link.close()


def _describe_step(sheet: Sheet) -> str:
    return f"step {sheet['step']} of {sheet['name']!r}"


def _describe_place(theirs: Sheet) -> str:
    at = f"{theirs.get('doing', 'something else')} ({theirs.get('line', 'outside the script')})"
    return escape_foreign_text(at)


# ---------------------------------------------------------------------- checksums of variables
_SUMS_EVERY = 100
"""The interval of comparisons, in steps. Each reads every variable that several processes hold."""

Sums = Mapping[str, int]
"""A checksum of the variables with the same holders, by the names of these workers."""


def are_sums_due(steps: int) -> bool:
    """Whether checksums are compared after a step, by its number: the second, and every hundredth.

    >>> [step for step in range(202) if are_sums_due(step)]
    [1, 101, 201]
    """
    return steps % _SUMS_EVERY == 1


def checksum_variables(
    cut: Cut, worker: str, variables: Mapping[str, Any], pieces: Mapping[str, Sequence[str]] | None = None
) -> Sums:
    """Checksums of the variables that a worker holds in common with others of its cluster. `pieces` has, for a split
    variable, the workers that hold the same piece.
    """
    clusters = {each.name: each.cluster for each in cut.workers}
    found: dict[str, int] = {}
    for path in sorted(cut.variable_workers):
        holders = (pieces or {}).get(path, cut.variable_workers[path])
        mates = [other for other in holders if clusters[other] == clusters[worker]]
        if worker in mates and len(mates) > 1 and path in variables:
            together = ", ".join(sorted(mates))
            data = np.ascontiguousarray(variables[path].numpy())
            found[together] = google_crc32c.extend(found.get(together, 0), data.tobytes())
    return found


def list_settings(cut: Cut, written: Collection[str]) -> tuple[str, ...]:
    """The variables of one number that all workers hold and that the step only reads, such as a learning rate;
    `written` are those that it writes.
    """
    workers = {each.name for each in cut.workers}
    read = (each.path for each in cut.program.variables if each.path not in written and each.spec.shape == ())
    return tuple(sorted(path for path in read if workers <= {*cut.variable_workers.get(path, ())}))


def read_settings(paths: Iterable[str], variables: Mapping[str, Any]) -> dict[str, str]:
    """The values of settings in this process."""
    return {path: str(variables[path].numpy()) for path in paths}


def check_settings(worker: str, own: Mapping[str, str], peer: str, theirs: Mapping[str, str], step: int) -> None:
    """Raise if another worker has a different value of a setting.

    >>> check_settings("gpu/0", {"adam/learning_rate": "0.01"}, "gpu/1", {"adam/learning_rate": "0.01"}, 101)
    """
    unlike = next((path for path in own if theirs.get(path, own[path]) != own[path]), None)
    if unlike is not None:
        raise PlanMismatchError(
            f"variable {unlike!r} is {own[unlike]} in {worker} and {escape_foreign_text(theirs[unlike])} in {peer} at "
            f"step {step}",
            where=peer,
            why="it was set differently, or in only one process",
            mend="set it identically in every process",
        )


def check_sums(worker: str, own: Sums, peer: str, theirs: Any, step: int) -> None:
    """Raise if another worker has different bits.

    >>> check_sums("gpu/0", {"gpu/0, gpu/1": 1}, "gpu/1", {"gpu/0, gpu/1": 1}, 101)
    """
    sums = theirs if isinstance(theirs, dict) else {}
    unlike = next((names for names in own if names in sums and sums[names] != own[names]), None)
    if unlike is not None:
        raise PlanMismatchError(
            f"the replicas in {unlike} no longer have the same variables: {worker} and {peer} differ at step {step}",
            where=peer,
            why="a variable was written in only one process, or computed differently there",
            mend="write variables identically in every process, or in a step; then start all workers from a checkpoint",
        )
