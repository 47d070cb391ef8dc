"""The kind of ABNet by the name of its objective."""

import pytest

from tests.unit.models.small import SOURCE, TARGET
from whale_nebula.errors import OptionError
from whale_nebula.models import ABNet, Bert, CausalABNet, MaskedABNet


@pytest.mark.parametrize(("objective", "kind"), [({}, CausalABNet), ({"objective": "cmlm"}, MaskedABNet)])
def test_the_objective_says_which(objective: dict, kind: type) -> None:
    model = ABNet(Bert(SOURCE, name="es"), Bert(TARGET, name="en"), inner=4, **objective)
    assert type(model) is kind


def test_one_that_is_not_there_is_refused_with_a_mend() -> None:
    with pytest.raises(OptionError, match="objective='casual' is not a valid value") as caught:
        ABNet(Bert(SOURCE, name="es"), Bert(TARGET, name="en"), objective="casual")
    assert "causal" in caught.value.mend
