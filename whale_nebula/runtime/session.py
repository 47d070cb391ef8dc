"""The conversation of this process with the other workers: who they are, and that all of them do the same.

HELLO when they meet (versions, threads, seed), AGREE for each program (its digest), STEP at each step (rows and a
fingerprint of the inputs). No graph and no code ever crosses: every process traces its own copy of the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whale_nebula.errors import InputMismatchError, NebulaError, PlanMismatchError
from whale_nebula.transport import Link
from whale_nebula.transport.protocol import LinkTotals

Sheet = Mapping[str, Any]


@dataclass
class Session:
    """The links of this process to its peers (worker name to link), and how long it waits for them."""

    worker: str
    links: Mapping[str, Link]
    patience: float
    _last: dict[str, LinkTotals] = field(default_factory=dict)

    def hello(self, sheet: Sheet) -> Mapping[str, Sheet]:
        """Tell every peer who this process is; gives what each said. Unlike versions are refused."""
        self._post({"kind": "HELLO", "worker": self.worker, **sheet})
        told = self._take_all("HELLO")
        for peer, theirs in told.items():
            for name in ("whale_nebula", "tensorflow", "keras"):
                if theirs.get(name) != sheet.get(name):
                    raise PlanMismatchError(
                        f"{self.worker} runs {name} {sheet.get(name)}, and {peer} runs {theirs.get(name)}",
                        where=peer,
                        why="unlike versions trace unlike programs",
                        mend=f"install {name}=={sheet.get(name)} on both",
                    )
        return told

    def agree(self, program: str, digest: str, lines: Sequence[str], difference: Any) -> None:
        """All workers must have traced the same program; else each names the first difference."""
        self._post({"kind": "AGREE", "program": program, "digest": digest})
        told = self._take_all("AGREE")
        unlike = {peer: theirs for peer, theirs in told.items() if theirs["digest"] != digest}
        if not unlike and all(theirs["program"] == program for theirs in told.values()):
            return
        self._post({"kind": "LINES", "program": program, "lines": list(lines)})
        for peer, theirs in self._take_all("LINES").items():
            if peer in unlike or theirs["program"] != program:
                raise self._unlike(peer, program, theirs, difference(lines, theirs["lines"]))

    def _unlike(self, peer: str, program: str, theirs: Sheet, difference: str) -> PlanMismatchError:
        return PlanMismatchError(
            f"{self.worker} traced {program!r} and {peer} traced {theirs['program']!r}: they are not the same",
            where=peer,
            why=difference,
            mend="run the same script with the same arguments and the same kind of batch in every process",
        )

    def start_step(self, sheet: Sheet) -> None:
        """Announce a step: program, number, rows and fingerprints."""
        self._post({"kind": "STEP", **sheet})

    def check_step(self, sheet: Sheet) -> None:
        """Every peer must have announced the same step of the same program on the same rows."""
        for peer, theirs in self._take_all("STEP").items():
            if (theirs["program"], theirs["step"]) != (sheet["program"], sheet["step"]):
                raise PlanMismatchError(
                    f"{self.worker} is at step {sheet['step']} of {sheet['name']!r}, "
                    f"{peer} at step {theirs['step']} of {theirs['name']!r}",
                    where=peer,
                    why="the processes no longer do the same: a callback or a condition went another way in one",
                    mend="let every process decide alike: by returned values, which all processes get",
                )
            self._same_rows(peer, sheet, theirs)

    def _same_rows(self, peer: str, sheet: Sheet, theirs: Sheet) -> None:
        shared = sheet["inputs"].keys() & theirs["inputs"].keys()
        bad = [name for name in sorted(shared) if sheet["inputs"][name] != theirs["inputs"][name]]
        if sheet["rows"] != theirs["rows"] or bad:
            what = f"input {bad[0]!r}" if bad else "the number of rows"
            raise InputMismatchError(
                f"{what} differs between {self.worker} and {peer} at step {sheet['step']}",
                where=peer,
                why="each process reads its own copy of the data, and the copies are not in the same order",
                mend="shuffle with a seed: dataset.shuffle(n, seed=1), or fit(shuffle=False)",
            )

    def _post(self, message: dict[str, Any]) -> None:
        for link in self.links.values():
            link.post(message)

    def _take_all(self, kind: str) -> dict[str, dict[str, Any]]:
        return {peer: link.take(kind, self.patience) for peer, link in self.links.items()}

    def fail(self, failure: BaseException) -> None:
        """Tell every peer that this process failed."""
        parts = {"what": str(failure)}
        if isinstance(failure, NebulaError):
            parts = {"what": failure.what, "where": failure.where, "why": failure.why, "mend": failure.mend}
        for link in self.links.values():
            link.fail(parts)

    def close(self) -> None:
        """End in order."""
        for link in self.links.values():
            link.close()
