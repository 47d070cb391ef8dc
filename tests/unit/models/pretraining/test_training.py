"""A step of pretraining: only what is needed crosses, and networks that do not fit are refused."""

import pytest

import whale_nebula as nb
from tests.unit.models.pretraining.small_pretraining import LENGTH, SIZES, batches, make_step, pretraining, stages
from whale_nebula.errors import OptionError
from whale_nebula.models import Bert, BertSizes, masked_lm
from whale_nebula.models.pretraining import Corruption, Discriminator, Objectives, Pretraining

HOW = Corruption(mask=4, end=3, special=(0, 2, 3))


@pytest.mark.parametrize("correction", [1.0, pytest.param(0.0, marks=pytest.mark.grid)])
def test_nothing_but_ids_and_bits_crosses_and_nothing_comes_back(correction: float) -> None:
    model = pretraining(objectives=Objectives(correction=correction), adam=False)
    ((numbers, texts),) = batches(("all",), (6,), 1)
    plan = nb.plan(make_step(model, stages()), numbers, texts)
    crossing = [("bool", (None, LENGTH)), ("int32", (None, LENGTH))]
    crossing += [("int32", (None, model.corruption.count(LENGTH)))] if correction else []
    assert sorted((each.dtype, each.shape) for each in plan.boundaries) == sorted(crossing)
    assert {(each.source, each.destinations) for each in plan.boundaries} == {("all", ("discriminator",))}
    assert {each.codec for each in plan.boundaries} == {"bits"}


def test_networks_of_several_vocabularies_are_refused() -> None:
    other = BertSizes(vocabulary=9, length=LENGTH, width=8, heads=2, layers=1, inner=16)
    with pytest.raises(OptionError, match="several vocabularies"):
        Pretraining({"all": masked_lm(Bert(SIZES))}, Discriminator(Bert(other, name="kept")), HOW)


def test_a_discriminator_that_cannot_correct_is_refused() -> None:
    kept = Discriminator(Bert(SIZES, name="kept"), corrects=False)
    with pytest.raises(OptionError, match="the head that corrects"):
        Pretraining({"all": masked_lm(Bert(SIZES))}, kept, HOW)


@pytest.mark.parametrize("names", [(), ("discriminator",)])
def test_generators_have_names_of_their_own(names: tuple[str, ...]) -> None:
    generators = {name: masked_lm(Bert(SIZES, name=name)) for name in names}
    with pytest.raises(OptionError, match="generators called"):
        Pretraining(generators, Discriminator(Bert(SIZES, name="kept")), HOW)
