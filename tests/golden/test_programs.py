"""The text of named programs after every pass, and the digests of their plans, in a golden file for each program."""

from collections.abc import Callable
from dataclasses import replace

import keras
import pytest

import whale_nebula as nb
from tests.golden.files import FOLDER, check_golden
from tests.golden.programs import PROGRAMS
from whale_nebula.passes.pipeline import CAPTURED, PIPELINE


def list_passes(make: Callable[[], nb.Plan]) -> list[str]:
    """The text after each pass of a program, below its digests."""
    keras.utils.clear_session(free_memory=False)
    plan = make()
    portable = replace(plan, versions={}, threads={})
    head = [f"program digest {plan.program_digest}", f"plan digest, without versions and threads, {portable.digest}"]
    texts = [f"\n{plan.text_after(name)}" for name in (CAPTURED, *(each.name for each in PIPELINE))]
    return [f"program {make.__name__}: {(make.__doc__ or '').splitlines()[0]}", *head, *texts]


@pytest.mark.parametrize("name", PROGRAMS)
def test_texts_after_all_passes_match_the_golden_file(name: str, request: pytest.FixtureRequest) -> None:
    check_golden(request, f"programs/{name}.txt", "\n".join(list_passes(PROGRAMS[name])))


def test_program_golden_files_all_belong_to_a_program() -> None:
    assert {path.stem for path in (FOLDER / "programs").iterdir()} == set(PROGRAMS)
