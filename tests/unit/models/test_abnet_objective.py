"""The kind of ABNet by the name of its objective."""

import pytest

from tests.unit.models.small_translators import SOURCE, TARGET
from whale_nebula.errors import OptionError
from whale_nebula.models import ABNet, Bert, CausalABNet, MaskedABNet


@pytest.mark.parametrize(("objective", "kind"), [({}, CausalABNet), ({"objective": "cmlm"}, MaskedABNet)])
def test_objective_selects_the_kind_of_abnet(objective: dict, kind: type) -> None:
    model = ABNet(Bert(SOURCE, name="es"), Bert(TARGET, name="en"), inner=4, **objective)
    assert type(model) is kind


def test_unknown_objective_is_refused_with_a_fix() -> None:
    with pytest.raises(OptionError, match="objective='casual' is not a valid value") as caught:
        ABNet(Bert(SOURCE, name="es"), Bert(TARGET, name="en"), objective="casual")
    assert "causal" in caught.value.mend
