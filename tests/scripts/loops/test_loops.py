"""Every script of the book gives under `@nb.function` what it gives under `@tf.function`.

Here a fifth of them is cut in one way, another one for each, with `--grid` most; `grid.py` cuts all in every way.
"""

from __future__ import annotations

import pytest

import whale_nebula as nb
from tests.scripts.loops.book import Cut, Script, assert_same, opened, run

CUTS = ((3, 4), (2, 2), (3, 1), (1, 2), (2, 4), (3, 2), (2, 1))
SCRIPTS = opened()


def one_cut(number: int, script: Script) -> Cut:
    """The first of the cuts, from a place that moves on from script to script, that is natural for this one."""
    turned = CUTS[number % len(CUTS) :] + CUTS[: number % len(CUTS)]
    return next(Cut(s, m) for s, m in turned if s in script.stages and m in script.micro)


OFTEN = [name for name, script in SCRIPTS.items() if not script.rarely]
CASES = [(name, one_cut(number, SCRIPTS[name])) for number, name in enumerate(OFTEN)]
IDS = {case: f"{case[0]}-{case[1].stages}x{case[1].micro_batches}" for case in CASES}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cut" in metafunc.fixturenames:
        chosen = CASES if metafunc.config.getoption("--grid", default=False) else CASES[::5]
        metafunc.parametrize(("name", "cut"), chosen, ids=[IDS[case] for case in chosen])


@pytest.fixture(autouse=True)
def closed():
    """Every test opens its own run."""
    nb.shutdown()
    yield
    nb.shutdown()


def test_a_loop_is_the_same(name: str, cut: Cut) -> None:
    script = SCRIPTS[name]
    plain, found = run(script.build, Cut(0)), run(script.build, cut)
    assert found.stages == cut.stages * script.passes
    assert_same(plain, found)


@pytest.mark.parametrize("name", ["tapes.persistent_two_losses", "nested.scopes_inside", "optimizers.v1_minimize"])
def test_over_links_too(name: str) -> None:
    """Actors and memory links: the loop does not know."""
    nb.init(links="10gbit,0ms")
    script = SCRIPTS[name]
    assert_same(run(script.build, Cut(0)), run(script.build, Cut(3, 4)))


def test_the_comparison_would_notice() -> None:
    """The same script with another batch is not the same."""
    script = SCRIPTS["edited.scaled"]
    other = run(lambda cut: _halved(script.build(cut)), Cut(2, 2))
    with pytest.raises(AssertionError):
        assert_same(run(script.build, Cut(0)), other)


def _halved(loop):
    loop.calls = [(0.5 * x, y) for x, y in loop.calls]
    return loop
