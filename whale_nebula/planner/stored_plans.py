"""Plans that were searched in advance, in the user's cache: their shapes, by a digest of the problem that they solve.

`python -m whale_nebula.planner.stored_plans` searches the problems on its standard input, a line of JSON each, with low
priority on one core, and stores what it finds.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import numpy as np

from whale_nebula.hardware.measurements import cache_path, fingerprint
from whale_nebula.plain import from_plain, to_plain, write_json
from whale_nebula.planner.problem import Candidate, Excess, Problem, Shape
from whale_nebula.planner.score import score
from whale_nebula.planner.search import search

FORMAT = "whale_nebula plans 1"
MOST_PLANS = 200
"""The most problems whose plans are stored, the latest ones."""
CPU_SECONDS = 600
"""The seconds of a core after which a search in advance is ended."""
_NICE = 15
"""The niceness of a search: on a core that trains all the time it gets about 3 % of it."""
_READ_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError)
"""The exceptions of reading a missing or invalid file."""
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class StoredPlan:
    """The best plans of a problem, the best first, and the date of the search; if none is feasible, the excess of the
    one that came closest.
    """

    date: str
    shapes: tuple[Shape, ...] = ()
    excess: Excess | None = None


@dataclass(frozen=True)
class _PlansFile:
    format: str
    plans: Mapping[str, StoredPlan] = field(default_factory=dict)


def plans_path() -> Path:
    """The file of stored plans; machines that share a cache have one each."""
    number = hashlib.sha256(fingerprint().encode()).hexdigest()[:12]
    return cache_path().with_name(f"plans-{number}.json")


def format_problem(problem: Problem) -> str:
    """A problem as a line of JSON, from which `parse_problem` makes an equal one."""
    return json.dumps(to_plain(problem), default=lambda array: array.tolist(), separators=(",", ":"))


def parse_problem(text: str) -> Problem:
    """Parse the output of `format_problem`."""
    found: Problem = from_plain(Problem, json.loads(text))
    chain = replace(_restore_arrays(found.chain), codecs=tuple(map(_restore_arrays, found.chain.codecs)))
    return replace(found, chain=chain, clusters=tuple(map(_restore_arrays, found.clusters)))


def _restore_arrays(record: _Record) -> _Record:
    """The record with arrays in place of lists."""
    named = {each.name: getattr(record, each.name) for each in fields(record)}  # type: ignore[arg-type]
    arrays = {
        name: np.array(value, bool if name == "cuttable" else float)
        for name, value in named.items()
        if isinstance(value, list)
    }
    return replace(record, **arrays)  # type: ignore[type-var]


def digest_problem(problem: Problem) -> str:
    """The digest of everything that determines the plans of a problem: itself, and the code that searches them."""
    return hashlib.sha256(f"{_digest_code()}\n{format_problem(problem)}".encode()).hexdigest()


@functools.cache
def _digest_code() -> str:
    """The digest of the source of the planner and of the simulator."""
    package = Path(__file__).parent
    paths = sorted([*package.glob("*.py"), *(package.parent / "schedule").glob("*.py")])
    return hashlib.sha256(b"".join(each.read_bytes() for each in paths)).hexdigest()


def read_plans() -> dict[str, StoredPlan]:
    """The stored plans, by the digests of their problems; empty if the file is missing or invalid."""
    try:
        document = json.loads(plans_path().read_text("utf-8"))
        found: _PlansFile = from_plain(_PlansFile, document)
    except _READ_ERRORS:
        return {}
    return dict(found.plans) if found.format == FORMAT else {}


def save_plan(problem: Problem, plan: StoredPlan) -> None:
    """Add the plans of a problem to the file."""
    every = {**read_plans(), digest_problem(problem): plan}
    newest = dict(sorted(every.items(), key=lambda item: item[1].date)[-MOST_PLANS:])
    plans_path().parent.mkdir(parents=True, exist_ok=True)
    write_json(plans_path(), to_plain(_PlansFile(FORMAT, newest)), indent=None)


def find_stored_plan(problem: Problem) -> tuple[tuple[Candidate, ...], str]:
    """The candidates that a search has found in advance for exactly this problem, and its date; none and "" if it was
    not searched, or if what is stored is no plan of it.
    """
    found = read_plans().get(digest_problem(problem))
    candidates = () if found is None else restore_candidates(problem, found)
    return candidates, found.date if found is not None and candidates else ""


def restore_candidates(problem: Problem, stored: StoredPlan) -> tuple[Candidate, ...]:
    """The candidates of a problem's stored plan; none if what is stored is no plan of it."""
    candidates = list[Candidate]()
    for shape in stored.shapes:
        try:
            each = score(problem, shape) if problem.admits(shape) else None
        except _READ_ERRORS:  # a file that someone has changed
            each = None
        if not isinstance(each, Candidate):
            return ()
        candidates.append(each)
    return tuple(candidates)


def search_in_advance(lines: Iterable[str]) -> None:
    """Search the plans of the problems that are not stored, a line of JSON each, and store them."""
    for line in lines:
        problem = parse_problem(line)
        if digest_problem(problem) not in read_plans():
            found = search(problem)
            shapes = tuple(each.shape for each in found.candidates)
            save_plan(problem, StoredPlan(datetime.now(UTC).isoformat(timespec="seconds"), shapes, found.excess))


def limit_process() -> None:
    """Give this process a low priority, and a limited time."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def list_unknown(problems: Sequence[Problem]) -> list[Problem]:
    """The problems that are not stored."""
    known = read_plans()
    return [each for each in problems if digest_problem(each) not in known]


if __name__ == "__main__":
    limit_process()
    search_in_advance(sys.stdin)
