"""A scope that is made and never entered holds nothing: said where a model without scopes is about to run."""

import warnings
from typing import Any

import pytest

import whale_nebula as nb
from whale_nebula.errors import NebulaWarning
from whale_nebula.scopes import hints
from whale_nebula.scopes.placing import placement


def told() -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", NebulaWarning)
        hints.warn_unscoped("small")
    return [str(each.message) for each in found]


def test_a_stage_without_with_is_told_once_with_the_line_that_was_meant() -> None:
    nb.stage(cluster="gpu")
    (message,) = told()
    assert message.startswith("NB-900 nb.stage(cluster='gpu') is never entered")
    assert "model 'small' runs uncut" in message
    assert "with nb.stage(cluster='gpu'):" in message
    assert told() == []


def test_what_is_entered_is_not_told() -> None:
    with nb.cluster():
        pass
    assert told() == []


def test_a_scope_that_is_entered_later_is_not_told() -> None:
    made = nb.pipeline(2)
    with made:
        pass
    assert told() == []


def test_a_line_whose_scope_is_entered_sometimes_is_not_told() -> None:
    for used in (True, False):
        scope: Any = nb.cluster()
        if used:
            with scope:
                pass
    assert told() == []


def test_a_stage_that_is_given_to_a_map_of_places_is_not_told() -> None:
    placement({"a": nb.stage(cluster="gpu", name="head")})
    assert told() == []


@pytest.mark.filterwarnings("error")
def test_without_any_nothing_is_said() -> None:
    hints.warn_unscoped("small")


def test_a_scope_that_was_refused_is_not_told_again() -> None:
    with pytest.raises(nb.errors.ScopeError, match="is no decorator"):
        nb.stage(cluster="gpu")(lambda x: x)
    assert told() == []
