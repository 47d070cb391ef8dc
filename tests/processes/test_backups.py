"""Keras's callbacks that write files, in two processes: one writes, and training goes on where it was broken off."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.processes.running import Ended, several

NAMES = ["latest.weights.h5", "training_metadata.json"]
OWN = ["latest.c0.weights.h5", "latest.c1.weights.h5", "training_metadata.json"]
HOW = ("backing", "backing_own")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ended]:
    asked = {name: [tmp_path_factory.mktemp(name)] for name in HOW}
    asked["backing"] = [*asked["backing"], "kept"]
    found = several(tmp_path_factory.mktemp("pair"), asked)
    found["backing"].result.check()
    return found


@pytest.mark.parametrize("how", HOW)
def test_a_training_that_was_broken_off_goes_on(runs: Mapping[str, Ended], how: str) -> None:
    unbroken = runs[how].same("unbroken")
    assert runs[how].same("begun again") == {name: values[1:] for name, values in unbroken.items()}


@pytest.mark.parametrize(("how", "files"), [("backing", NAMES), ("backing_own", OWN)])
def test_one_process_writes_the_backup_and_removes_it_at_the_end(
    runs: Mapping[str, Ended], how: str, files: list[str]
) -> None:
    assert runs[how].same("files") == files and runs[how].same("gone") is True


def test_one_that_is_kept_keeps_the_one_before(runs: Mapping[str, Ended]) -> None:
    assert runs["backing"].same("kept") == sorted([*NAMES, *(f"{name}.bkp" for name in NAMES)])


def test_all_may_make_the_folder_of_a_checkpoint(runs: Mapping[str, Ended]) -> None:
    assert runs["backing"].same("each") == ["1", "2", "3"]
