"""A step of pretraining: only necessary data crosses, and networks that do not match are refused."""

import pytest
import tensorflow as tf

from tests.unit.models.pretraining.small_pretraining import LENGTH, SIZES
from whale_nebula.errors import OptionError
from whale_nebula.models import Bert, BertSizes, masked_lm
from whale_nebula.models.pretraining import Corruption, Discriminator, Pretraining

HOW = Corruption(mask=4, end=3, special=(0, 2, 3))


def test_networks_with_different_vocabularies_are_refused() -> None:
    other = BertSizes(vocabulary=9, length=LENGTH, width=8, heads=2, layers=1, inner=16)
    with pytest.raises(OptionError, match="different vocabularies"):
        Pretraining({"all": masked_lm(Bert(SIZES))}, Discriminator(Bert(other, name="kept")), HOW)


def test_discriminator_without_correction_head_is_refused() -> None:
    kept = Discriminator(Bert(SIZES, name="kept"), corrects=False)
    with pytest.raises(OptionError, match="no correction head"):
        Pretraining({"all": masked_lm(Bert(SIZES))}, kept, HOW)


def test_update_without_optimizers_is_refused() -> None:
    model = Pretraining({"all": masked_lm(Bert(SIZES))}, Discriminator(Bert(SIZES, name="kept")), HOW)
    with pytest.raises(OptionError, match="no optimizer for all, discriminator"):
        model.update(tf.GradientTape(persistent=True), {})


@pytest.mark.parametrize("names", [(), ("discriminator",)])
def test_invalid_generator_names_are_refused(names: tuple[str, ...]) -> None:
    generators = {name: masked_lm(Bert(SIZES, name=name)) for name in names}
    with pytest.raises(OptionError, match="invalid generators"):
        Pretraining(generators, Discriminator(Bert(SIZES, name="kept")), HOW)
