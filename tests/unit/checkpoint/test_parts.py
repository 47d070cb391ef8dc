"""Written parts that were not committed: which of them make a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.manifest import Manifest, Part, Position
from whale_nebula.checkpoint.parts import (
    Start,
    WrittenPart,
    describe_parts,
    describe_waiting,
    join_parts,
    list_uncommitted,
    write_document,
)
from whale_nebula.errors import RemoteProtocolError

WORKERS = ("c0/0", "c0/1", "c1/0")
START = Start("token", WORKERS)
POSITION = Position(7, 1, 0, 7, program="model.train_step", logs={"loss": 0.5})
SHARED_WORKERS, OTHER_DIGEST = "c0/0 c0/1", "its digest"


def create_part(
    worker: str, position: Position = POSITION, start: Start = START, attempt: int = 0, **more: Any
) -> WrittenPart:
    return WrittenPart(Part(worker, {}), {}, Manifest(position, attempt=attempt), start, **more)


def create_parts_with_change(worker: str, **change: Any) -> dict[str, WrittenPart]:
    """The parts of all workers, one of which differs."""
    return {**{each: create_part(each) for each in WORKERS}, worker: create_part(worker, **change)}


def create_inexact_parts(of: str, *shared: str, exact: bool = False) -> dict[str, WrittenPart]:
    """Parts that were not taken at one line, with digests of what is shared; None is none."""
    return {
        worker: create_part(worker, exact=exact and worker != of, shared={SHARED_WORKERS: each} if each else None)
        for worker, each in zip(WORKERS, shared, strict=True)
    }


CASES = {
    "all": (create_parts_with_change("c0/0"), ""),
    "results that are read elsewhere": (create_parts_with_change("c1/0", position=replace(POSITION, logs={})), ""),
    "none of one": ({each: create_part(each) for each in WORKERS[:2]}, "c1/0 has no part of it"),
    "another batch": (
        create_parts_with_change("c0/1", position=replace(POSITION, batch=6)),
        "c0/0 and c0/1 saved at different points",
    ),
    "another epoch": (
        create_parts_with_change("c1/0", position=replace(POSITION, epoch=1, batch=0)),
        "c0/0 and c1/0 saved at different points",
    ),
    "another start": (
        create_parts_with_change("c1/0", start=Start("earlier", WORKERS)),
        "c0/0 and c1/0 saved at different points",
    ),
    "another attempt": (create_parts_with_change("c1/0", attempt=1), "c0/0 and c1/0 saved at different points"),
    "more workers before": (
        {each: create_part(each, start=Start("token", (*WORKERS, "c1/1"))) for each in WORKERS},
        "c1/1 has no part of it",
    ),
    "fewer workers before": ({each: create_part(each, start=Start("token", WORKERS[:2])) for each in WORKERS[:2]}, ""),
    "a worker that is gone": (
        {each: create_part(each, start=Start("token", (*WORKERS, "c1/1"))) for each in (*WORKERS, "c1/1")},
        "",
    ),
    "the same shared variables": (create_inexact_parts("c0/0", "d", "d", "d"), ""),
    "some at another line": (create_inexact_parts("c0/0", "d", "d", "d", exact=True), ""),
    "other shared variables": (
        create_inexact_parts("c0/0", "d", OTHER_DIGEST, "d"),
        "variables that c0/0 and c0/1 share had changed",
    ),
    "unknown shared variables": (
        create_inexact_parts("c0/0", "d", "", "d", exact=True),
        "the variables that c0/1 shares with others could not",
    ),
    "one line": (create_inexact_parts("", "", "", "", exact=True), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_are_joined_only_if_all_are_of_one_moment(name: str) -> None:
    parts, why = CASES[name]
    hosts = [{7: {w: each for w, each in parts.items() if w.startswith(host)}} for host in ("c0", "c1")]
    descriptions = {f"{host}/0": describe_parts(each) for host, each in zip(("c0", "c1"), hosts, strict=True)}
    (found,) = join_parts(descriptions)
    assert found == join_parts(dict(reversed(descriptions.items())))[0]
    assert found.why.startswith(why) and bool(found.why) == bool(why)
    assert found.digests == ({} if why else {worker: each.part.digest for worker, each in parts.items()})
    assert found.holders == ({} if why else {worker: f"{worker[:2]}/0" for worker in parts})
    (found,) = join_parts({each: describe_parts({7: parts}) for each in ("c0/0", "c1/0")})  # one folder of two hosts
    assert set(found.holders.values()) == (set() if why else {"c0/0"})


def test_join_lists_the_newest_step_first() -> None:
    half = {worker: create_part(worker, replace(POSITION, step=8)) for worker in WORKERS[:2]}
    found = join_parts({"c0/0": describe_parts({7: create_parts_with_change("c0/0"), 8: half})})
    assert [(each.step, bool(each.why)) for each in found] == [(8, True), (7, False)]
    assert join_parts({"c0/0": [], "c1/0": []}) == []
    with pytest.raises(RemoteProtocolError, match="in an unknown format"):
        join_parts({"c0/0": [[7, "c0/0"]]})


def test_uncommitted_parts_are_listed_and_described(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    for step, workers in {6: WORKERS, 7: WORKERS, 8: WORKERS[:1]}.items():
        for worker in workers:
            path = Path(folder.worker_path(step, worker))
            path.mkdir(parents=True)
            write_document(str(path), create_part(worker, replace(POSITION, step=step)))
    folder.commit(Manifest(replace(POSITION, step=6)))
    (tmp_path / "step-00000008" / ".c0-1").mkdir()  # a part that was not finished
    assert {step: sorted(parts) for step, parts in list_uncommitted(folder, WORKERS[2:]).items()} == {
        8: ["c0/0"],
        7: ["c0/0", "c0/1"],
    }
    texts = [describe_waiting(folder.step_path(step)) for step in (7, 8, 9)]
    assert texts == [
        "parts of c0/0, c0/1, c1/0: the next start of the run uses them",
        "parts of c0/0: the next start of the run uses them, if it also finds that of c0/1",
        "",
    ]


def test_part_without_a_start_has_no_moment() -> None:
    """As those that `nb.save` writes."""
    assert create_part("c0/0", start=Start()).moment == "" and replace(create_part("c0/0"), manifest=None).moment == ""
